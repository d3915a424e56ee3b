"""Records in: a reader that is told which offsets to read and is trusted by nobody to remember them.

Refuses consumer groups, commits, and every silent jump to another offset.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

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
from echo.log import BEGINNING, LogRecord, Partition

log = structlog.get_logger("kafka")

# Fewer, larger fetch answers: the embedded broker stalls a tail reader that asks for many small ones, and 100 ms is far
# below any learner step. The queue budget is librdkafka's prefetch, in KiB over all partitions.
_READER_DEFAULTS: dict[str, Any] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    "fetch.wait.max.ms": 100,
    "queued.max.messages.kbytes": 65536,
    # How long fetching rests once that is full. The client's own second is longer than it takes to read 64 MiB.
    "fetch.queue.backoff.ms": 20,
    "check.crcs": True,
    "allow.auto.create.topics": False,
}


# How long a question about partitions may take, seconds.
_ASK_S = 2.0


class KafkaLogReader:
    """Reads assigned partitions; remembers nothing in Kafka. See `LogReader`.

    cluster_id: of the cluster whose offsets will be assigned, where it is known (a checkpoint); None takes the first that
    answers. Another one ends reading with a BrokerError, at once or when the broker behind the address is replaced.
    beyond_end_s: how long a position may lie beyond the end of the log. A new leader in Kafka may show an older end for as
    long as a dead follower counts (replica.lag.time.max.ms, 30 s); the embedded broker shows it for ever and returns nothing.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        client_id: str,
        max_record_bytes: int,
        cluster_id: str | None = None,
        beyond_end_s: float = 45.0,
    ) -> None:
        self._errors = ClientErrors(client_id)
        self._cluster = SameCluster(cluster_id)
        self._beyond_end_s = beyond_end_s
        conf = client_settings(settings, _READER_DEFAULTS, client_id=client_id, drop=PRODUCER_ONLY)
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
            told = 0
            for message in messages:
                if message.error() is None:
                    records.append(_record(message))
                else:
                    self._advance(records[told:])
                    told = len(records)
                    self._on_error(message)
            self._advance(records[told:])
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
        return self._errors.last

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

    def _advance(self, records: Iterable[LogRecord]) -> None:
        for partition, offset in {(record.topic, record.partition): record.offset for record in records}.items():
            self._ends.discard(partition)
            self._positions[partition] = offset + 1

    def _on_error(self, message: Message) -> None:
        error = message.error()
        assert error is not None
        partition = (str(message.topic()), or_default(message.partition(), -1))
        where = f"{partition[0]}[{partition[1]}]@{or_default(message.offset(), -1)}"
        if error.code() == KafkaError._PARTITION_EOF:
            self._ends.add(partition)
            # Commit markers and compacted records take offsets that nobody ever reads; the end event tells where we really are.
            self._positions[partition] = or_default(message.offset(), 0)
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


class _Headers(Sequence[tuple[str, bytes | None]]):
    """A message's headers, made when they are looked at: that costs more than all else about a record dropped by its key."""

    __slots__ = ("_message",)

    def __init__(self, message: Message) -> None:
        self._message = message

    def __iter__(self) -> Iterator[tuple[str, bytes | None]]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._made())

    def __getitem__(self, at: Any) -> Any:
        return self._made()[at]

    def __eq__(self, other: object) -> bool:
        return self._made() == (list(other) if isinstance(other, Sequence) else other)

    def __repr__(self) -> str:
        return repr(self._made())

    def _made(self) -> list[tuple[str, bytes | None]]:
        # The client keeps what it has made once.
        return cast("list[tuple[str, bytes | None]]", self._message.headers() or [])


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
        )
    )
