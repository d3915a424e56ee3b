"""Sequential mode: what this producer incarnation was asked for and has not answered, and the policy that is taken up for it.

Refuses to act on requests of other runs and to other incarnations, and to hold the same groups twice: what is asked for again
while it is in hand, or after it was answered, is left alone.
"""

import threading
from collections.abc import Callable

import structlog

from echo import control
from echo.control import Request
from echo.errors import ControlError
from echo.log import LogReader, LogRecord
from producers.engines.base import Engine, Policy
from producers.policy import PolicyPuller
from producers.topic_follower import TopicFollower

log = structlog.get_logger("requests")

# It is told with every heartbeat.
_WHY_CHARS = 500


class RequestListener:
    """Reads the requests topic from its beginning and for ever: an incarnation is asked for nothing before it lives.

    `changed` is notified at every change. partitions: how many the topic has now.
    """

    def __init__(
        self,
        open_reader: Callable[[], LogReader],
        topic: str,
        partitions: Callable[[], int],
        *,
        run_id: str,
        incarnation: str,
        changed: threading.Condition,
    ) -> None:
        self._follower = TopicFollower(open_reader, topic, partitions, self._take_all, changed=changed, name="request-listener")
        self._run_id = run_id
        self._incarnation = incarnation
        self._changed = changed
        self._held: tuple[Request, ...] = ()
        # Groups of the newest version that were answered: one that is older is not asked for any more.
        self._answered: set[str] = set()
        self._answered_version = -1
        # Requests of the newest version that will not be answered, and why.
        self._given_up: dict[str, str] = {}
        self._given_up_version = -1

    def start(self) -> "RequestListener":
        self._follower.start()
        return self

    @property
    def held(self) -> tuple[Request, ...]:
        """Requests that are neither answered nor given up, oldest first."""
        with self._changed:
            return self._held

    @property
    def given_up(self) -> dict[str, str]:
        """Why requests were given up, by their ids: those of the newest version that any was given up of."""
        with self._changed:
            return dict(self._given_up)

    def answered(self, request: Request) -> None:
        """All of its groups are handed to the publisher."""
        with self._changed:
            if request.version > self._answered_version:
                self._answered, self._answered_version = set(), request.version
            self._answered.update(request.group_ids)
            self._let_go(request)

    def give_up(self, request: Request, why: str) -> None:
        """It will not be answered, or not in full: the same groups may be asked for again."""
        with self._changed:
            if request.version > self._given_up_version:
                self._given_up, self._given_up_version = {}, request.version
            self._given_up[request.request_id] = why[:_WHY_CHARS]
            self._let_go(request)

    def give_up_before(self, version: int) -> None:
        """Nobody wants what older versions would sample."""
        with self._changed:
            self._held = tuple(one for one in self._held if one.version >= version)

    @property
    def last_error(self) -> str:
        """See `TopicFollower.last_error`."""
        return self._follower.last_error

    def check(self) -> None:
        """Raise what ended the listening, if anything did."""
        self._follower.check()

    def close(self) -> None:
        self._follower.close()

    def _let_go(self, request: Request) -> None:
        self._held = tuple(one for one in self._held if one is not request)
        self._changed.notify_all()

    def _take_all(self, records: list[LogRecord], at_end: bool) -> None:
        for record in records:
            self._take(record)

    def _take(self, record: LogRecord) -> None:
        if record.key != self._incarnation.encode():
            return
        try:
            request = control.decode_request(record.value, record.where)
        except ControlError as error:
            log.warning("request skipped", error=str(error))
            return
        if request.run_id != self._run_id or request.producer != self._incarnation or not request.group_ids:
            return
        with self._changed:
            in_hand = any(one.group_ids == request.group_ids for one in self._held)
            done = request.version == self._answered_version and self._answered.issuperset(request.group_ids)
            if in_hand or done:
                log.info("asked again for what is in hand or was answered", request=request.request_id)
                return
            self._held = (*self._held, request)
            self._changed.notify_all()


class Refresher:
    """Takes up the version that a request names before it is sampled.

    swap: loads a policy into the engine. always: pull for every request, also where its version serves already.
    """

    def __init__(self, puller: PolicyPuller, engine: Engine, swap: Callable[[Policy], None], *, always: bool) -> None:
        self._puller = puller
        self._engine = engine
        self._swap = swap
        self._always = always
        self._request: Request | None = None
        self._is_pulled = False

    def is_fresh(self, request: Request) -> bool:
        """Whether the engine serves what the request names, pulled as the run wants it; asks for a pull where one is due.

        Call it again until it is so. The request's version is the newest announced one.
        """
        if self._request is not request:
            self._request = request
            self._is_pulled = not self._always and self._engine.policy_version >= request.version
            if not self._is_pulled:
                self._puller.refresh()
        policy = self._puller.take_policy()
        if policy is not None:
            self._is_pulled = policy.version >= request.version
            # It may be the one that serves already: pulled and verified anew, there is nothing to swap.
            if policy.version > self._engine.policy_version:
                self._swap(policy)
        return self._is_pulled and self._engine.policy_version == request.version
