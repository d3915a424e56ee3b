"""What echo/log.py promises about records that a client can't read: by fake, embedded broker and Apache Kafka."""

import itertools
from collections.abc import Callable

import pytest

from echo.errors import CorruptRecordError
from echo.log import BEGINNING, LogReader, LogRecord
from tests.contracts.test_log_contract import Cluster, FakeCluster, RealCluster, cluster, read_to_end, read_until
from tests.fakes.log import UnreadableHeaders
from tests.poison import protocol

__all__ = ["cluster"]

Spans = list[tuple[int, int, bytes | None]]

# The fake puts it into partition 0, of one or two.
KEY = b"zero"


def put(cluster: Cluster, topic: str, *batches: bytes | int) -> None:
    """Sound values, each in a batch of its own, and batches of so many offsets that unpack to more than any client takes."""
    for one in batches:
        if isinstance(cluster, FakeCluster):
            if isinstance(one, int):
                cluster.log.append_unreadable(topic, 0, one)
            else:
                with cluster.log.changed:
                    assert cluster.log.append(topic, KEY, one, []).partition == 0
        else:
            assert isinstance(cluster, RealCluster)
            raw = protocol.bomb(101 * 10**6, protocol.ZSTD, span=one) if isinstance(one, int) else sound(one)
            send(cluster, topic, raw)


def sound(value: bytes) -> bytes:
    return protocol.batch([protocol.record(value, key=KEY)])


def send(cluster: RealCluster, topic: str, raw: bytes) -> None:
    with protocol.RawProducer(cluster.servers) as producer:
        answer = producer.produce(topic, 0, raw)
    assert answer.error == 0, answer


def spans(records: list[LogRecord]) -> Spans:
    return [(record.offset, record.span, record.value) for record in records]


def read_from(cluster: Cluster, topic: str, offset: int) -> list[LogRecord]:
    reader = cluster.reader()
    reader.assign({(topic, 0): offset})
    records = read_to_end(reader)
    assert reader.lag() == {(topic, 0): 0}
    return records


def test_offsets_that_can_not_be_unpacked_come_as_one_run(cluster: Cluster) -> None:
    """In their place, with the reason; reading resumes with the first record after them."""
    topic = cluster.topic("run")
    put(cluster, topic, b"before", 5, b"after")
    before, run, after = read_from(cluster, topic, BEGINNING)
    assert spans([before, run, after]) == [(0, 1, b"before"), (1, 5, None), (6, 1, b"after")]
    assert (run.key, list(run.headers), run.unreadable != "") == (None, [], True)
    assert (before.unreadable, after.unreadable, run.end) == ("", "", 6)


@pytest.mark.parametrize("first", range(1, 8))
def test_reading_may_begin_in_such_a_run_and_after_it(cluster: Cluster, first: int) -> None:
    """A restart resumes where the last checkpoint stood."""
    topic = cluster.topic("inside")
    put(cluster, topic, b"before", 5, b"after")
    expected: Spans = [(first, 6 - first, None)] if first < 6 else []
    assert spans(read_from(cluster, topic, first)) == expected + ([(6, 1, b"after")] if first < 7 else [])


def test_the_log_may_end_or_begin_with_one_and_several_may_follow_each_other(cluster: Cluster) -> None:
    topic = cluster.topic("edges")
    put(cluster, topic, 1, 3, 2, b"sound", 40)
    assert spans(read_from(cluster, topic, BEGINNING)) == [
        (0, 1, None),
        (1, 3, None),
        (4, 2, None),
        (6, 1, b"sound"),
        (7, 40, None),
    ]


def test_what_comes_after_one_is_read_as_it_comes(cluster: Cluster) -> None:
    topic = cluster.topic("later")
    reader = cluster.reader()
    reader.assign({(topic, 0): BEGINNING})
    for number in itertools.islice(itertools.count(), 3):
        put(cluster, topic, 2, b"%d" % number)
        found = read_until(reader, sound_ones(1))
        assert spans(found) == [(3 * number, 2, None), (3 * number + 2, 1, b"%d" % number)]
    assert read_until(reader, lambda _: reader.at_end()) == []


def sound_ones(count: int) -> Callable[[list[LogRecord]], bool]:
    return lambda records: sum(not record.unreadable for record in records) >= count


def test_a_pause_holds_the_search_and_other_partitions_are_read_meanwhile(cluster: Cluster) -> None:
    topic = cluster.topic("paused", 2)
    put(cluster, topic, 3, b"after")
    reader: LogReader = cluster.reader()
    reader.assign({(topic, 0): BEGINNING, (topic, 1): BEGINNING})
    reader.pause([(topic, 0)])
    assert reader.read(10, 0.5) == []
    reader.resume([(topic, 0)])
    assert spans(read_until(reader, sound_ones(1))) == [(0, 3, None), (3, 1, b"after")]


def test_a_header_name_that_is_not_utf_8_costs_the_headers_alone(cluster: Cluster) -> None:
    """Key and value come; looking at the headers is an error each time. The records around it are whole, also after the
    interpreter has seen so many that it takes the client's good conduct for granted."""
    topic = cluster.topic("names")
    for _ in range(50):
        put(cluster, topic, b"sound")
    if isinstance(cluster, FakeCluster):
        with cluster.log.changed:
            cluster.log.append(topic, KEY, b"v", UnreadableHeaders())
    else:
        assert isinstance(cluster, RealCluster)
        headers = [(b"fine", b"1"), (b"\xff\xfe", b"2")]
        send(cluster, topic, protocol.batch([protocol.record(b"v", key=KEY, headers=headers)]))
    put(cluster, topic, b"next")
    *before, odd, plain = read_from(cluster, topic, BEGINNING)
    assert [list(record.headers) for record in before] == [[]] * 50
    assert (odd.key, odd.value, odd.unreadable) == (KEY, b"v", "")
    for _ in range(3):
        with pytest.raises(CorruptRecordError, match="not UTF-8"):
            list(odd.headers)
        assert odd.known_headers()[0] == []
        assert "not UTF-8" in odd.known_headers()[1]
    assert (list(plain.headers), plain.value) == ([], b"next")
