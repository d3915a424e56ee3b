"""What only a real Apache Kafka shows: open and aborted transactions, compaction, a spoiled disk, and the loss of a leader."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Producer
from structlog.testing import capture_logs

from consumers.policy import read_told
from echo.broker import ApacheBroker, BrokerPlan, RunningBroker, start_broker
from echo.errors import BrokerError, FencedError
from echo.kafka import KafkaLogAdmin, KafkaLogProducer, KafkaLogReader, TransactionalProducer
from echo.log import BEGINNING, Delivery, LogRecord
from tests.conftest import CreateTopic
from tests.poison.protocol import RawProducer, batch, record

pytestmark = pytest.mark.kafka

DEADLINE_S = 60.0


def settings_of(broker: RunningBroker) -> dict[str, str]:
    return {"bootstrap.servers": broker.bootstrap_servers}


def reader_of(broker: RunningBroker) -> KafkaLogReader:
    return KafkaLogReader(settings_of(broker), client_id="t-in", max_record_bytes=2**20)


def producer_of(broker: RunningBroker) -> KafkaLogProducer:
    return KafkaLogProducer(settings_of(broker), client_id="t-out", max_record_bytes=2**20, queue_bytes=2**24)


def read_until(reader: KafkaLogReader, done: Callable[[list[LogRecord]], bool]) -> list[LogRecord]:
    deadline = time.monotonic() + DEADLINE_S
    records: list[LogRecord] = []
    while not done(records):
        assert time.monotonic() < deadline, f"{len(records)} records, lag {reader.lag()}, {reader.last_error}"
        records += reader.read(100, 0.2)
    return records


def test_a_transaction_is_read_when_it_is_committed_and_never_when_its_holder_died(
    apache: RunningBroker, create_topic: CreateTopic, topic_prefix: str
) -> None:
    """Messages of a holder that ended in mid-transaction stay invisible, also after the next holder took over; lag counts the
    records that can't be read yet, and becomes 0."""
    topic = create_topic(apache, "tx")
    died = Producer({**settings_of(apache), "transactional.id": topic_prefix + "run", "log_level": 2})
    died.init_transactions(DEADLINE_S)
    died.begin_transaction()
    died.produce(topic, key=b"k", value=b"never")
    assert died.flush(DEADLINE_S) == 0
    with closing(reader_of(apache)) as reader:
        reader.assign({(topic, 0): BEGINNING})
        assert read_until(reader, lambda records: reader.at_end()) == []
        assert reader.lag() == {(topic, 0): 1}
        heir = TransactionalProducer(settings_of(apache), transactional_id=topic_prefix + "run", client_id="t-tx")
        heir.send(topic, [(b"k", b"committed")])
        records = read_until(reader, lambda records: len(records) >= 1)
        assert [record.value for record in records] == [b"committed"]
        # The aborted message, its end, and the end of the second transaction take an offset each.
        assert records[0].offset == 2
        read_until(reader, lambda records: reader.lag() == {(topic, 0): 0})
        assert reader.at_end()


def test_reading_a_compacted_topic_starts_at_the_first_survivor(apache: RunningBroker, create_topic: CreateTopic) -> None:
    """Offsets that compaction took away are passed over, from the beginning and from an offset in the gap."""
    config = {
        "cleanup.policy": "compact",
        "segment.ms": "500",
        "min.cleanable.dirty.ratio": "0.01",
        "max.compaction.lag.ms": "500",
    }
    topic = create_topic(apache, "compacted", config=config)
    with closing(producer_of(apache)) as producer, closing(reader_of(apache)) as reader:
        latest = 0

        def survivors() -> list[LogRecord]:
            """Write one more, which rolls the segment, and read all."""
            nonlocal latest
            for _ in range(20):
                latest += 1
                assert producer.send(topic, key=b"run", value=b"%d" % latest)
            assert producer.flush(DEADLINE_S) == 0
            reader.assign({(topic, 0): BEGINNING})
            return read_until(reader, lambda records: reader.at_end())

        deadline = time.monotonic() + DEADLINE_S
        while len(records := survivors()) == latest:
            assert time.monotonic() < deadline, "nothing was compacted"
            reader.read(1, 0.6)
        assert records[0].offset > 0
        assert records[-1].value == b"%d" % latest
        reader.assign({(topic, 0): 1})
        again = read_until(reader, lambda records: reader.at_end())
        assert again[0].offset >= records[0].offset


def test_announcing_goes_on_after_the_broker_was_away(
    apache_plan: BrokerPlan, tmp_path: Path, create_topic: CreateTopic
) -> None:
    """While the broker is dead, `send` fails at its deadline with a retriable error; called again after the broker's return it
    succeeds, and what was sent is in the log whole and in order."""
    soon = {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"}
    with start_broker(apache_plan, data_dir=tmp_path, heap_mib=384, overrides=soon) as broker:
        assert isinstance(broker, ApacheBroker)
        topic = create_topic(broker, "control")
        transactions = TransactionalProducer(settings_of(broker), transactional_id="run", client_id="t-tx", timeout_s=3.0)
        transactions.send(topic, [(b"run", b"first")])
        # The commit is acknowledged before it is marked in the topic. A lone node that is killed in between never sets the mark
        # when it comes back: it finds no leader while its own old session expires, and takes the topic for deleted.
        with closing(reader_of(broker)) as reader:
            reader.assign({(topic, 0): BEGINNING})
            read_until(reader, lambda records: len(records) == 1)
        broker.kill_node(1)
        for _ in range(2):
            with pytest.raises(BrokerError) as caught:
                transactions.send(topic, [(b"run", b"away-a"), (b"run", b"away-b")])
            assert caught.value.retriable
            assert not isinstance(caught.value, FencedError)
        broker.restart_node(1)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                transactions.send(topic, [(b"run", b"back-a"), (b"run", b"back-b")])
                break
            except BrokerError as error:
                if not error.retriable or time.monotonic() >= deadline:
                    raise
        with closing(reader_of(broker)) as reader:
            reader.assign({(topic, 0): BEGINNING})
            values = [record.value for record in read_until(reader, lambda records: reader.at_end())]
        assert values[0] == b"first"
        assert values[-2:] == [b"back-a", b"back-b"]
        assert values.count(b"away-a") == values.count(b"away-b")


def test_who_is_fenced_in_mid_transaction_closes_without_another_error(
    apache: RunningBroker, create_topic: CreateTopic, topic_prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does the client write to standard error what `send` raised."""
    topic = create_topic(apache, "fenced")
    first = TransactionalProducer(settings_of(apache), transactional_id=topic_prefix + "run", client_id="t-tx")
    first.send(topic, [(b"run", b"first")])
    first._producer.begin_transaction()
    first._producer.produce(topic, key=b"run", value=b"never")
    assert first._producer.flush(DEADLINE_S) == 0
    second = TransactionalProducer(settings_of(apache), transactional_id=topic_prefix + "run", client_id="t-tx")
    with pytest.raises(FencedError):
        first._finish(first._producer.commit_transaction, time.monotonic() + DEADLINE_S, "committing")
    first.close()
    second.send(topic, [(b"run", b"second")])
    second.close()
    assert "FATAL" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def three_nodes(apache_plan: BrokerPlan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheBroker]:
    # A dead node is noticed after its session, 9 s by default.
    soon = {"broker.session.timeout.ms": "4000", "broker.heartbeat.interval.ms": "1000"}
    folder = tmp_path_factory.mktemp("three")
    with start_broker(apache_plan, data_dir=folder, nodes=3, heap_mib=384, ready_s=150.0, overrides=soon) as broker:
        assert isinstance(broker, ApacheBroker)
        yield broker


@pytest.mark.timeout(400)
def test_a_killed_leader_loses_and_doubles_nothing(three_nodes: ApacheBroker, create_topic: CreateTopic) -> None:
    """kill -9 of the leader in mid-stream: all that was sent is acknowledged and read once, in order, by clients that were
    never told; announcing goes on too; then the node comes back."""
    broker = three_nodes
    topic = create_topic(broker, "failover", 1, 3, {"min.insync.replicas": "2"})
    control = create_topic(broker, "control", 1, 3, {"min.insync.replicas": "2"})
    admin = KafkaLogAdmin(settings_of(broker), client_id="t-admin")
    assert sorted(broker.nodes) == sorted(admin.nodes(DEADLINE_S)) == [1, 2, 3]
    reports: list[Delivery] = []
    with closing(producer_of(broker)) as producer, closing(reader_of(broker)) as reader:
        transactions = TransactionalProducer(settings_of(broker), transactional_id=control, client_id="t-tx", timeout_s=90.0)
        transactions.send(control, [(b"run", b"before")])
        reader.assign({(topic, 0): BEGINNING})
        sent = 0

        def send(count: int) -> None:
            nonlocal sent
            for _ in range(count):
                while not producer.send(topic, key=b"k", value=b"%d" % sent, on_delivery=reports.append):
                    producer.poll(0.1)
                sent += 1
            producer.poll(0)

        send(500)
        read = read_until(reader, lambda records: len(records) >= 100)
        leader = admin.metadata(DEADLINE_S).topics[topic].partitions[0].leader
        send(500)
        broker.kill_node(leader)
        assert sorted(broker.nodes) == sorted({1, 2, 3} - {leader})
        send(500)
        assert producer.flush(120.0) == 0
        assert [report.error for report in reports] == [None] * sent
        read += read_until(reader, lambda records: len(read) + len(records) >= sent)
        assert [record.value for record in read] == [b"%d" % index for index in range(sent)]
        transactions.send(control, [(b"run", b"after")])
        reader.assign({(control, 0): BEGINNING})
        announced = read_until(reader, lambda records: len(records) >= 2)
        assert [record.value for record in announced] == [b"before", b"after"]
        broker.check()
        broker.restart_node(leader)
        assert sorted(broker.nodes) == [1, 2, 3]


def test_the_three_nodes_data_folders_are_apart(three_nodes: ApacheBroker) -> None:
    """Each node has its own log and its own output."""
    folders = sorted(path.name for path in Path(three_nodes.data_dir).iterdir() if path.is_dir())
    assert folders == ["node-1", "node-2", "node-3"]
    assert all((three_nodes.data_dir / name / "broker.log").stat().st_size for name in folders)


def open_transaction(broker: RunningBroker, topic: str, name: str) -> Producer:
    """A stranger's, with one message in it that the broker has."""
    stranger = Producer({**settings_of(broker), "transactional.id": name, "transaction.timeout.ms": 60_000, "log_level": 2})
    stranger.init_transactions(DEADLINE_S)
    stranger.begin_transaction()
    stranger.produce(topic, key=b"k", value=b"open", partition=0)
    assert stranger.flush(DEADLINE_S) == 0
    return stranger


def send(broker: RunningBroker, topic: str, value: bytes) -> None:
    with closing(producer_of(broker)) as producer:
        assert producer.send(topic, key=b"k", value=value)
        assert producer.flush(DEADLINE_S) == 0


def test_a_strangers_open_transaction_holds_up_nothing_where_ours_write_none(
    apache: RunningBroker, create_topic: CreateTopic, topic_prefix: str
) -> None:
    """Its records are a stranger's like any other, also once they are aborted; their end takes an offset, and lag becomes 0."""
    topic = create_topic(apache, "open")
    stranger = open_transaction(apache, topic, topic_prefix + "stranger")
    send(apache, topic, b"ours")
    with closing(KafkaLogReader(settings_of(apache), client_id="t-in", max_record_bytes=2**20, committed=False)) as reader:
        reader.assign({(topic, 0): BEGINNING})
        records = read_until(reader, lambda records: reader.at_end())
        assert [(record.offset, record.value) for record in records] == [(0, b"open"), (1, b"ours")]
        assert reader.lag() == {(topic, 0): 0}
        stranger.abort_transaction(DEADLINE_S)
        send(apache, topic, b"more")
        records = read_until(reader, lambda records: len(records) == 1)
        assert [(record.offset, record.value) for record in records] == [(3, b"more")]
        read_until(reader, lambda records: reader.at_end())
        assert reader.lag() == {(topic, 0): 0}
        reader.assign({(topic, 0): BEGINNING})
        again = read_until(reader, lambda records: reader.at_end())
        assert [record.value for record in again] == [b"open", b"ours", b"more"]
        assert reader.last_error == ""


def test_a_reader_that_an_open_transaction_holds_up_says_so(
    apache: RunningBroker, create_topic: CreateTopic, topic_prefix: str
) -> None:
    """With the place and how much it holds back, for as long as it does; what the trainer reads at its start waits for it."""
    topic = create_topic(apache, "held")
    ours = TransactionalProducer(settings_of(apache), transactional_id=topic_prefix + "run", client_id="t-tx")
    ours.send(topic, [(b"run", b"first")])
    stranger = open_transaction(apache, topic, topic_prefix + "stranger")
    ours.send(topic, [(b"run", b"second")])
    with closing(reader_of(apache)) as reader, capture_logs() as said:
        reader.assign({(topic, 0): BEGINNING})
        records = read_until(reader, lambda records: bool(reader.last_error))
        assert [record.value for record in records] == [b"first"]
        assert f"a transaction that is still open holds back 3 offsets from {topic}[0]@2 on" in reader.last_error
        assert "reading is held up" in [entry["event"] for entry in said]
        read_told(reader, topic=topic, run_id="run", waiting_s=0.5, deadline_s=DEADLINE_S, held_s=2.0)
        (waiting,) = {entry["event"].partition(" for")[0] for entry in said if entry["event"].startswith("waiting for the end")}
        assert waiting
        (short,) = [entry for entry in said if entry["event"] == "the control topic is not read to its end"]
        assert "holds back 3 offsets" in short["why"]
        stranger.abort_transaction(DEADLINE_S)
        records = read_until(reader, lambda records: bool(records))
        assert [record.value for record in records] == [b"second"]
        read_until(reader, lambda records: reader.last_error == "")
    ours.close()


@pytest.mark.parametrize("committed", [True, False])
def test_a_batch_that_the_brokers_disk_spoiled_is_passed_over(
    apache: RunningBroker, create_topic: CreateTopic, committed: bool
) -> None:
    """One bit of a stored batch is flipped, so that its sum is wrong; the batches around it are read."""
    topic = create_topic(apache, "spoiled")
    with RawProducer(apache.bootstrap_servers) as raw:
        for number in range(3):
            values = [record(b"%d-%d spoil-me" % (number, at), offset_delta=at) for at in range(4)]
            assert raw.produce(topic, 0, batch(values)).error == 0
    assert isinstance(apache, ApacheBroker)
    (segment,) = apache.data_dir.glob(f"node-1/data/{topic}-0/*.log")
    stored = bytearray(segment.read_bytes())
    at = stored.index(b"1-2 spoil-me")
    with segment.open("r+b") as file:
        file.seek(at)
        file.write(bytes([stored[at] ^ 1]))
    with closing(KafkaLogReader(settings_of(apache), client_id="t-in", max_record_bytes=2**20, committed=committed)) as reader:
        reader.assign({(topic, 0): BEGINNING})
        records = read_until(reader, lambda records: reader.at_end())
        assert reader.lag() == {(topic, 0): 0}
    assert [(one.offset, one.span) for one in records if one.unreadable] == [(4, 4)]
    assert "CRC32C" in next(one.unreadable for one in records if one.unreadable)
    assert [one.offset for one in records if not one.unreadable] == [0, 1, 2, 3, 8, 9, 10, 11]
