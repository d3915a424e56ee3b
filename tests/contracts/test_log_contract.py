"""What echo/log.py promises, held by the fake, the embedded broker and a real Apache Kafka alike."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Protocol

import pytest

from echo.broker import RunningBroker
from echo.errors import BrokerError, FencedError, NoSuchOffsetError
from echo.kafka import KafkaLogAdmin, KafkaLogProducer, KafkaLogReader, TransactionalProducer
from echo.log import BEGINNING, Delivery, LogAdmin, LogProducer, LogReader, LogRecord, LogTransactions, Partition, TopicState
from tests.brokers import add_partitions, delete_before, delete_topic
from tests.conftest import CreateTopic
from tests.eventually import eventually
from tests.fakes.log import FakeAdmin, FakeLog, FakeProducer, FakeReader, FakeTransactions

MAX_RECORD = 2**20
DEADLINE_S = 30.0


class Cluster(Protocol):
    """Makes clients of one implementation; closes them after the test."""

    def topic(self, name: str, partitions: int = 1) -> str: ...
    def delete_topic(self, name: str) -> None: ...
    def add_partitions(self, topic: str, partitions: int) -> None: ...
    def delete_before(self, partition: Partition, offset: int) -> None: ...
    def producer(self, queue_bytes: int = 2**24) -> LogProducer: ...
    def reader(self, cluster_id: str | None = None) -> LogReader: ...
    def transactions(self, transactional_id: str) -> LogTransactions: ...
    def admin(self) -> LogAdmin: ...


class FakeCluster:
    def __init__(self) -> None:
        self.log = FakeLog(markers=True, max_bytes=MAX_RECORD)

    def topic(self, name: str, partitions: int = 1) -> str:
        self.log.create_topic(name, partitions)
        return name

    def delete_topic(self, name: str) -> None:
        self.log.delete_topic(name)

    def add_partitions(self, topic: str, partitions: int) -> None:
        self.log.add_partitions(topic, partitions)

    def delete_before(self, partition: Partition, offset: int) -> None:
        self.log.delete_before(partition, offset)

    def producer(self, queue_bytes: int = 2**24) -> LogProducer:
        return FakeProducer(self.log, queue_bytes=queue_bytes)

    def reader(self, cluster_id: str | None = None) -> LogReader:
        return FakeReader(self.log, cluster_id=cluster_id)

    def transactions(self, transactional_id: str) -> LogTransactions:
        return FakeTransactions(self.log, transactional_id=transactional_id)

    def admin(self) -> LogAdmin:
        return FakeAdmin(self.log)


class RealCluster:
    def __init__(self, broker: RunningBroker, create_topic: CreateTopic, prefix: str, stack: ExitStack) -> None:
        self._broker = broker
        self.servers = broker.bootstrap_servers
        self._settings = {"bootstrap.servers": broker.bootstrap_servers}
        self._create_topic = create_topic
        self._prefix = prefix
        self._stack = stack

    def topic(self, name: str, partitions: int = 1) -> str:
        return self._create_topic(self._broker, name, partitions)

    def delete_topic(self, name: str) -> None:
        delete_topic(self._broker, name)

    def add_partitions(self, topic: str, partitions: int) -> None:
        add_partitions(self._broker, topic, partitions)

    def delete_before(self, partition: Partition, offset: int) -> None:
        delete_before(self._broker, partition, offset)

    def producer(self, queue_bytes: int = 2**24) -> LogProducer:
        made = KafkaLogProducer(self._settings, client_id="test-out", max_record_bytes=MAX_RECORD, queue_bytes=queue_bytes)
        self._stack.callback(made.close)
        return made

    def reader(self, cluster_id: str | None = None) -> LogReader:
        made = KafkaLogReader(
            self._settings, client_id="test-in", max_record_bytes=MAX_RECORD, cluster_id=cluster_id, beyond_end_s=1.0
        )
        self._stack.callback(made.close)
        return made

    def transactions(self, transactional_id: str) -> LogTransactions:
        made = TransactionalProducer(self._settings, transactional_id=self._prefix + transactional_id, client_id="test-tx")
        self._stack.callback(made.close)
        return made

    def admin(self) -> LogAdmin:
        return KafkaLogAdmin(self._settings, client_id="test-admin")


# Tansu adds no partitions, and panics when it is to delete records.
elastic = pytest.mark.parametrize(
    "cluster", ["fake", pytest.param("apache", marks=pytest.mark.kafka)], indirect=True, scope="function"
)


@pytest.fixture(params=["fake", "tansu", pytest.param("apache", marks=pytest.mark.kafka)])
def cluster(request: pytest.FixtureRequest, create_topic: CreateTopic, topic_prefix: str) -> Iterator[Cluster]:
    if request.param == "fake":
        yield FakeCluster()
        return
    with ExitStack() as stack:
        yield RealCluster(request.getfixturevalue(request.param), create_topic, topic_prefix, stack)


def send_all(producer: LogProducer, topic: str, records: list[tuple[bytes, bytes]]) -> list[Delivery]:
    """Send and wait; the delivery reports in the order they came."""
    reports: list[Delivery] = []
    for key, value in records:
        assert producer.send(topic, key=key, value=value, on_delivery=reports.append)
    assert producer.flush(DEADLINE_S) == 0
    return reports


def read_until(reader: LogReader, done: Callable[[list[LogRecord]], bool], deadline_s: float = DEADLINE_S) -> list[LogRecord]:
    """Read until `done` says so about all that was read."""
    deadline = time.monotonic() + deadline_s
    records: list[LogRecord] = []
    while not done(records):
        assert time.monotonic() < deadline, f"{len(records)} records within {deadline_s} s"
        records += reader.read(100, 0.2)
    return records


def read_to_end(reader: LogReader) -> list[LogRecord]:
    return read_until(reader, lambda records: reader.at_end())


def numbered(count: int, key: bytes = b"k") -> list[tuple[bytes, bytes]]:
    return [(key, b"%d" % index) for index in range(count)]


def test_a_key_keeps_its_partition_and_its_order(cluster: Cluster) -> None:
    """Records of one key come back in the order they were sent, from one partition; several keys use several partitions."""
    topic = cluster.topic("order", 4)
    sent = [(b"group-%d" % (index % 16), b"%d" % index) for index in range(320)]
    send_all(cluster.producer(), topic, sent)
    reader = cluster.reader()
    reader.assign({(topic, number): BEGINNING for number in range(4)})
    records = read_to_end(reader)
    by_key = {key: [record for record in records if record.key == key] for key, _ in sent}
    for key, own in by_key.items():
        assert len({record.partition for record in own}) == 1
        assert [record.value for record in own] == [value for other, value in sent if other == key]
        assert [record.offset for record in own] == sorted(record.offset for record in own)
    assert len({record.partition for record in records}) > 1


def test_key_headers_and_value_come_back_as_they_went(cluster: Cluster) -> None:
    """Headers keep order, duplicates, empty and absent values; bytes are not touched."""
    topic = cluster.topic("round-trip")
    headers = [("a", b"\x00\xff"), ("b", None), ("a", b"second"), ("empty", b"")]
    key, value = bytes(range(256)), b"\x00" * 1000 + bytes(range(256))
    producer = cluster.producer()
    before = time.time()
    assert producer.send(topic, key=key, value=value, headers=headers)
    assert producer.flush(DEADLINE_S) == 0
    reader = cluster.reader()
    reader.assign({(topic, 0): 0})
    (record,) = read_to_end(reader)
    assert (record.topic, record.partition, record.offset) == (topic, 0, 0)
    assert (record.key, record.headers, record.value) == (key, headers, value)
    assert before - 1 <= record.timestamp_ms / 1000 <= time.time() + 1
    assert record.where == f"{topic}[0]@0"


def test_a_full_queue_takes_nothing_and_loses_nothing(cluster: Cluster) -> None:
    """`send` answers False at the byte limit; what it took is delivered once each, and there is room again afterwards."""
    topic = cluster.topic("full")
    producer = cluster.producer(queue_bytes=64 * 1024)
    reports: list[Delivery] = []
    taken = 0
    while taken < 1000 and producer.send(topic, key=b"k", value=b"%04d" % taken + b"x" * 1020, on_delivery=reports.append):
        taken += 1
    assert 32 <= taken <= 64
    assert producer.flush(DEADLINE_S) == 0
    assert [report.error for report in reports] == [None] * taken
    assert producer.send(topic, key=b"k", value=b"after", on_delivery=reports.append)
    assert producer.flush(DEADLINE_S) == 0
    reader = cluster.reader()
    reader.assign({(topic, 0): 0})
    values = [record.value[:4] for record in read_to_end(reader) if record.value]
    assert values == [b"%04d" % index for index in range(taken)] + [b"afte"]


def test_delivery_reports_say_where_each_record_stands(cluster: Cluster) -> None:
    """The reported partition and offset are those a reader finds, offset 0 included."""
    topic = cluster.topic("reports", 2)
    reports = send_all(cluster.producer(), topic, [(b"%d" % (index % 5), b"v") for index in range(50)])
    reader = cluster.reader()
    reader.assign({(topic, 0): BEGINNING, (topic, 1): BEGINNING})
    found = Counter((record.topic, record.partition, record.offset) for record in read_to_end(reader))
    assert Counter((report.topic, report.partition, report.offset) for report in reports) == found
    assert min(report.offset for report in reports) == 0
    assert all(report.error is None for report in reports)


def test_a_record_above_the_limit_is_refused_at_once(cluster: Cluster) -> None:
    """`send` raises, and the producer can go on."""
    topic = cluster.topic("large")
    producer = cluster.producer()
    with pytest.raises(BrokerError, match=topic) as caught:
        producer.send(topic, key=b"k", value=b"x" * (MAX_RECORD + 1))
    assert not caught.value.retriable
    assert send_all(producer, topic, [(b"k", b"small")])[0].error is None


def test_reading_starts_where_it_was_told(cluster: Cluster) -> None:
    """From an offset, from the beginning, from the end; a second `assign` replaces the first."""
    topic = cluster.topic("start")
    send_all(cluster.producer(), topic, numbered(10))
    reader = cluster.reader()
    for start, expected in ((7, [7, 8, 9]), (BEGINNING, list(range(10))), (10, [])):
        reader.assign({(topic, 0): start})
        assert [record.offset for record in read_to_end(reader)] == expected


def test_reading_goes_on_with_what_is_sent_later(cluster: Cluster) -> None:
    """`at_end` is a moment, not a state: later records arrive."""
    topic = cluster.topic("later")
    producer = cluster.producer()
    reader = cluster.reader()
    reader.assign({(topic, 0): BEGINNING})
    assert read_to_end(reader) == []
    for batch in range(3):
        send_all(producer, topic, [(b"k", b"%d" % batch)])
        assert [record.value for record in read_until(reader, lambda records: len(records) == 1)] == [b"%d" % batch]


def test_read_returns_as_soon_as_something_is_there(cluster: Cluster) -> None:
    """It waits neither for `max_records` nor for the timeout, and never returns more than asked for."""
    topic = cluster.topic("soon")
    send_all(cluster.producer(), topic, numbered(5))
    reader = cluster.reader()
    reader.assign({(topic, 0): BEGINNING})
    began = time.monotonic()
    records: list[LogRecord] = []
    while len(records) < 5:
        read = reader.read(3, DEADLINE_S)
        assert len(read) <= 3
        records += read
    assert time.monotonic() - began < DEADLINE_S / 2
    assert [record.offset for record in records] == [0, 1, 2, 3, 4]


def test_a_paused_partition_is_silent_and_goes_on_where_it_stopped(cluster: Cluster) -> None:
    """Nothing is lost or doubled by a pause; the other partitions are read meanwhile; `assign` ends a pause."""
    topic = cluster.topic("pause", 2)
    producer = cluster.producer()
    keys = [b"%d" % index for index in range(8)]
    placed = {report.partition: key for key in keys for report in send_all(producer, topic, [(key, b"first")])}
    assert set(placed) == {0, 1}
    reader = cluster.reader()
    reader.assign({(topic, 0): BEGINNING, (topic, 1): BEGINNING})
    first = read_to_end(reader)
    reader.pause([(topic, 0)])
    send_all(producer, topic, [(placed[0], b"paused"), (placed[1], b"read")])
    assert [record.value for record in read_until(reader, lambda records: len(records) >= 1)] == [b"read"]
    assert reader.read(10, 0.5) == []
    reader.resume([(topic, 0)])
    assert [record.value for record in read_until(reader, lambda records: len(records) >= 1)] == [b"paused"]
    reader.pause([(topic, 0), (topic, 1)])
    reader.assign({(topic, 0): BEGINNING, (topic, 1): BEGINNING})
    assert len(read_to_end(reader)) == len(first) + 2


def test_lag_is_what_is_left_to_read(cluster: Cluster) -> None:
    """None before the first fetch, then offsets up to the high watermark, 0 at the end."""
    topic = cluster.topic("lag")
    partition = (topic, 0)
    send_all(cluster.producer(), topic, numbered(10))
    reader = cluster.reader()
    reader.assign({partition: BEGINNING})
    assert reader.lag() == {partition: None}
    read = read_until(reader, lambda records: len(records) >= 3 or reader.at_end())
    while len(read) < 3:
        read += reader.read(3 - len(read), 0.2)
    reader.assign({partition: 4})
    assert len(reader.read(1, DEADLINE_S)) == 1
    assert reader.lag() == {partition: 5}
    read_to_end(reader)
    assert reader.lag() == {partition: 0}


def test_a_committed_transaction_is_read_whole_and_in_order(cluster: Cluster) -> None:
    """Messages of several `send` calls arrive in order; the ends of transactions may take offsets, lag still becomes 0."""
    topic = cluster.topic("transactions")
    holder = cluster.transactions("run-1")
    for number in range(3):
        holder.send(topic, [(b"run-1", b"%d-%d" % (number, part)) for part in range(2)])
    reader = cluster.reader()
    reader.assign({(topic, 0): BEGINNING})
    records = read_to_end(reader)
    assert [record.value for record in records] == [b"0-0", b"0-1", b"1-0", b"1-1", b"2-0", b"2-1"]
    assert reader.lag() == {(topic, 0): 0}
    # What a checkpoint would store, the offset after the last record, is a position to read on from.
    reader.assign({(topic, 0): records[-1].offset + 1})
    assert read_to_end(reader) == []
    holder.send(topic, [(b"run-1", b"next")])
    assert [record.value for record in read_until(reader, lambda records: len(records) >= 1)] == [b"next"]


def test_the_newest_holder_of_a_transactional_id_fences_the_others(cluster: Cluster) -> None:
    """The first can't write any more, says so each time, and the second can; another id is not touched."""
    topic = cluster.topic("fencing")
    first, other = cluster.transactions("run-1"), cluster.transactions("run-2")
    first.send(topic, [(b"k", b"first")])
    second = cluster.transactions("run-1")
    for _ in range(2):
        with pytest.raises(FencedError):
            first.send(topic, [(b"k", b"too late")])
    second.send(topic, [(b"k", b"second")])
    other.send(topic, [(b"k", b"other")])
    reader = cluster.reader()
    reader.assign({(topic, 0): BEGINNING})
    assert [record.value for record in read_to_end(reader)] == [b"first", b"second", b"other"]


def test_a_position_beyond_the_log_is_an_error(cluster: Cluster) -> None:
    """It names the place, is repeated, is never a jump to another offset, and ends with the next `assign`."""
    topic = cluster.topic("beyond")
    send_all(cluster.producer(), topic, numbered(3))
    reader = cluster.reader()
    reader.assign({(topic, 0): 1000})
    for _ in range(2):
        with pytest.raises(BrokerError, match=rf"{topic}\[0\]@1000"):
            read_until(reader, lambda records: bool(records), deadline_s=20.0)
    reader.assign({(topic, 0): BEGINNING})
    assert len(read_to_end(reader)) == 3


def test_offsets_of_another_cluster_are_not_read(cluster: Cluster) -> None:
    """A reader that was told the cluster id reads from that cluster only."""
    topic = cluster.topic("cluster")
    send_all(cluster.producer(), topic, numbered(1))
    known = cluster.admin().cluster_id(DEADLINE_S)
    reader = cluster.reader(cluster_id=known)
    reader.assign({(topic, 0): BEGINNING})
    assert len(read_to_end(reader)) == 1
    foreign = cluster.reader(cluster_id="somewhere-else")
    foreign.assign({(topic, 0): BEGINNING})
    with pytest.raises(BrokerError, match="somewhere-else"):
        read_until(foreign, lambda records: len(records) > 1, deadline_s=10.0)


def test_the_admin_answers_what_processes_ask_at_start(cluster: Cluster) -> None:
    """Partitions of a topic, 0 for one that does not exist, which asking does not create; one node."""
    admin = cluster.admin()
    topic = cluster.topic("admin", 3)
    assert admin.partitions(topic, DEADLINE_S) == 3
    assert [admin.partitions(topic + "-missing", DEADLINE_S) for _ in range(2)] == [0, 0]
    assert len(admin.nodes(DEADLINE_S)) == 1
    assert admin.cluster_id(DEADLINE_S)


def test_topics_are_told_apart_from_those_of_the_same_name_before(cluster: Cluster) -> None:
    """A topic that was deleted is not there, asking does not create it, and one that is made anew has another id."""
    admin = cluster.admin()
    topic, other = cluster.topic("anew", 2), cluster.topic("other", 1)

    def states(*, of: set[str]) -> dict[str, TopicState]:
        """As soon as just these are there: a broker learns of a change a moment after it was made."""
        return (
            eventually(
                lambda: found if (found := admin.topics([topic, other], DEADLINE_S)).keys() == of else None, f"topics {of}"
            )
            or {}
        )

    before = states(of={topic, other})
    assert {name: state.partitions for name, state in before.items()} == {topic: 2, other: 1}
    assert admin.topics([topic, other], DEADLINE_S) == before
    cluster.delete_topic(topic)
    assert states(of={other}) == {other: before[other]}
    cluster.topic("anew", 2)
    again = states(of={topic, other})[topic]
    assert (again.partitions, again.id != before[topic].id) == (2, True)


def test_partitions_begin_at_the_first_record_that_is_there(cluster: Cluster) -> None:
    topic = cluster.topic("begin", 2)
    send_all(cluster.producer(), topic, numbered(3))
    partitions = [(topic, 0), (topic, 1)]
    assert cluster.reader().first_offsets(partitions, DEADLINE_S) == dict.fromkeys(partitions, 0)


@elastic
def test_deleted_records_are_no_longer_there_and_reading_them_is_an_error(cluster: Cluster) -> None:
    """It names the place; also where all records of the partition are gone."""
    topic = cluster.topic("deleted")
    send_all(cluster.producer(), topic, numbered(5))
    for kept_from in (3, 5):
        cluster.delete_before((topic, 0), kept_from)
        reader = cluster.reader()
        assert reader.first_offsets([(topic, 0)], DEADLINE_S) == {(topic, 0): kept_from}
        reader.assign({(topic, 0): kept_from - 1})
        with pytest.raises(NoSuchOffsetError, match=rf"{topic}\[0\]@{kept_from - 1}"):
            read_until(reader, lambda records: bool(records), deadline_s=20.0)
        reader.assign({(topic, 0): kept_from})
        assert [record.offset for record in read_to_end(reader)] == list(range(kept_from, 5))


@elastic
def test_new_partitions_are_read_beside_the_old_ones_which_go_on_where_they_are(cluster: Cluster) -> None:
    """Nothing is read twice or left out; a paused partition stays paused; a partition that is not there yet is a retriable
    error, and adds nothing."""
    topic = cluster.topic("grows", 2)
    keys = [b"%d" % index for index in range(64)]
    first = send_all(cluster.producer(), topic, [(key, b"first") for key in keys])
    reader = cluster.reader()
    reader.assign({(topic, 0): BEGINNING, (topic, 1): BEGINNING})
    assert len(read_to_end(reader)) == len(keys)
    reader.pause([(topic, 0)])
    new: dict[Partition, int] = {(topic, 2): 0, (topic, 3): BEGINNING}
    with pytest.raises(BrokerError) as caught:
        reader.add(new)
    assert caught.value.retriable
    cluster.add_partitions(topic, 4)
    eventually(lambda: cluster.admin().topics([topic], DEADLINE_S)[topic].partitions == 4, "the topic has four partitions")
    reader.add(new)
    # A producer that knows the topic from before would write to its old partitions for a while.
    second = send_all(cluster.producer(), topic, [(key, b"second") for key in keys])
    placed = Counter((report.partition, report.offset) for report in second)
    assert {partition for partition, _ in placed} == {0, 1, 2, 3}
    waiting = {place for place in placed if place[0] == 0}
    read = read_until(reader, lambda records: len(records) >= len(keys) - len(waiting))
    read += reader.read(100, 0.5)
    assert Counter((record.partition, record.offset) for record in read) == placed - Counter(waiting)
    reader.resume([(topic, 0)])
    rest = read_until(reader, lambda records: len(records) >= len(waiting))
    assert {(record.partition, record.offset) for record in rest} == waiting
    assert {record.value for record in [*read, *rest]} == {b"second"}
    read_until(reader, lambda records: reader.at_end())
    assert set(reader.lag()) == {(topic, number) for number in range(4)}
    assert len(first) == len(keys)
