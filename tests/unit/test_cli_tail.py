"""echo-tail against real brokers: what it shows, where it starts, where it ends."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo import codec, control, dead_letter
from echo.cli import tail as cli
from echo.errors import BrokerError, ConfigError
from echo.kafka import KafkaLogAdmin, KafkaLogProducer, TransactionalProducer
from echo.log import BEGINNING, LogRecord, Partition
from echo.topics import TopicNames, apply, load, plan, read_actual
from tests.fakes.log import FakeLog, FakeReader
from tests.helpers import make_trajectory

Show = Callable[..., list[dict[str, Any]]]


@pytest.fixture(params=["tansu", pytest.param("apache", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest) -> str:
    """bootstrap.servers of a real broker."""
    servers: str = request.getfixturevalue(request.param).bootstrap_servers
    return servers


@pytest.fixture
def names(broker: str, topic_prefix: str) -> TopicNames:
    """Echo's topics, made for one test."""
    spec = load(prefix=topic_prefix)
    admin = KafkaLogAdmin({"bootstrap.servers": broker}, client_id="test")
    apply(plan(spec, read_actual(admin, spec.names)), admin)
    return spec.names


@pytest.fixture
def producer(broker: str) -> Iterator[KafkaLogProducer]:
    made = KafkaLogProducer({"bootstrap.servers": broker}, client_id="test", max_record_bytes=2**24, queue_bytes=2**26)
    yield made
    made.close()


def send_trajectories(producer: KafkaLogProducer, topic: str, count: int, first: int = 0, run_id: str = "run-a") -> None:
    """`count` records of groups of 4; record i has reward i."""
    for number in range(first, first + count):
        record = codec.encode(
            make_trajectory(
                run_id=run_id,
                group_id=f"{run_id}/p/g{number // 4}",
                group_size=4,
                group_index=number % 4,
                sequence_number=number,
                reward=float(number),
            )
        )
        assert producer.send(topic, key=record.key, value=record.value, headers=record.headers)
    assert producer.flush(20) == 0


@pytest.fixture
def show(broker: str, capsys: pytest.CaptureFixture[str]) -> Show:
    """Runs echo-tail to the end of the topic: the objects it prints."""

    def run_it(topic: str, *options: Any) -> list[dict[str, Any]]:
        capsys.readouterr()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main([topic, "-b", broker, "--no-follow", "--json", *map(str, options)])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        said = capsys.readouterr()
        assert ended.value.code == 0, said.err
        return [json.loads(line) for line in said.out.splitlines()]

    return run_it


def rewards(seen: list[dict[str, Any]]) -> list[float]:
    return [item["record"]["reward"] for item in seen]


def test_all_records_from_the_beginning_and_the_last_few(show: Show, producer: KafkaLogProducer, names: TopicNames) -> None:
    assert show(names.trajectories) == []
    send_trajectories(producer, names.trajectories, 40)
    seen = show(names.trajectories, "--from-beginning")
    assert sorted(rewards(seen)) == list(range(40))
    assert dict(seen[0]["headers"])["run"] == "run-a"
    send_trajectories(producer, names.trajectories, 2, first=40)
    assert sorted(rewards(show(names.trajectories, "-n", 2))) == [40, 41]
    assert len(show(names.trajectories)) == 10
    assert show(names.trajectories, "-n", 0) == []
    assert len(show(names.trajectories, "--from-beginning", "-n", 3)) == 3


def test_from_an_offset_only_that_partition(show: Show, producer: KafkaLogProducer, names: TopicNames) -> None:
    send_trajectories(producer, names.trajectories, 64)
    whole = show(names.trajectories, "--from-beginning")
    partition = whole[0]["partition"]
    expected = [item["offset"] for item in whole if item["partition"] == partition and item["offset"] >= 2]
    assert expected
    assert [item["offset"] for item in show(names.trajectories, "--offset", f"{partition}:2")] == expected


def test_only_one_run_however_far_back_it_lies(show: Show, producer: KafkaLogProducer, names: TopicNames) -> None:
    send_trajectories(producer, names.trajectories, 4, run_id="run-old")
    send_trajectories(producer, names.trajectories, 400, run_id="run-new")
    assert rewards(show(names.trajectories, "-n", 2, "--run", "run-old")) == [2, 3]
    assert show(names.trajectories, "-n", 2, "--run", "run-other") == []


def test_unreadable_records_are_shown_and_stop_nothing(show: Show, producer: KafkaLogProducer, names: TopicNames) -> None:
    sound = codec.encode(make_trajectory())
    for value, headers in (
        (b"\x1b[31mjunk", []),
        (sound.value[:40], sound.headers),
        (b"", [("schema", b"9.0")]),
        (sound.value, sound.headers),
    ):
        producer.send(names.trajectories, key=b"same", value=value, headers=headers)
    producer.flush(20)
    seen = show(names.trajectories, "--run", "test-run")
    assert [item["offset"] for item in seen] == [0, 1, 2, 3]
    assert ["problem" in item for item in seen] == [True, True, True, False]
    assert "major version 9" in seen[2]["problem"]


def test_the_last_messages_of_a_transactional_topic(show: Show, broker: str, names: TopicNames) -> None:
    """Every commit takes an offset of its own, so the last record is not at the end."""
    producer = TransactionalProducer({"bootstrap.servers": broker}, transactional_id=names.control, client_id="test")
    for version in range(40):
        message = control.Announcement(
            run_id="run-a",
            sequence=0,
            version=version,
            step=version,
            manifest_urls=(),
            manifest_digest="d",
            nbytes=1,
            created=1.0,
        )
        producer.send(names.control, [(control.key(message), control.encode(message))])
    producer.close()
    assert [item["record"]["version"] for item in show(names.control, "-n", 3)] == [37, 38, 39]
    assert [item["record"]["version"] for item in show(names.control, "-n", 30)] == list(range(10, 40))


def test_heartbeats_and_dead_letters(show: Show, producer: KafkaLogProducer, names: TopicNames) -> None:
    beat = control.Heartbeat(
        run_id="run-a",
        producer_id="p0",
        incarnation="p0.x",
        sequence=1,
        state="sampling",
        serving=3,
        announced=4,
        control_sequence=0,
        granted_limit=9,
        groups_started=1,
        groups_published=1,
        trajectories=8,
        tokens=99,
        busy_seconds=1.0,
        pulls=1,
        failed_pulls=0,
        created=1.0,
    )
    producer.send(names.heartbeats, key=control.key(beat), value=control.encode(beat))
    record = LogRecord(names.trajectories, 3, 17, b"k", [("run", b"run-a")], b"junk", 0)
    key, headers, value = dead_letter.wrap(record, "corrupt", "not a map")
    producer.send(names.dead_letter, key=key, value=value, headers=headers)
    producer.flush(20)
    assert show(names.heartbeats)[0]["record"]["serving"] == 3
    letter = show(names.dead_letter, "--full")[0]
    assert (letter["record"]["reason"], letter["record"]["origin"]) == ("corrupt", f"{names.trajectories}[3]@17")
    assert letter["record"]["value"] == b"junk".hex()
    assert letter["headers"] == [["run", "run-a"]]


def test_it_follows_until_it_is_stopped_and_ends_in_order(broker: str, producer: KafkaLogProducer, names: TopicNames) -> None:
    send_trajectories(producer, names.trajectories, 1)
    command = [sys.executable, "-m", "echo.cli.tail", names.trajectories, "-b", broker, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            assert json.loads(process.stdout.readline())["record"]["reward"] == 0
            send_trajectories(producer, names.trajectories, 1, first=1)
            assert json.loads(process.stdout.readline())["record"]["reward"] == 1
            process.send_signal(signal.SIGINT)
            assert process.stdout.read() == ""
            assert process.wait(30) == 0
        finally:
            watchdog.cancel()
            process.kill()


def test_a_reader_that_closes_the_pipe_ends_it_quietly(broker: str, producer: KafkaLogProducer, names: TopicNames) -> None:
    send_trajectories(producer, names.trajectories, 400)
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "echo.cli.tail", names.trajectories, "-b", broker, "--from-beginning", "--no-follow"]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(theirs)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_topic_that_does_not_exist_is_named_and_not_made(
    broker: str, topic_prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{topic_prefix}control"
    with pytest.raises(SystemExit, match="1"):
        cli.main([name, "-b", broker])
    assert f"topic {name} does not exist" in capsys.readouterr().err
    assert KafkaLogAdmin({"bootstrap.servers": broker}, client_id="test").partitions(name, 10) == 0


def test_names_and_offsets_that_mean_nothing_are_refused() -> None:
    assert cli.role_and_name("control", "a.") == ("control", "a.control")
    assert cli.role_and_name("team.dead_letter", "") == ("dead_letter", "team.dead_letter")
    with pytest.raises(ConfigError, match="none of trajectories, control"):
        cli.role_and_name("orders", "")
    for wrong in ("1", "a:1", "1:-1", "8:0"):
        with pytest.raises(ConfigError, match="--offset"):
            cli.parse_offsets([wrong], 8)
    assert cli.parse_offsets(["0:5", "7:0"], 8) == {0: 5, 7: 0}


# --- where a scan ends and how far it looks back, on a log in memory ---


class SmallReads(FakeReader):
    """Returns a few records at a time, counts them, and calls `between` before each read."""

    def __init__(self, log: FakeLog, between: Callable[[], object] = lambda: None) -> None:
        super().__init__(log)
        self.between = between
        self.taken = 0

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        self.between()
        found = super().read(min(max_records, 7), timeout_s)
        self.taken += len(found)
        return found


def put(log: FakeLog, number: int, key: str) -> None:
    part = log.partition(("t", number))
    record = LogRecord("t", number, part.end, key.encode(), [], b"", int(log.clock() * 1000))
    part.records.append(record if key else None)


def log_of(partitions: list[list[str]], deleted: int = 0) -> tuple[FakeLog, list[Partition]]:
    """A log whose partition p holds these keys; "" is an offset without a record. `deleted` offsets are gone from each."""
    clock = itertools.count()
    log = FakeLog(clock=lambda: next(clock))
    log.create_topic("t", len(partitions))
    for number, keys in enumerate(partitions):
        for key in keys:
            put(log, number, key)
        log.delete_before(("t", number), min(deleted, len(keys)))
    return log, [("t", number) for number in range(len(partitions))]


def last(reader: FakeReader, partitions: list[Partition], count: int, key: bytes = b"a") -> list[LogRecord]:
    return cli.last_records(reader, partitions, count, lambda r: r.key == key, timeout_s=1, stop=threading.Event())


@example([["a"] * 7 + [""] + ["a"] * 8], 0, 1)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(["a", "b", "", "b"]), st.integers(1, 40)), max_size=8).map(
            lambda runs: [key for key, length in runs for _ in range(length)]
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 30),
    st.integers(0, 5),
)
def test_the_last_records_are_the_last_whatever_lies_between(partitions: list[list[str]], deleted: int, count: int) -> None:
    log, numbers = log_of(partitions, deleted)
    wanted = sorted((r for r in log.records("t") if r.key == b"a"), key=lambda r: r.timestamp_ms)
    reader = SmallReads(log)
    assert last(reader, numbers, count) == (wanted[-count:] if count else [])
    with log.changed:
        log.append("t", b"new", b"", ())
    assert [record.key for record in reader.read(9, 0)] == [b"new"], "what comes next is the next record"


def test_it_does_not_read_a_long_log_for_a_few_records() -> None:
    log, numbers = log_of([["a"] * 5000, ["a"] * 5000])
    reader = SmallReads(log)
    assert [record.offset for record in last(reader, numbers, 3)] == [4997, 4998, 4999]
    assert reader.taken < 5200, "one partition is read before the other starts; of the other, only the end"


def test_a_scan_of_a_busy_topic_ends_where_the_end_was() -> None:
    log, numbers = log_of([["a"] * 50, []])
    more = itertools.count()

    def busy() -> None:
        assert next(more) < 100, "it runs after an end that moves away"
        for _ in range(10):
            put(log, 0, "a")

    scan = cli.Scan(SmallReads(log, busy), dict.fromkeys(numbers, BEGINNING), timeout_s=1, stop=threading.Event())
    assert [record.offset for record in scan][:60] == list(range(60))


def test_a_broker_that_does_not_answer_is_given_up() -> None:
    class Silent(FakeReader):
        def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
            return []

    log, numbers = log_of([["a"]])
    with pytest.raises(BrokerError, match=r"no answer for t\[0\]"):
        list(cli.Scan(Silent(log), dict.fromkeys(numbers, BEGINNING), timeout_s=0.01, stop=threading.Event()))
