"""The log in memory: producer, transactions, reader and admin that keep the contract of echo/log.py, without a broker.

Deterministic: one lock, no threads of its own, nothing happens but in the caller's calls. `FakeLog(markers=True)` lets every
transaction take an offset for its end, as Kafka does, so that offsets have gaps.
"""

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from echo.errors import (
    BrokerError,
    CorruptRecordError,
    FencedError,
    NoSuchOffsetError,
    OtherClusterError,
    UnknownTopicError,
)
from echo.log import BEGINNING, Delivery, Headers, LogRecord, OnDelivery, Partition, TopicState


class _Partition:
    """records[i] has offset start + i; None is an offset that no reader sees."""

    def __init__(self) -> None:
        self.start = 0
        self.records: list[LogRecord | None] = []

    @property
    def end(self) -> int:
        return self.start + len(self.records)


class FakeLog:
    """A cluster. Topics are made with `create_topic`; nothing creates them silently."""

    def __init__(
        self, *, cluster_id: str = "fake", markers: bool = False, clock: Callable[[], float] = time.time, max_bytes: int = 2**24
    ) -> None:
        self.cluster_id = cluster_id
        self.markers = markers
        self.clock = clock
        self.max_bytes = max_bytes
        self.changed = threading.Condition()
        self._topics: dict[str, list[_Partition]] = {}
        self._made = 0
        self._ids: dict[str, str] = {}
        self._holders: dict[str, int] = {}
        self.groups: dict[str, dict[Partition, int]] = {}
        """What was shown under consumer groups."""
        self.broken: dict[str, BaseException] = {}
        """Topics whose reading raises, and what: set by a test while readers are at work."""

    def create_topic(self, name: str, partitions: int = 1) -> None:
        with self.changed:
            if name not in self._topics:
                self._made += 1
                self._ids[name] = f"id-{self._made}"
                self._topics[name] = [_Partition() for _ in range(partitions)]

    def delete_topic(self, name: str) -> None:
        with self.changed:
            del self._topics[name], self._ids[name]
            self.changed.notify_all()

    def add_partitions(self, name: str, partitions: int) -> None:
        """The topic has so many from now on: keys go to other partitions than before."""
        with self.changed:
            found = self._topics[name]
            found.extend(_Partition() for _ in range(partitions - len(found)))

    def state(self, name: str) -> TopicState:
        return TopicState(self._ids[name], self.partitions(name))

    def break_reading(self, topic: str, error: BaseException) -> None:
        with self.changed:
            self.broken[topic] = error
            self.changed.notify_all()

    def delete_before(self, partition: Partition, offset: int) -> None:
        """As retention would: the partition starts at `offset` from now on."""
        with self.changed:
            found = self.partition(partition)
            del found.records[: offset - found.start]
            found.start = offset

    def records(self, topic: str) -> list[LogRecord]:
        """All that readers can see, partition by partition."""
        with self.changed:
            found = [record for part in self._topics[topic] for record in part.records if record is not None]
            return [record for before, record in zip([None, *found], found, strict=False) if not _is_rest(before, record)]

    def partitions(self, topic: str) -> int:
        return len(self._topics.get(topic, ()))

    def partition(self, partition: Partition) -> _Partition:
        topic, number = partition
        if number >= self.partitions(topic):
            raise UnknownTopicError(f"{topic}[{number}] does not exist")
        return self._topics[topic][number]

    def append(self, topic: str, key: bytes, value: bytes, headers: Headers) -> LogRecord:
        number = zlib.crc32(key) % self.partitions(topic)
        part = self._topics[topic][number]
        kept = headers if isinstance(headers, UnreadableHeaders) else list(headers)
        record = LogRecord(topic, number, part.end, key, kept, value, int(self.clock() * 1000))
        part.records.append(record)
        self.changed.notify_all()
        return record

    def append_unreadable(self, topic: str, number: int, span: int, why: str = "no codec knows it") -> None:
        """A batch of `span` offsets that no client can unpack."""
        with self.changed:
            part = self.partition((topic, number))
            end = part.end + span
            # Whoever begins in the middle of it gets the rest.
            part.records += [LogRecord(topic, number, o, None, (), None, 0, why, end - o) for o in range(part.end, end)]
            self.changed.notify_all()

    def take_over(self, transactional_id: str) -> int:
        """The epoch of the new holder."""
        with self.changed:
            self._holders[transactional_id] = self._holders.get(transactional_id, 0) + 1
            return self._holders[transactional_id]

    def holds(self, transactional_id: str, epoch: int) -> bool:
        return self._holders[transactional_id] == epoch


def _is_rest(before: LogRecord | None, record: LogRecord) -> bool:
    """Whether a record is of the same unreadable batch as the one before it."""
    return before is not None and before.partition == record.partition and before.end > record.offset


class UnreadableHeaders(Sequence[tuple[str, bytes | None]]):
    """What the client gives for a record with a header whose name is not UTF-8."""

    def _fail(self) -> NoReturn:
        raise CorruptRecordError("the name of a header is not UTF-8, so that no header of the record can be read")

    def __getitem__(self, at: Any) -> Any:
        self._fail()

    def __len__(self) -> int:
        self._fail()


class _Waiting(NamedTuple):
    topic: str
    key: bytes
    value: bytes
    headers: Headers
    on_delivery: OnDelivery | None

    @property
    def nbytes(self) -> int:
        return len(self.key) + len(self.value) + sum(len(name) + len(value or b"") for name, value in self.headers)


class FakeProducer:
    """Appends in `poll` and `flush`, in the order of `send`. queue_bytes: what it holds at most until then."""

    def __init__(self, log: FakeLog, *, queue_bytes: int = 2**24) -> None:
        self._log = log
        self._queue_bytes = queue_bytes
        self._held = 0
        self._queue: deque[_Waiting] = deque()
        self.last_error = ""

    def send(
        self, topic: str, *, key: bytes, value: bytes, headers: Headers = (), on_delivery: OnDelivery | None = None
    ) -> bool:
        record = _Waiting(topic, key, value, tuple(headers), on_delivery)
        if record.nbytes > self._log.max_bytes:
            raise BrokerError(
                f"sending to {topic}: MSG_SIZE_TOO_LARGE: {record.nbytes} bytes, the limit is {self._log.max_bytes}"
            )
        with self._log.changed:
            if self._held + record.nbytes > self._queue_bytes:
                return False
            self._held += record.nbytes
            self._queue.append(record)
            self._log.changed.notify_all()
        return True

    def poll(self, timeout_s: float) -> None:
        """Waits for something to report, at most its timeout, as Kafka's client does."""
        with self._log.changed:
            self._log.changed.wait_for(lambda: bool(self._queue), timeout_s)
        self._serve()

    def flush(self, timeout_s: float) -> int:
        self._serve()
        return len(self._queue)

    def _serve(self) -> None:
        while True:
            with self._log.changed:
                if not self._queue:
                    return
                sent = self._queue.popleft()
                self._held -= sent.nbytes
                if self._log.partitions(sent.topic):
                    record = self._log.append(sent.topic, sent.key, sent.value, sent.headers)
                    report = Delivery(sent.topic, record.partition, record.offset, None)
                else:
                    report = Delivery(sent.topic, -1, -1, "UNKNOWN_TOPIC_OR_PART")
            if sent.on_delivery is not None:
                sent.on_delivery(report)

    def close(self) -> None:
        while self._queue:
            sent = self._queue.popleft()
            if sent.on_delivery is not None:
                sent.on_delivery(Delivery(sent.topic, -1, -1, "_PURGE_QUEUE"))


class FakeTransactions:
    """See `LogTransactions`: making one fences the earlier holders of the id."""

    def __init__(self, log: FakeLog, *, transactional_id: str) -> None:
        self._log = log
        self._id = transactional_id
        self._epoch = log.take_over(transactional_id)

    def send(self, topic: str, messages: Sequence[tuple[bytes, bytes]]) -> None:
        with self._log.changed:
            if not self._log.holds(self._id, self._epoch):
                raise FencedError(f"sending to {topic}: another process took over {self._id}")
            if not self._log.partitions(topic):
                raise UnknownTopicError(f"sending to {topic}: it does not exist")
            touched = {self._log.append(topic, key, value, ()).partition for key, value in messages}
            for number in touched if self._log.markers else ():
                self._log.partition((topic, number)).records.append(None)

    def close(self) -> None:
        pass


class FakeReader:
    """See `LogReader`. `read` waits for other threads to append, at most its timeout."""

    def __init__(self, log: FakeLog, *, cluster_id: str | None = None) -> None:
        self._log = log
        self._cluster_id = cluster_id
        self._positions: dict[Partition, int] = {}
        self._paused: set[Partition] = set()
        self._ends: set[Partition] = set()
        self._high: dict[Partition, int] = {}
        self._failed: BrokerError | None = None
        self.last_error = ""

    def assign(self, positions: Mapping[Partition, int]) -> None:
        self._positions = dict(positions)
        self._paused, self._ends, self._high, self._failed = set(), set(), {}, None

    def add(self, positions: Mapping[Partition, int]) -> None:
        for topic, number in positions:
            if number >= self._log.partitions(topic):
                raise BrokerError(f"{topic}[{number}] is not known yet", retriable=True)
        self._positions |= positions

    def first_offsets(self, partitions: Iterable[Partition], timeout_s: float) -> dict[Partition, int]:
        return {partition: self._log.partition(partition).start for partition in partitions}

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        if self._cluster_id not in (None, self._log.cluster_id):
            raise OtherClusterError(f"this is cluster {self._log.cluster_id}, and it was {self._cluster_id} before")
        deadline = time.monotonic() + timeout_s
        with self._log.changed:
            while True:
                for topic, _ in self._positions:
                    if topic in self._log.broken:
                        raise self._log.broken[topic]
                if self._failed is not None:
                    raise self._failed
                before = len(self._ends)
                records = self._take(max_records)
                left = deadline - time.monotonic()
                if records or len(self._ends) > before or left <= 0:
                    return records
                if self._failed is None:
                    self._log.changed.wait(left)

    def _take(self, max_records: int) -> list[LogRecord]:
        records: list[LogRecord] = []
        for partition in self._positions.keys() - self._paused:
            part = self._log.partition(partition)
            position = part.start if self._positions[partition] == BEGINNING else self._positions[partition]
            if not part.start <= position <= part.end:
                topic, number = partition
                self._failed = NoSuchOffsetError(
                    f"reading {topic}[{number}]@{position}: the log holds {part.start} to {part.end}"
                )
                continue
            while position < part.end and len(records) < max_records:
                record = part.records[position - part.start]
                position += 1 if record is None else record.span
                if record is not None:
                    records.append(record)
                    self._ends.discard(partition)
            # Offsets that nobody can see are passed over at the end alone, as by Kafka's client: before the next record it
            # knows of none of them.
            if not any(part.records[position - part.start :]):
                position = part.end
            self._positions[partition] = position
            self._high[partition] = part.end
            if position == part.end:
                self._ends.add(partition)
        return records

    def pause(self, partitions: Iterable[Partition]) -> None:
        self._paused.update(partitions)

    def resume(self, partitions: Iterable[Partition]) -> None:
        self._paused.difference_update(partitions)

    def at_end(self) -> bool:
        return self._ends >= self._positions.keys()

    def lag(self) -> dict[Partition, int | None]:
        return {
            partition: self._high[partition] - position if partition in self._high else None
            for partition, position in self._positions.items()
        }

    def close(self) -> None:
        pass


class FakeGroupOffsets:
    """See `LogGroupOffsets`."""

    def __init__(self, log: FakeLog, *, group: str) -> None:
        self._log = log
        self._group = group

    def show(self, positions: Mapping[Partition, int]) -> None:
        self._log.groups[self._group] = dict(positions)

    def close(self, timeout_s: float) -> None:
        pass


class FakeAdmin:
    """See `LogAdmin`: one node."""

    def __init__(self, log: FakeLog) -> None:
        self._log = log

    def cluster_id(self, timeout_s: float) -> str:
        return self._log.cluster_id

    def nodes(self, timeout_s: float) -> dict[int, str]:
        return {1: "fake:0"}

    def partitions(self, topic: str, timeout_s: float) -> int:
        return self._log.partitions(topic)

    def topics(self, names: Iterable[str], timeout_s: float) -> dict[str, TopicState]:
        with self._log.changed:
            return {name: self._log.state(name) for name in names if self._log.partitions(name)}
