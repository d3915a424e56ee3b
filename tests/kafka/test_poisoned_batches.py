"""Strangers' batches on a real Apache Kafka, in topics as `echo-topics apply` makes them and in topics that keep what comes."""

from contextlib import closing

import pytest

from echo.broker import ApacheBroker, RunningBroker
from echo.kafka import KafkaLogReader
from echo.log import BEGINNING, LogRecord
from echo.topics import load
from tests.conftest import CreateTopic
from tests.contracts.test_log_contract import read_to_end, read_until
from tests.poison.protocol import GZIP, LZ4, NONE, SNAPPY, ZSTD, Answer, RawProducer, batch, bomb, record

pytestmark = pytest.mark.kafka

PROMISED = load().file.topics.trajectories.config
AS_IT_COMES = {**PROMISED, "compression.type": "producer"}


def config(settings: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in settings.items() if key != "min.insync.replicas"}


def produce(broker: RunningBroker, topic: str, *batches: bytes) -> list[Answer]:
    with RawProducer(broker.bootstrap_servers) as raw:
        return [raw.produce(topic, 0, one) for one in batches]


def read(broker: RunningBroker, topic: str, *, committed: bool = False) -> list[LogRecord]:
    settings = {"bootstrap.servers": broker.bootstrap_servers}
    with closing(KafkaLogReader(settings, client_id="t", max_record_bytes=2**24, committed=committed)) as reader:
        reader.assign({(topic, 0): BEGINNING})
        return read_to_end(reader)


def three(deltas: tuple[int, int, int], codec: int = NONE) -> bytes:
    return batch([record(b"%d" % number, offset_delta=delta) for number, delta in enumerate(deltas)], codec=codec)


@pytest.mark.parametrize("codec", [GZIP, LZ4, ZSTD])
def test_a_batch_that_unpacks_to_more_than_readers_take_is_passed_over_whatever_packed_it(
    apache: RunningBroker, create_topic: CreateTopic, codec: int
) -> None:
    """The client has a bound for one codec alone, so the topic has every batch packed by that one."""
    topic = create_topic(apache, "bomb", config=config(PROMISED))
    answers = produce(apache, topic, three((0, 1, 2)), bomb(150 * 2**20, codec), three((0, 1, 2)))
    assert [answer.error for answer in answers] == [0, 0, 0]
    records = read(apache, topic)
    assert [one.offset for one in records] == list(range(7))
    assert [one.offset for one in records if one.unreadable] == [3]


def test_a_batch_that_unpacks_to_more_than_the_brokers_heap_is_refused_and_the_broker_lives(
    apache: RunningBroker, create_topic: CreateTopic
) -> None:
    topic = create_topic(apache, "heap", config=config(PROMISED))
    refused, taken = produce(apache, topic, bomb(900 * 2**20, GZIP), three((0, 1, 2)))
    assert (refused.error != 0, taken.error) == (True, 0)
    assert [one.value for one in read(apache, topic)] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4])
@pytest.mark.parametrize("deltas", [(0, 0, 0), (2, 1, 0), (0, -1, -2), (0, 1000, 2000)])
def test_records_that_lie_about_their_offsets_get_true_ones(
    apache: RunningBroker, create_topic: CreateTopic, codec: int, deltas: tuple[int, int, int]
) -> None:
    """Or the broker refuses the batch."""
    topic = create_topic(apache, "lies", config=config(PROMISED))
    taken, after = produce(apache, topic, three(deltas, codec), three((0, 1, 2)))
    assert after.error == 0
    expected = [b"0", b"1", b"2"] * (2 if taken.error == 0 else 1)
    assert [(one.offset, one.value, one.unreadable) for one in read(apache, topic)] == [
        (offset, value, "") for offset, value in enumerate(expected)
    ]


@pytest.mark.parametrize("deltas", [(0, 0, 0), (2, 1, 0), (0, -1, -2), (0, 1000, 2000)])
def test_where_the_broker_keeps_lies_they_end_no_reader_and_cost_no_other_record(
    apache: RunningBroker, create_topic: CreateTopic, deltas: tuple[int, int, int]
) -> None:
    """In a topic that was not made by Echo. Offsets rise, and the records before and after are read once."""
    topic = create_topic(apache, "kept-lies", config=config(AS_IT_COMES))
    answers = produce(apache, topic, three((0, 1, 2)), three(deltas), three((0, 1, 2)))
    assert [answer.base_offset for answer in answers] == [0, 3, 6]
    records = read(apache, topic)
    offsets = [one.offset for one in records]
    assert offsets == sorted(set(offsets))
    assert [one.value for one in records if one.offset < 3] == [one.value for one in records if one.offset >= 6]
    assert [one.offset for one in records if one.offset >= 6] == [6, 7, 8]


@pytest.mark.parametrize(("readable", "committed"), [(0, False), (1, False), (7, False), (0, True), (3, True)])
def test_a_batch_that_the_client_is_silent_about_is_passed_over(
    apache: RunningBroker, create_topic: CreateTopic, readable: int, committed: bool
) -> None:
    """A record claims to have no length, which Kafka lets in. Those before it in the batch are read."""
    topic = create_topic(apache, "silent", config=config(PROMISED))
    records = [record(b"%d" % number, offset_delta=number) for number in range(readable)]
    records.append(record(b"v", offset_delta=readable, length=0))
    records += [record(b"later", offset_delta=number) for number in range(readable + 1, readable + 3)]
    answers = produce(apache, topic, batch(records, codec=ZSTD), three((0, 1, 2)))
    assert [answer.error for answer in answers] == [0, 0]
    found = read(apache, topic, committed=committed)
    end = readable + 3
    assert [(one.offset, one.span) for one in found if one.unreadable] == [(readable, 3)]
    assert [one.offset for one in found if not one.unreadable] == [*range(readable), end, end + 1, end + 2]


@pytest.mark.parametrize("committed", [False, True])
def test_such_a_batch_is_passed_over_by_a_reader_that_waited_at_the_end_for_it(
    apache: RunningBroker, create_topic: CreateTopic, committed: bool
) -> None:
    topic = create_topic(apache, "waiting", config=config(PROMISED))
    settings = {"bootstrap.servers": apache.bootstrap_servers}
    with closing(KafkaLogReader(settings, client_id="t", max_record_bytes=2**24, committed=committed)) as reader:
        reader.assign({(topic, 0): BEGINNING})
        assert read_to_end(reader) == []
        produce(apache, topic, batch([record(b"v", length=0)], codec=ZSTD), three((0, 1, 2)))
        found = read_until(reader, lambda records: len(records) >= 4)
    assert [(one.offset, one.unreadable != "") for one in found] == [(0, True), (1, False), (2, False), (3, False)]


def test_what_our_producers_pack_is_stored_as_it_comes(apache: RunningBroker, create_topic: CreateTopic) -> None:
    """The topic's codec costs the broker nothing: a batch of that codec is not packed anew."""
    topic = create_topic(apache, "stored", config=config(PROMISED))
    whole = batch([record(b"0123456789" * 100, offset_delta=number) for number in range(20)], codec=ZSTD)
    assert produce(apache, topic, whole)[0].error == 0
    assert isinstance(apache, ApacheBroker)
    (segment,) = apache.data_dir.glob(f"node-1/data/{topic}-0/*.log")
    assert whole[61:] in segment.read_bytes()
