"""The trainer's reading thread: dead letters wait, are tried again, stop reading when too many wait; no failure is silent."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from consumers import dead_letters
from consumers.dead_letters import DeadLetters
from consumers.intake import DeadLetter, Intake
from consumers.ledger import Ledger, Reason
from consumers.reader import TrajectoryReader
from echo import codec
from echo.errors import BrokerError
from echo.log import BEGINNING, LogReader, LogRecord, Partition
from echo.trajectory import Trajectory, group_id, trajectory_id
from tests.eventually import eventually
from tests.fakes.log import FakeLog, FakeProducer, FakeReader
from tests.helpers import RUN_ID, make_trajectory

TOPIC, DEAD = "trajectories", "dead"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def letter(offset: int, size: int = 10) -> DeadLetter:
    return DeadLetter(LogRecord(TOPIC, 0, offset, None, [("h", None)], b"v" * size, 0), Reason.CORRUPT, "why")


def make_intake(state: Mapping[str, Any] | None = None, buffer_bytes: int = 2**30) -> Intake:
    return Intake(
        run_id=RUN_ID,
        max_staleness=1,
        groups_per_step=1,
        buffer_bytes=buffer_bytes,
        group_deadline_s=60.0,
        ledger=Ledger([0], state),
        newest_version=0,
        vocabulary=100,
    )


class Timed(FakeReader):
    """A read takes `seconds` on the clock, and none in earnest."""

    def __init__(self, log: FakeLog, clock: Clock) -> None:
        super().__init__(log)
        self._clock = clock
        self.seconds = 1.0
        # Records of each partition that can't be read yet.
        self.hidden = 0

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        self._clock.now += self.seconds
        return super().read(max_records, 0.0)

    def lag(self) -> dict[Partition, int | None]:
        return {partition: None if behind is None else behind + self.hidden for partition, behind in super().lag().items()}


def member(number: int, index: int) -> Trajectory:
    return make_trajectory(
        group_id=group_id(RUN_ID, "p", number),
        trajectory_id=trajectory_id(RUN_ID, "p", 2 * number + index),
        group_size=2,
        group_index=index,
    )


def put(log: FakeLog, trajectory: Trajectory) -> None:
    key, headers, value = codec.encode(trajectory)
    with log.changed:
        log.append(TOPIC, key, value, headers)


@contextmanager
def reading(log: FakeLog, intake: Intake, reader: LogReader | None = None) -> Iterator[TrajectoryReader]:
    trajectories = TrajectoryReader(
        intake=intake,
        reader=reader or FakeReader(log),
        producer=FakeProducer(log),
        topic=TOPIC,
        partitions=lambda: log.partitions(TOPIC),
        frontiers=intake.frontiers() or {0: BEGINNING},
        dead_letter_topic=DEAD,
    )
    trajectories.start()
    yield trajectories
    trajectories.close()


def test_a_refused_letter_is_held_and_sent_again_later() -> None:
    """Here the topic is missing at first; nothing is acknowledged before the broker has it."""
    log, clock = FakeLog(), Clock()
    safe: list[DeadLetter] = []
    letters = DeadLetters(FakeProducer(log), DEAD, acknowledged=safe.append, waiting_s=7.0, clock=clock)
    letters.add([letter(0), letter(1)])
    letters.send()
    log.create_topic(DEAD)
    letters.send()
    assert (letters.held, safe) == (2, [])
    clock.now = 7.0
    with capture_logs() as said:
        letters.send()
    assert (letters.held, letters.held_bytes, [found.record.offset for found in safe]) == (0, 0, [0, 1])
    (again,) = [entry for entry in said if entry["event"] == "dead letters refused, trying again"]
    assert (again["count"], "UNKNOWN_TOPIC_OR_PART" in again["error"]) == (2, True)
    assert [record.value for record in log.records(DEAD)] == [b"v" * 10] * 2


def test_a_letter_that_is_too_large_waits_and_holds_up_no_other() -> None:
    log, clock = FakeLog(max_bytes=5000), Clock()
    log.create_topic(DEAD)
    safe: list[DeadLetter] = []
    letters = DeadLetters(FakeProducer(log), DEAD, acknowledged=safe.append, waiting_s=30.0, clock=clock)
    letters.add([letter(0, size=6000), letter(1)])
    letters.send()
    assert ([found.record.offset for found in safe], letters.held) == ([1], 1)
    clock.now = 30.0
    with capture_logs() as said:
        letters.send()
    waiting = [entry["event"] for entry in said if entry["event"].startswith("waiting for topic dead")]
    assert len(waiting) == 1
    assert "trajectories[0]@0" in waiting[0]
    assert "the limit is 5000" in waiting[0]


def test_reading_stops_while_too_many_letters_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "MAX_LETTERS", 150)
    monkeypatch.setattr(dead_letters, "RETRY_S", 0.0)
    log, intake = FakeLog(), make_intake()
    log.create_topic(TOPIC)
    with log.changed:
        for _ in range(1000):
            log.append(TOPIC, b"k", b"poison", [])
    with reading(log, intake) as trajectories:
        eventually(lambda: trajectories.paused, "the reader pauses")
        assert intake.stats().read == intake.stats().pending == 200
        log.create_topic(DEAD)
        eventually(lambda: intake.stats().resolved.get(Reason.CORRUPT) == 1000, "all letters are written")
        eventually(lambda: not trajectories.paused, "the reader goes on")
    assert len(log.records(DEAD)) == 1000


def test_a_restart_reads_a_partition_that_was_never_read_from_where_it_begins() -> None:
    """The topic was used before, and retention has deleted what it held: offset 0 is gone."""
    log = FakeLog()
    log.create_topic(TOPIC)
    log.create_topic(DEAD)
    with log.changed:
        log.append(TOPIC, b"k", b"of another run", [])
    log.delete_before((TOPIC, 0), 1)
    intake = make_intake(make_intake().settle(with_state=True).state)
    with reading(log, intake):
        with log.changed:
            log.append(TOPIC, b"k", b"poison", [])
        eventually(lambda: intake.stats().resolved.get(Reason.CORRUPT) == 1, "the record is read")
    assert intake.frontiers() == {0: 2}


def by_turns(log: FakeLog, intake: Intake, reader: FakeReader, clock: Clock) -> TrajectoryReader:
    """Without its thread: the test has it read."""
    for topic in (TOPIC, DEAD):
        log.create_topic(topic)
    reader.assign({(TOPIC, 0): 0})
    return TrajectoryReader(
        intake=intake,
        reader=reader,
        producer=FakeProducer(log),
        topic=TOPIC,
        partitions=lambda: log.partitions(TOPIC),
        frontiers={0: 0},
        dead_letter_topic=DEAD,
        clock=clock,
    )


def test_reading_stops_while_the_buffer_is_full_and_no_deadline_runs_then() -> None:
    """What would complete a group waits in the log meanwhile: the group is not late."""
    log, clock = FakeLog(), Clock()
    intake, reader = make_intake(buffer_bytes=3 * member(0, 0).nbytes), Timed(log, clock)
    trajectories = by_turns(log, intake, reader, clock)
    for number, index in ((0, 0), (0, 1), (1, 0)):
        put(log, member(number, index))
    trajectories._turn()
    put(log, member(1, 1))
    for _ in range(100):
        trajectories._turn()
    assert trajectories.paused
    assert (intake.stats().read, intake.stats().resolved) == (3, {})
    assert intake.cut(0) is not None
    trajectories._turn()
    assert not trajectories.paused
    assert intake.stats().read == 4
    assert intake.cut(0) is not None


def test_a_groups_deadline_runs_while_it_is_read_and_not_while_the_process_is_held_up() -> None:
    log, clock = FakeLog(), Clock()
    intake, reader = make_intake(), Timed(log, clock)
    trajectories = by_turns(log, intake, reader, clock)
    put(log, member(0, 0))
    trajectories._turn()
    reader.seconds = 3600.0
    trajectories._turn()
    reader.seconds = 0.5
    for _ in range(110):
        trajectories._turn()
    assert intake.stats().resolved == {}
    for _ in range(10):
        trajectories._turn()
    assert intake.stats().resolved == {Reason.DEADLINE: 1}


class Counted(FakeReader):
    """Not every broker knows new partitions at once: the first `refusals` times they can't be added."""

    refusals = 2

    def add(self, positions: Mapping[Partition, int]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise BrokerError("not known to every broker yet", retriable=True)
        super().add(positions)


def test_new_partitions_are_read_from_offset_0_as_soon_as_they_can_be() -> None:
    log, clock = FakeLog(), Clock()
    intake, reader = make_intake(), Counted(log)
    trajectories = by_turns(log, intake, reader, clock)
    log.add_partitions(TOPIC, 3)
    for number in range(12):
        for index in (0, 1):
            put(log, member(number, index))
    for turn in range(4):
        trajectories._turn()
        assert (intake.stats().groups_ready < 12) == (turn < 2)
    assert set(intake.frontiers()) == {0, 1, 2}
    assert set(trajectories.lag()) <= {0, 1, 2}


def test_new_partitions_are_not_read_while_the_buffer_is_full() -> None:
    log, clock = FakeLog(), Clock()
    intake, reader = make_intake(buffer_bytes=member(0, 0).nbytes), Timed(log, clock)
    trajectories = by_turns(log, intake, reader, clock)
    put(log, member(0, 0))
    put(log, member(0, 1))
    trajectories._turn()
    trajectories._turn()
    assert trajectories.paused
    log.add_partitions(TOPIC, 4)
    for number in range(1, 9):
        put(log, member(number, 0))
        put(log, member(number, 1))
    for _ in range(5):
        trajectories._turn()
    assert intake.stats().read == 2
    while intake.cut(0):
        trajectories._turn()
    assert intake.stats().read == 18


def test_it_is_idle_only_while_all_is_read_and_nothing_comes() -> None:
    log, clock = FakeLog(), Clock()
    intake, reader = make_intake(buffer_bytes=member(0, 0).nbytes), Timed(log, clock)
    trajectories = by_turns(log, intake, reader, clock)
    for _ in range(4):
        trajectories._turn()
    # The first look shows that nothing is behind.
    assert trajectories.idle_s == 3.0
    reader.hidden = 1
    for _ in range(3):
        trajectories._turn()
    assert trajectories.idle_s == 0.0, "a record that can't be read yet is behind a transaction that is open"
    reader.hidden = 0
    for _ in range(3):
        trajectories._turn()
    assert trajectories.idle_s > 0.0
    put(log, member(0, 0))
    put(log, member(0, 1))
    trajectories._turn()
    assert trajectories.idle_s == 0.0
    trajectories._turn()
    assert trajectories.paused
    assert trajectories.idle_s == 0.0
