"""Records in: a reader that is told which offsets to read and is trusted by nobody to remember them.

A batch that the client can't unpack is passed over, since no restart would ever get past it: its offsets are returned in its
place, once it is known where it ends (echo/kafka/batch_end.py).

Refuses consumer groups, commits, and every silent jump to another offset.
"""

import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from echo.errors import BrokerError, CorruptRecordError
from echo.kafka.batch_end import BatchEnd
from echo.kafka.client import (
    PRODUCER_ONLY,
    ClientErrors,
    SameCluster,
    Settings,
    build,
    client_settings,
    find_leaders,
    or_default,
    wrap_error,
)
from echo.log import BEGINNING, LogRecord, Partition

log = structlog.get_logger("kafka")

# Fewer, larger fetch answers: the embedded broker stalls a tail reader that asks for many small ones, and 100 ms is far
# below any learner step. The queue budget is librdkafka's prefetch, in KiB over all partitions.
_READER_DEFAULTS: dict[str, Any] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 100,
    "queued.max.messages.kbytes": 65536,
    # How long fetching rests once that is full. The client's own second is longer than it takes to read 64 MiB.
    "fetch.queue.backoff.ms": 20,
    # How long it rests after a batch that can't be unpacked: every question about the batch's end waits for it.
    "fetch.error.backoff.ms": 50,
    "check.crcs": True,
    "allow.auto.create.topics": False,
}

# What the client reports, again and again, for a batch that it can't unpack: a sum or a codec that is wrong, or more bytes than
# `receive.message.max.bytes`.
_UNREADABLE = frozenset({KafkaError._BAD_COMPRESSION, KafkaError._BAD_MSG, KafkaError._NOT_IMPLEMENTED})
# A reader of committed records gets no event for an offset that an open transaction holds back. After so long, it is taken for
# one that is outside of the batch; if it was inside, the rest of the batch is reported anew.
_HIDDEN_S = 10.0
# The client reports nothing at all for a batch whose records it can't tell apart, and asks for it for ever. A partition that
# gives nothing for so long although its log goes on is looked into: its leader is asked anything else, on the connection on
# which records come. When it has answered, it has answered what was asked for before, too.
_STALLED_S = 5.0
_ANSWER_S = 1.0
# From seeking an offset until the client has asked the broker for its records.
_SOUGHT_S = 1.0
# A transaction of ours is open for less: what holds back records for longer is a stranger's, or its holder is dead.
_HELD_S = 5.0


class _Passing:
    """A batch that is being passed over. first: as the client reports it. asked: the offset that was sought; None: none was.

    silent: the client does not report it. Then it is asked for once more before its end is looked for (`confirmed`).
    """

    def __init__(self, first: int, problem: str, search: BatchEnd, *, silent: bool) -> None:
        self.first = first
        self.problem = problem
        self.search = search
        self.silent = silent
        self.confirmed = not silent
        self.asked: int | None = None
        self.asked_at = 0.0


class KafkaLogReader:
    """Reads assigned partitions; remembers nothing in Kafka. See `LogReader`.

    cluster_id: of the cluster whose offsets will be assigned, where it is known (a checkpoint); None takes the first that
    answers. Another one ends reading with a BrokerError, at once or when the broker behind the address is replaced.
    beyond_end_s: how long a position may lie beyond the end of the log. A new leader in Kafka may show an older end for as
    long as a dead follower counts (replica.lag.time.max.ms, 30 s); the embedded broker shows it for ever and returns nothing.
    committed: for topics that are written in transactions: records of open and aborted ones are not returned. A topic without
    them is read with False, so that no open transaction of a stranger holds reading up.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        client_id: str,
        max_record_bytes: int,
        cluster_id: str | None = None,
        beyond_end_s: float = 45.0,
        committed: bool = True,
    ) -> None:
        self._errors = ClientErrors(client_id)
        self._cluster = SameCluster(cluster_id)
        self._beyond_end_s = beyond_end_s
        self._committed = committed
        defaults = {**_READER_DEFAULTS, "isolation.level": "read_committed" if committed else "read_uncommitted"}
        conf = client_settings(settings, defaults, client_id=client_id, drop=PRODUCER_ONLY)
        # librdkafka wants a group id even for manual assignment; nothing is ever committed under it.
        conf.setdefault("group.id", client_id)
        conf["fetch.message.max.bytes"] = max_record_bytes
        # Without room for the largest record and its batch, the client would never get past it.
        conf["fetch.max.bytes"] = max(52428800, max_record_bytes)
        conf["receive.message.max.bytes"] = max(100000000, 2 * max_record_bytes)
        conf["error_cb"] = self._errors
        self._consumer = build(Consumer, conf)
        self._lock = threading.Lock()
        self._assigned: set[Partition] = set()
        self._paused: set[Partition] = set()
        self._ends: set[Partition] = set()
        self._positions: dict[Partition, int] = {}
        self._beyond_since: dict[Partition, float] = {}
        self._passing: dict[Partition, _Passing] = {}
        self._seeks: dict[Partition, int] = {}
        self._held_since: dict[Partition, float] = {}
        self._held = ""
        self._stalled: dict[Partition, tuple[int, float]] = {}
        self._failed: BrokerError | None = None

    def assign(self, positions: Mapping[Partition, int]) -> None:
        wanted = [
            TopicPartition(topic, number, OFFSET_BEGINNING if offset == BEGINNING else offset)
            for (topic, number), offset in positions.items()
        ]
        # A client that has to look up an offset and knows no leader lets half a second pass.
        for topic in {topic for topic, _ in positions}:
            find_leaders(self._consumer, topic)
        self._cluster.learn(self._consumer)
        try:
            # The client would carry a pause over into the new assignment.
            self._consumer.resume([TopicPartition(*partition) for partition in self._paused])
            self._consumer.assign(wanted)
        except KafkaException as error:
            raise wrap_error(error.args[0], f"assigning {sorted(positions)}") from None
        with self._lock:
            self._assigned = set(positions)
            self._paused = set()
            self._ends = set()
            self._positions = {partition: offset for partition, offset in positions.items() if offset >= 0}
            self._beyond_since = {}
            self._passing = {}
            self._seeks = {}
            self._held_since = {}
            self._stalled = {}
            self._failed = None

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        self._check()
        try:
            # Asked for many, the client waits for all of them or the timeout: take what is there, and wait for one at most.
            messages = self._consumer.consume(max_records, 0) or self._consumer.consume(1, timeout_s)
        except KafkaException as error:
            raise wrap_error(error.args[0], "reading") from None
        records: list[LogRecord] = []
        with self._lock:
            for message in messages:
                if message.error() is not None:
                    self._on_error(message, records)
                else:
                    record = _record(message)
                    if self._fits(record, records):
                        records.append(record)
        if self._passing:
            self._break_silence(records)
        if self._seeks:
            self._seek()
        if not records:
            self._check()
        return records

    def pause(self, partitions: Iterable[Partition]) -> None:
        named = set(partitions)
        self._paused |= named
        self._consumer.pause([TopicPartition(*partition) for partition in named])

    def resume(self, partitions: Iterable[Partition]) -> None:
        named = set(partitions)
        self._paused -= named
        self._consumer.resume([TopicPartition(*partition) for partition in named])

    def at_end(self) -> bool:
        with self._lock:
            return self._ends >= self._assigned

    def lag(self) -> dict[Partition, int | None]:
        with self._lock:
            assigned, positions = set(self._assigned), dict(self._positions)
        found: dict[Partition, int | None] = {}
        for partition in assigned:
            position, high = positions.get(partition), self._high(partition)
            found[partition] = None if position is None or high is None else max(0, high - position)
        return found

    def close(self) -> None:
        self._consumer.close()

    @property
    def last_error(self) -> str:
        return self._held or self._errors.last

    def _high(self, partition: Partition) -> int | None:
        """The high watermark of the last fetch. Never asked of the broker: the embedded one answers that question wrongly."""
        _, high = self._consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
        return None if high < 0 else int(high)

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed
        self._errors.check("reader can't go on")
        if self._cluster.due():
            self._cluster.check(self._consumer)
            self._check_positions()
            if self._committed:
                self._check_held()
            else:
                self._check_stalled()

    def _check_positions(self) -> None:
        now = time.monotonic()
        with self._lock:
            positions = dict(self._positions)
        for partition, position in positions.items():
            high = self._high(partition)
            if high is None or position <= high:
                self._beyond_since.pop(partition, None)
            elif now - self._beyond_since.setdefault(partition, now) >= self._beyond_end_s:
                topic, number = partition
                self._failed = _no_such_offset(f"{topic}[{number}]@{position}", f"the log ends at {high}")
                raise self._failed

    def _check_held(self) -> None:
        """Notice a transaction that stays open: the end of what is committed is then before the end of the log."""
        now, behind = time.monotonic(), self.lag()
        with self._lock:
            held = {partition: behind.get(partition) or 0 for partition in self._ends}
        self._held_since = {
            partition: self._held_since.get(partition, now) for partition, offsets in held.items() if offsets > 0
        }
        long = [partition for partition, since in self._held_since.items() if now - since >= _HELD_S]
        before, self._held = self._held, ""
        if long:
            (topic, number), offsets = long[0], sum(held[partition] for partition in long)
            place = f"{topic}[{number}]@{self._positions[long[0]]}"
            self._held = (
                f"a transaction that is still open holds back {offsets} offsets from {place} on: the broker ends it at its "
                "timeout (transaction.timeout.ms of the client that began it)"
            )
            if not before:
                log.warning("reading is held up", where=place, error=self._held)
        elif before:
            log.info("reading is held up no more")

    def _fits(self, record: LogRecord, records: list[LogRecord]) -> bool:
        """Whether a record is next in its partition."""
        partition, offset = (record.topic, record.partition), record.offset
        position = self._positions.get(partition, offset)
        if offset != position or self._passing or self._seeks:
            # Anything of before a seek that is due is read again after it.
            if partition in self._seeks:
                return False
            if partition in self._passing:
                self._answer(partition, None if self._is_beyond_end(partition, offset) else offset, records)
                return False
            if offset < position:
                # In a batch that is not compressed, Kafka keeps whatever offsets its records claim to have.
                log.warning("a record claims an offset that was read already, and is left out", where=record.where)
                return False
            if self._is_beyond_end(partition, offset):
                self._pass_over(partition, position, f"a record in it claims offset {offset}, which is beyond the log's end")
                return False
        self._ends.discard(partition)
        self._positions[partition] = offset + 1
        return True

    def _is_beyond_end(self, partition: Partition, offset: int) -> bool:
        high = self._high(partition)
        return high is not None and offset >= high

    def _on_unreadable(self, partition: Partition, first: int, problem: str, records: list[LogRecord]) -> None:
        if partition in self._seeks:
            return
        passing = self._passing.get(partition)
        if passing is None:
            self._pass_over(partition, first, problem)
        else:
            self._answer(partition, None if first <= passing.first else first, records)

    def _check_stalled(self) -> None:
        """Look into partitions that give nothing although their log goes on. See `_STALLED_S`."""
        now, before, self._stalled = time.monotonic(), self._stalled, {}
        with self._lock:
            for partition in self._assigned - self._paused - self._ends - self._passing.keys() - self._seeks.keys():
                low, high = self._consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
                position = self._positions.get(partition, low)
                if not 0 <= position < high:
                    continue
                known, since = before.get(partition, (-1, now))
                self._stalled[partition] = (position, since if known == position else now)
                if known == position and now - since >= _STALLED_S:
                    self._pass_over(partition, position, "the client gives nothing of it, and no error", silent=True)
        if self._seeks:
            self._seek()

    def _broker_answers(self, partition: Partition) -> bool:
        try:
            self._consumer.get_watermark_offsets(TopicPartition(*partition), _ANSWER_S, cached=False)
        except KafkaException:
            return False
        return True

    def _pass_over(self, partition: Partition, first: int, problem: str, *, silent: bool = False) -> None:
        low, high = self._consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
        begin = max(first, low, self._positions.get(partition, first))
        self._ends.discard(partition)
        self._passing[partition] = passing = _Passing(first, problem, BatchEnd(begin, high), silent=silent)
        if silent:
            self._seeks[partition] = begin
        else:
            self._look_on(partition, passing)

    def _look_on(self, partition: Partition, passing: _Passing) -> None:
        """It is known that the batch can't be read."""
        passing.confirmed = True
        ask = passing.search.ask
        self._seeks[partition] = passing.search.end if ask is None else ask
        if ask is not None:
            place = f"{partition[0]}[{partition[1]}]@{passing.search.first}"
            log.warning("a batch can't be read, looking for its end", where=place, error=passing.problem)

    def _answer(self, partition: Partition, beyond: int | None, records: list[LogRecord]) -> None:
        """What came from the offset asked for: the same batch (None), or something else, which begins at `beyond`."""
        search = self._passing[partition].search
        if not self._passing[partition].confirmed:
            # It can be read, and was only late.
            del self._passing[partition]
            self._seeks[partition] = search.first
            return
        if search.ask is not None:
            search.inside() if beyond is None else search.beyond(beyond)
        if search.ask is not None:
            self._seeks[partition] = search.ask
            return
        self._finish(partition, records)

    def _finish(self, partition: Partition, records: list[LogRecord]) -> None:
        """The end is known: return the batch's offsets, and read on after them."""
        passing = self._passing.pop(partition)
        topic, number = partition
        first, end = passing.search.first, passing.search.end
        problem = f"the batch of offsets {first} to {end - 1} can't be read: {passing.problem}"
        unreadable = LogRecord(topic, number, first, None, (), None, 0, problem, end - first)
        log.warning("passed over", where=unreadable.where, error=problem)
        records.append(unreadable)
        self._positions[partition] = end
        self._seeks[partition] = end

    def _break_silence(self, records: list[LogRecord]) -> None:
        """Draw the conclusion where nothing came from an offset asked for. A search that needs no question ends here, too."""
        now = time.monotonic()
        quiet: list[Partition] = []
        for partition, passing in self._passing.items():
            if partition in self._paused or passing.asked is None:
                passing.asked_at = now
            elif partition not in self._seeks and now - passing.asked_at >= (_SOUGHT_S if passing.silent else _HIDDEN_S):
                quiet.append(partition)
        quiet = [
            partition
            for partition in quiet
            if (self._broker_answers(partition) if self._passing[partition].silent else self._committed)
        ]
        with self._lock:
            for partition, passing in list(self._passing.items()):
                if passing.confirmed and passing.search.ask is None:
                    self._finish(partition, records)
                elif partition in quiet and not passing.confirmed:
                    self._look_on(partition, passing)
                elif partition in quiet:
                    self._answer(partition, None if passing.silent else passing.asked, records)

    def _seek(self) -> None:
        for partition, offset in list(self._seeks.items()):
            try:
                self._consumer.seek(TopicPartition(*partition, offset))
            except KafkaException as error:
                # The client has just lost the partition's leader: what it reports then goes nowhere, and is sought again.
                log.info("seeking failed, trying again", partition=partition, offset=offset, error=str(error.args[0]))
                continue
            del self._seeks[partition]
            if (passing := self._passing.get(partition)) is not None:
                passing.asked, passing.asked_at = offset, time.monotonic()

    def _on_error(self, message: Message, records: list[LogRecord]) -> None:
        error = message.error()
        assert error is not None
        partition = (str(message.topic()), or_default(message.partition(), -1))
        where = f"{partition[0]}[{partition[1]}]@{or_default(message.offset(), -1)}"
        if error.code() == KafkaError._PARTITION_EOF:
            end = or_default(message.offset(), 0)
            if partition in self._seeks:
                return
            if partition in self._passing:
                self._answer(partition, end, records)
                return
            self._ends.add(partition)
            # Commit markers and compacted records take offsets that nobody ever reads; the end event tells where we really are.
            self._positions[partition] = end
        elif error.code() in _UNREADABLE and (first := or_default(message.offset(), -1)) >= 0:
            self._on_unreadable(partition, first, f"{error.name()}: {error.str()}", records)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._failed = _no_such_offset(where, error.str())
        else:
            failure = wrap_error(error, f"reading {where}")
            if not failure.retriable:
                self._failed = failure
            else:
                log.warning("read error, the client tries again", where=where, error=error.str())


def _no_such_offset(where: str, detail: str) -> BrokerError:
    return BrokerError(
        f"reading {where}: the log does not hold this offset ({detail}); retention deleted it, or this is another cluster: "
        "raise the topic's retention, or start the run from a newer checkpoint"
    )


# The client's method may return a list although it failed, and leave its exception set. Called from C, Python looks for that
# and raises SystemError. So does `message.headers()` at first, but no more once the interpreter has specialised the call: the
# exception then comes up in some other call.
_headers_of: Callable[[Message], list[tuple[str, bytes | None]] | None] = operator.methodcaller("headers")


class _Headers(Sequence[tuple[str, bytes | None]]):
    """A message's headers, made when they are looked at: that costs more than all else about a record dropped by its key.

    Raises CorruptRecordError, each time, for headers that the client can't make.
    """

    __slots__ = ("_made", "_message", "_problem")

    def __init__(self, message: Message) -> None:
        self._message: Message | None = message
        self._made: list[tuple[str, bytes | None]] = []
        self._problem = ""

    def __iter__(self) -> Iterator[tuple[str, bytes | None]]:
        return iter(self._get())

    def __len__(self) -> int:
        return len(self._get())

    def __getitem__(self, at: Any) -> Any:
        return self._get()[at]

    def __eq__(self, other: object) -> bool:
        return self._get() == (list(other) if isinstance(other, Sequence) else other)

    def __repr__(self) -> str:
        try:
            return repr(self._get())
        except CorruptRecordError as error:
            return f"<{error}>"

    def _get(self) -> list[tuple[str, bytes | None]]:
        message, self._message = self._message, None
        if message is not None:
            try:
                self._made = _headers_of(message) or []
            except (SystemError, UnicodeDecodeError):
                # The client decodes names as UTF-8 and ignores a failure. The list that it gives all the same has a null
                # pointer in it, which ends the process when it is touched: never ask a second time.
                self._problem = "the name of a header is not UTF-8, so that no header of the record can be read"
        if self._problem:
            raise CorruptRecordError(self._problem)
        return self._made


def _record(message: Message) -> LogRecord:
    # A message without an error stands somewhere: the client's None is for those that were never sent.
    return LogRecord._make(
        (
            message.topic(),
            message.partition(),
            message.offset(),
            message.key(),
            _Headers(message),
            message.value(),
            message.timestamp()[1],
            "",
            1,
        )
    )
