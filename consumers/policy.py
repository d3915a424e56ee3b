"""Publishing a policy: weights durable and servable first, then announced, then pulled by every producer.

Refuses to announce what is not stored. All control messages go through one transactional producer whose id is the run id:
a second trainer of the same run fences this one, which then stops with `FencedError`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import structlog

from echo import control
from echo.control import Announcement, ControlMessage, EndOfRun, Grant, Progress, Request
from echo.errors import BrokerError, ControlError, EchoError
from echo.log import BEGINNING, LogReader, LogTransactions
from echo.waiting import Watch
from echo.weights.manifest import Adapter, Canary, HostTensor
from echo.weights.store import Published, WeightStore
from echo.weights.urls import manifest_url

log = structlog.get_logger("policy")

# As long as a record waits for the broker by the client's defaults (`delivery.timeout.ms`): who samples and who trains bear the
# same outages.
_SEND_DEADLINE_S = 300.0
# A call that fails at once is not repeated at once.
_PAUSE_S = 0.5

MessageT = TypeVar("MessageT", bound=ControlMessage)


class ControlWriter:
    """The only writer of this run's control messages and requests.

    Thread safe: the trainer announces and asks, the fleet thread sends progress. What fails and may succeed later is sent
    again, for `deadline_s` at most or until `close`; all that comes after it waits, so that the order stays. A message may then
    stand in the log twice in a row.
    waiting_s: how often such a wait speaks. check_topics: raises if a topic is gone: then there is nothing to wait for.
    """

    def __init__(
        self,
        sender: LogTransactions,
        topic: str,
        *,
        deadline_s: float = _SEND_DEADLINE_S,
        waiting_s: float = 30.0,
        pause_s: float = _PAUSE_S,
        check_topics: Callable[[], None] = lambda: None,
    ) -> None:
        self._sender = sender
        self._check_topics = check_topics
        self._topic = topic
        self._deadline_s = deadline_s
        self._waiting_s = waiting_s
        self._pause_s = pause_s
        self._sequence = -1
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def go_on_after(self, sequence: int) -> None:
        """Of the run's newest message that can be seen. Call it before the first `send` of a resumed run."""
        # One more may have been committed and not be shown yet (see `PolicyPublisher.end`): its number is not used again.
        self._sequence = sequence + 1

    def send(self, make: Callable[[int], MessageT]) -> MessageT:
        """Make the next message, with its sequence number, and commit it: the log has messages in the order of their numbers.

        Raises BrokerError, FencedError; the number is used up all the same.
        """
        with self._lock:
            self._sequence += 1
            message = make(self._sequence)
            self._commit(self._topic, [(control.key(message), control.encode(message))])
            return message

    def ask(self, topic: str, requests: Sequence[Request]) -> None:
        """Commit requests to their topic, together: no trainer that was fenced asks for anything.

        Raises BrokerError, FencedError.
        """
        with self._lock:
            self._commit(topic, [(control.key(request), control.encode(request)) for request in requests])

    def close(self) -> None:
        # Who is sending gives up, else this would wait for it.
        self._closing.set()
        with self._lock:
            self._sender.close()

    def _commit(self, topic: str, messages: Sequence[tuple[bytes, bytes]]) -> None:
        last = ""
        watch = Watch(f"the broker to take messages for topic {topic}", lambda: last, limit_s=self._waiting_s)
        while True:
            try:
                self._sender.send(topic, messages)
            except BrokerError as error:
                if not error.retriable or watch.waited_s >= self._deadline_s or self._closing.is_set():
                    raise
                self._check_topics()
                last = f"{len(messages)} messages, the last try: {error}"
                watch.check()
                self._closing.wait(self._pause_s)
            else:
                watch.progress()
                return


class AdapterBase(NamedTuple):
    """What an adapter is put on, and how. config: of the adapter's library. tensors: the frozen base, gathered when called."""

    config: Mapping[str, Any]
    tensors: Callable[[], Iterable[HostTensor]]


class Stored(NamedTuple):
    """A version that is durable and not announced yet. created: seconds since the epoch."""

    version: int
    step: int
    created: float
    published: Published


class PolicyPublisher:
    """Stores and announces policies of one run. `server_url` is where producers reach the weight server.

    agreement: what producers must have alike (`echo.agreement`), part of each message.
    """

    def __init__(
        self,
        *,
        run_id: str,
        store: WeightStore,
        writer: ControlWriter,
        server_url: str,
        chunk_bytes: int,
        keep: int,
        newest: int,
        delta_chain: int = 0,
        agreement: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._run_id = run_id
        self._agreement = dict(agreement)
        self._store = store
        self._writer = writer
        self._server_url = server_url
        self._chunk_bytes = chunk_bytes
        self._keep = keep
        self._delta_chain = delta_chain
        # Version and manifest digest of the base that adapters are for.
        self._base: tuple[int, str] | None = None
        self.newest = newest
        """The newest announced version, -1 before the first."""

    def store(
        self,
        *,
        step: int,
        tensors: Iterable[HostTensor],
        adapts: AdapterBase | None = None,
        canary: Canary | None = None,
    ) -> Stored:
        """Make the next version durable and servable; `announce` it then.

        adapts: the tensors are an adapter for this base, which is stored first, as a version that is not announced, if the
        store does not have it. canary: the policy's logprobs of a fixed text, for producers to compare with.
        Raises WeightsError.
        """
        created = time.time()
        adapter = self._adapter(adapts, step, created) if adapts is not None else None
        version, published = self._put(step, tensors, created, adapter, canary)
        return Stored(version, step, created, published)

    def announce(self, stored: Stored, *, grants: Callable[[int], Mapping[str, Grant]]) -> Announcement:
        """Announce what was stored, with the grants of that moment.

        grants: called with the message's sequence number, last thing before it is sent.
        Raises BrokerError, FencedError.
        """
        version, step, created, published = stored
        announcement = self._writer.send(
            lambda sequence: Announcement(
                run_id=self._run_id,
                sequence=sequence,
                version=version,
                step=step,
                manifest_urls=(manifest_url(self._server_url, self._run_id, version),),
                manifest_digest=published.digest,
                nbytes=published.manifest.nbytes,
                grants=dict(grants(sequence)),
                created=created,
                agreement=self._agreement,
            )
        )
        self.newest = version
        return announcement

    def _put(
        self,
        step: int,
        tensors: Iterable[HostTensor],
        created: float,
        adapter: Adapter | None = None,
        canary: Canary | None = None,
    ) -> tuple[int, Published]:
        stored = self._store.newest(self._run_id)
        # A version that was stored and never announced (a crash in between, an adapter's base) is not used again.
        version = max(self.newest, -1 if stored is None else stored) + 1
        return version, self._store.publish(
            self._run_id,
            version,
            step,
            tensors,
            chunk_bytes=self._chunk_bytes,
            keep=self._keep,
            created=created,
            delta_chain=self._delta_chain,
            adapter=adapter,
            canary=canary,
        )

    def _adapter(self, adapts: AdapterBase, step: int, created: float) -> Adapter:
        if self._base is None:
            # Once a life: which version it is depends on its bytes alone, whatever an earlier trainer published.
            self._base = self._store.find_full(self._run_id, adapts.tensors())
        if self._base is None:
            version, published = self._put(step, adapts.tensors(), created)
            self._base = (version, published.digest)
            log.info("base of the adapters stored", version=version, bytes=published.manifest.nbytes)
        version, digest = self._base
        return Adapter(model_version=version, model_digest=digest, config=dict(adapts.config))

    def progress(self, *, step: int, grants: Callable[[int], Mapping[str, Grant]]) -> None:
        """Tell producers their grants between announcements. `grants` as in `announce`."""
        self._writer.send(
            lambda sequence: Progress(
                run_id=self._run_id,
                sequence=sequence,
                version=self.newest,
                step=step,
                grants=dict(grants(sequence)),
                created=time.time(),
                agreement=self._agreement,
            )
        )

    def end(self, *, step: int, reason: str) -> None:
        """Tell producers that the run is over."""
        # Twice: Kafka confirms a commit before it shows it, and a node that is killed in between shows it only once the next
        # transaction has begun, which nothing else would do after the end.
        for _ in range(2):
            self._writer.send(
                lambda sequence: EndOfRun(
                    run_id=self._run_id, sequence=sequence, version=self.newest, step=step, reason=reason, created=time.time()
                )
            )


class Told(NamedTuple):
    """What the control topic says of a run so far: its newest version and message, -1 where there is none."""

    version: int
    sequence: int


def read_told(reader: LogReader, *, topic: str, run_id: str, waiting_s: float, deadline_s: float, held_s: float = 15.0) -> Told:
    """Read the control topic to its end: what was told for this run.

    held_s: how long a transaction that is still open is waited for. Kafka may never show the last message of a trainer that was
    killed with its broker, so reading then ends without it. Raises EchoError where the end is not reached within `deadline_s`.
    """
    told, held = Told(-1, -1), 0
    reader.assign({(topic, 0): BEGINNING})

    def describe() -> str:
        parts = [f"newest announced so far {told.version}"]
        if held:
            parts.append(f"a transaction that is still open holds back {held} offsets")
        if reader.last_error:
            parts.append(f"the client's last error: {reader.last_error}")
        return "; ".join(parts)

    watch = Watch("the end of the control topic", describe, limit_s=waiting_s)
    while not reader.at_end() or (held := sum(behind or 0 for behind in reader.lag().values())) > 0:
        if held > 0 and watch.waited_s > held_s:
            log.warning("the control topic is not read to its end", newest=told.version, why=describe())
            break
        for record in reader.read(1000, 0.2):
            watch.progress()
            try:
                message = control.decode_control(record.value, record.where)
            except ControlError as error:
                log.warning("control message skipped", error=str(error))
                continue
            if message.run_id == run_id:
                told = Told(max(told.version, message.version), max(told.sequence, message.sequence))
        watch.check()
        if watch.waited_s > deadline_s:
            raise EchoError(f"topic {topic!r} was not read to its end within {deadline_s:g} s: is the broker healthy?")
    return told
