"""Records in: a reader that is told which offsets to read and is trusted by nobody to remember them.

A batch that the client can't unpack is passed over, since no restart would ever get past it: its offsets are returned in its
place, once it is known where it ends (echo/kafka/batch_end.py).

Refuses consumer groups, commits, and every silent jump to another offset.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from echo.errors import BrokerError, NoSuchOffsetError
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
from echo.kafka.passing import PassingOver
from echo.kafka.record import record_of
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
    "fetch.error.backoff.ms": 200,
    "check.crcs": True,
    "allow.auto.create.topics": False,
}

# What the client reports, again and again, for a batch that it can't unpack: a sum or a codec that is wrong, or more bytes than
# `receive.message.max.bytes`.
_UNREADABLE = frozenset({KafkaError._BAD_COMPRESSION, KafkaError._BAD_MSG, KafkaError._NOT_IMPLEMENTED})
# A transaction of ours is open for less: what holds back records for longer is a stranger's, or its holder is dead.
_HELD_S = 5.0


# How long a question about partitions may take, seconds.
_ASK_S = 2.0


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
        self._passing = PassingOver(self._consumer, committed=committed)
        self._held_since: dict[Partition, float] = {}
        self._held = ""
        self._failed: BrokerError | None = None
        self._open_scout = partial(
            KafkaLogReader, settings, client_id=client_id, max_record_bytes=max_record_bytes, committed=False
        )
        self._scout: tuple[Partition, KafkaLogReader] | None = None
        self._scouted: list[LogRecord] = []
        self._scouted_at: dict[Partition, int] = {}

    def assign(self, positions: Mapping[Partition, int]) -> None:
        self._dismiss_scout()
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
            self._passing.clear()
            self._held_since = {}
            self._failed = None

    def add(self, positions: Mapping[Partition, int]) -> None:
        for topic in {topic for topic, _ in positions}:
            self._refuse_unknown(topic, max(number for name, number in positions if name == topic))
        wanted = [
            TopicPartition(topic, number, OFFSET_BEGINNING if offset == BEGINNING else offset)
            for (topic, number), offset in positions.items()
        ]
        try:
            self._consumer.incremental_assign(wanted)
        except KafkaException as error:
            raise wrap_error(error.args[0], f"adding {sorted(positions)}") from None
        with self._lock:
            self._assigned |= set(positions)
            self._positions |= {partition: offset for partition, offset in positions.items() if offset >= 0}

    def first_offsets(self, partitions: Iterable[Partition], timeout_s: float) -> dict[Partition, int]:
        found: dict[Partition, int] = {}
        for topic, number in partitions:
            try:
                # Of its answer the end is not used: the embedded broker gives a wrong one.
                first, _ = self._consumer.get_watermark_offsets(TopicPartition(topic, number), timeout_s, cached=False)
            except KafkaException as error:
                raise wrap_error(error.args[0], f"asking where {topic}[{number}] begins") from None
            found[topic, number] = int(first)
        return found

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        self._check()
        try:
            # Asked for many, the client waits for all of them or the timeout: take what is there, and wait for one at most.
            messages = self._consumer.consume(max_records, 0) or self._consumer.consume(1, timeout_s)
        except KafkaException as error:
            raise wrap_error(error.args[0], "reading") from None
        records: list[LogRecord] = []
        with self._lock:
            while self._scouted:
                unreadable = self._scouted.pop()
                self._passing.resume((unreadable.topic, unreadable.partition), unreadable.end)
                self._take_unreadable(unreadable, records)
            positions = self._positions
            # Nearly all records are next in their partition, and then there is nothing else to look at.
            plain = not (self._ends or self._passing)
            for message in messages:
                if message.error() is not None:
                    self._on_error(message, records)
                    plain = False
                    continue
                record = record_of(message)
                partition, offset = record[:2], record[2]
                if (plain and positions.get(partition) == offset) or self._fits(record, records):
                    positions[partition] = offset + 1
                    records.append(record)
                else:
                    plain = False
        if self._passing:
            passed = self._passing.go_on(self._paused)
            with self._lock:
                for unreadable in passed:
                    self._take_unreadable(unreadable, records)
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
        self._dismiss_scout()
        self._consumer.close()

    @property
    def last_error(self) -> str:
        return self._held or self._errors.last

    def _high(self, partition: Partition) -> int | None:
        """The high watermark of the last fetch. Never asked of the broker: the embedded one answers that question wrongly."""
        _, high = self._consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
        return None if high < 0 else int(high)

    def _refuse_unknown(self, topic: str, number: int) -> None:
        """A client that is to read a partition which its metadata lacks reports an error, and reads it never."""
        try:
            known = self._consumer.list_topics(topic, _ASK_S).topics[topic].partitions
        except KafkaException as error:
            raise wrap_error(error.args[0], f"asking for the partitions of {topic}") from None
        if number not in known:
            raise BrokerError(f"{topic}[{number}] is not known to every broker yet", retriable=True)

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed
        self._errors.check("reader can't go on")
        if self._cluster.due():
            self._cluster.check(self._consumer)
            self._check_positions()
            with self._lock:
                # Also those that were at their end: what came since may be what gives nothing.
                still = self._passing.look_into(self._assigned - self._paused, self._positions)
            if self._committed:
                self._check_held()
                self._scout_ahead(still)

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

    def _scout_ahead(self, still: Mapping[Partition, int]) -> None:
        """Have a reader that sees all records look at a place that gives nothing to one of committed records."""
        if self._scout is None:
            for partition, position in still.items():
                if self._scouted_at.get(partition) != position:
                    self._scouted_at[partition] = position
                    self._scout = (partition, self._open_scout())
                    self._scout[1].assign({partition: position})
                    return
            return
        partition, scout = self._scout
        try:
            found = scout.read(1, 0.0)
        except BrokerError as error:
            log.info("looking ahead failed", where=partition, error=str(error))
            self._scouted_at.pop(partition, None)
            self._dismiss_scout()
            return
        if found or scout.at_end():
            self._dismiss_scout()
            # Meanwhile it may have been read all the same.
            if found and found[0].unreadable and still.get(partition) == found[0].offset:
                self._scouted.append(found[0])

    def _dismiss_scout(self) -> None:
        scout, self._scout = self._scout, None
        self._scouted = []
        if scout is not None:
            scout[1].close()

    def _fits(self, record: LogRecord, records: list[LogRecord]) -> bool:
        """Whether a record is next in its partition."""
        partition, offset = (record.topic, record.partition), record.offset
        position = self._positions.get(partition, offset)
        if offset != position or self._passing:
            if self._passing.holds(partition):
                beyond = self._is_beyond_end(partition, offset)
                self._take_unreadable(self._passing.came(partition, None if beyond else offset), records)
                return False
            if offset < position:
                # A topic that keeps batches as they come keeps whatever offsets their records claim to have.
                log.warning("a record claims an offset that was read already, and is left out", where=record.where)
                return False
            if self._is_beyond_end(partition, offset):
                problem = f"a record in it claims offset {offset}, which is beyond the log's end"
                self._take_unreadable(self._passing.reported(partition, position, position, problem), records)
                return False
        self._ends.discard(partition)
        return True

    def _is_beyond_end(self, partition: Partition, offset: int) -> bool:
        high = self._high(partition)
        return high is not None and offset >= high

    def _take_unreadable(self, unreadable: LogRecord | None, records: list[LogRecord]) -> None:
        if unreadable is not None:
            records.append(unreadable)
            self._positions[unreadable.topic, unreadable.partition] = unreadable.end

    def _on_error(self, message: Message, records: list[LogRecord]) -> None:
        error = message.error()
        assert error is not None
        partition = (str(message.topic()), or_default(message.partition(), -1))
        where = f"{partition[0]}[{partition[1]}]@{or_default(message.offset(), -1)}"
        if error.code() == KafkaError._PARTITION_EOF:
            end = or_default(message.offset(), 0)
            if self._passing.holds(partition):
                self._take_unreadable(self._passing.came(partition, end), records)
                return
            self._ends.add(partition)
            # Commit markers and compacted records take offsets that nobody ever reads; the end event tells where we really are.
            self._positions[partition] = end
        elif error.code() in _UNREADABLE and (first := or_default(message.offset(), -1)) >= 0:
            self._ends.discard(partition)
            problem = f"{error.name()}: {error.str()}"
            self._take_unreadable(self._passing.reported(partition, first, self._positions.get(partition), problem), records)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._failed = _no_such_offset(where, error.str())
        else:
            failure = wrap_error(error, f"reading {where}")
            if not failure.retriable:
                self._failed = failure
            else:
                self._errors.note(str(failure))
                log.warning("read error, the client tries again", where=where, error=error.str())


def _no_such_offset(where: str, detail: str) -> NoSuchOffsetError:
    return NoSuchOffsetError(
        f"reading {where}: the log does not hold this offset ({detail}); retention deleted it, or the topic was made anew: "
        "raise the topic's retention; `echo-train --accept-lost` resumes with what is there and counts the rest as lost"
    )
