"""The control topic as a producer hears it: what is told, in which order of the log, and when."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest
from structlog.testing import capture_logs

from echo import control
from echo.control import Announcement, ControlMessage, EndOfRun, Grant, Progress
from echo.errors import BrokerError
from echo.log import BEGINNING, LogRecord, Partition
from producers.policy import ControlState, PolicyListener

RUN, ME = "run", "p0-1234"


def announcement(version: int, **grants: Grant) -> Announcement:
    return Announcement(
        run_id=RUN,
        sequence=0,
        version=version,
        step=version,
        manifest_urls=("http://127.0.0.1:1",),
        manifest_digest="0" * 64,
        nbytes=1,
        grants={name.replace("_", "-"): grant for name, grant in grants.items()},
        created=time.time(),
    )


def progress(step: int, created: float = 0.0, **grants: Grant) -> Progress:
    named = {name.replace("_", "-"): grant for name, grant in grants.items()}
    return Progress(run_id=RUN, sequence=0, version=0, step=step, grants=named, created=created)


def end() -> EndOfRun:
    return EndOfRun(run_id=RUN, sequence=0, version=0, step=9, reason="done", created=0.0)


class ScriptedReader:
    """A `LogReader` that gives one batch per `allow`, and says itself whether the end is reached."""

    def __init__(self) -> None:
        self.assigned: Mapping[Partition, int] = {}
        self.closed = False
        self.last_error = ""
        self._ready = threading.Condition()
        self._batches: list[tuple[list[LogRecord], bool] | BrokerError] = []
        self._at_end = False
        self._offset = 0
        self._idle_reads = 0

    def give(self, *messages: ControlMessage | bytes, at_end: bool = True) -> None:
        """One batch; returns when the listener has taken it and comes back for more."""
        records = []
        for message in messages:
            value = message if isinstance(message, bytes) else control.encode(message)
            records.append(LogRecord("control", 0, self._offset, b"k", [], value, 0))
            self._offset += 1
        self._put((records, at_end))

    def fail(self, error: BrokerError) -> None:
        with self._ready:
            self._batches.append(error)
            self._ready.notify_all()

    def _put(self, batch: tuple[list[LogRecord], bool]) -> None:
        with self._ready:
            self._batches.append(batch)
            self._idle_reads = 0
            self._ready.notify_all()
            assert self._ready.wait_for(lambda: not self._batches and self._idle_reads > 0, timeout=10)

    def assign(self, positions: Mapping[Partition, int]) -> None:
        self.assigned = positions

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        with self._ready:
            if not self._batches:
                self._idle_reads += 1
                self._ready.notify_all()
            if not self._ready.wait_for(lambda: self._batches, timeout_s):
                return []
            batch = self._batches.pop(0)
            if isinstance(batch, BrokerError):
                raise batch
            records, self._at_end = batch
            return records

    def at_end(self) -> bool:
        return self._at_end

    def pause(self, partitions: Iterable[Partition]) -> None: ...

    def resume(self, partitions: Iterable[Partition]) -> None: ...

    def lag(self) -> dict[Partition, int | None]:
        return {}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def reader() -> ScriptedReader:
    return ScriptedReader()


@pytest.fixture
def listener(reader: ScriptedReader) -> Iterator[PolicyListener]:
    made = PolicyListener(lambda: reader, "control", run_id=RUN, incarnation=ME).start()
    yield made
    made.close()
    assert reader.closed


def test_it_reads_the_one_partition_from_its_beginning(reader: ScriptedReader, listener: PolicyListener) -> None:
    reader.give()
    assert reader.assigned == {("control", 0): BEGINNING}
    assert listener.state == ControlState()


def test_nothing_is_told_before_the_end_of_the_log_was_reached(reader: ScriptedReader, listener: PolicyListener) -> None:
    """A late joiner must not pull version 1 when version 7 is a few records further on."""
    reader.give(announcement(1), end(), at_end=False)
    assert listener.state == ControlState()
    reader.give(announcement(7))
    assert listener.state.announcement is not None
    assert listener.state.announcement.version == 7
    assert listener.state.end is None


def test_a_topic_whose_end_does_not_come_is_waited_for_aloud(reader: ScriptedReader) -> None:
    listener = PolicyListener(lambda: reader, "control", run_id=RUN, incarnation=ME, waiting_s=0.0)
    with capture_logs() as said:
        listener.start()
        reader.give(announcement(1), announcement(2), at_end=False)
        listener.close()
    assert said[0]["event"].startswith("waiting for the end of topic control")
    assert "2 records read" in said[0]["event"]


def test_a_message_that_stands_twice_in_a_row_is_told_once(reader: ScriptedReader, listener: PolicyListener) -> None:
    """A trainer that had no word of its commit sends again."""
    message = announcement(1, p0_1234=Grant(window=3, resolved=1))
    reader.give(message)
    told = listener.state
    reader.give(message)
    assert listener.state is told


def test_afterwards_an_announcement_is_told_at_once(reader: ScriptedReader, listener: PolicyListener) -> None:
    reader.give(announcement(1))
    reader.give(announcement(2), at_end=False)
    assert listener.state.announcement is not None
    assert listener.state.announcement.version == 2


def test_an_end_counts_only_where_nothing_follows_it(reader: ScriptedReader, listener: PolicyListener) -> None:
    reader.give(announcement(1))
    reader.give(end(), at_end=False)
    assert listener.state.end is None
    reader.give(announcement(2), at_end=False)
    reader.give(at_end=True)
    assert listener.state.end is None, "the run was resumed"
    reader.give(end())
    assert listener.state.end == end()


def test_the_last_message_with_grants_decides(reader: ScriptedReader, listener: PolicyListener) -> None:
    """In the order of the log, whatever clocks and steps say: a trainer that resumes goes back in steps."""
    reader.give(announcement(1, p0_1234=Grant(window=8, resolved=3)), progress(50, 1000.0, p0_1234=Grant(window=5, resolved=4)))
    assert listener.state.grant == Grant(window=5, resolved=4)
    reader.give(progress(40, 900.0, p0_1234=Grant(window=6, resolved=2)))
    assert listener.state.grant == Grant(window=6, resolved=2)


def test_a_lower_version_brings_its_grants_and_not_its_policy(reader: ScriptedReader, listener: PolicyListener) -> None:
    reader.give(announcement(5), announcement(3, p0_1234=Grant(window=2, resolved=0)))
    assert listener.state.announcement is not None
    assert listener.state.announcement.version == 5
    assert listener.state.grant == Grant(window=2, resolved=0)


def test_grants_that_do_not_name_us_withdraw_ours(reader: ScriptedReader, listener: PolicyListener) -> None:
    """The trainer took us for dead and gave our window to others."""
    reader.give(announcement(1, p0_1234=Grant(window=8, resolved=3)))
    reader.give(progress(2, other=Grant(window=16, resolved=0)))
    assert listener.state.grant is None


def test_what_cannot_be_read_or_is_not_ours_is_passed_over(reader: ScriptedReader, listener: PolicyListener) -> None:
    foreign = EndOfRun(run_id="other", sequence=0, version=0, step=0, reason="", created=0.0)
    reader.give(announcement(1), b"\x00junk", b'{"type": "of the future", "run_id": "run"}', foreign)
    assert listener.state.announcement is not None
    assert listener.state.end is None
    listener.check()


def test_waiters_are_woken(reader: ScriptedReader, listener: PolicyListener) -> None:
    heard = threading.Event()

    def wait() -> None:
        with listener.changed:
            if listener.changed.wait_for(lambda: listener.state.announcement is not None, timeout=10):
                heard.set()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    reader.give(announcement(0))
    assert heard.wait(10)


def test_a_failing_read_is_tried_again_where_that_may_help(reader: ScriptedReader, listener: PolicyListener) -> None:
    reader.fail(BrokerError("no leader", retriable=True))
    reader.give(announcement(0))
    assert listener.state.announcement is not None
    listener.check()


def test_a_reader_that_cannot_go_on_is_reported(reader: ScriptedReader, listener: PolicyListener) -> None:
    reader.give(announcement(0))
    reader.fail(BrokerError("this is another cluster"))
    with listener.changed:
        listener.changed.wait_for(lambda: _failed(listener.check), timeout=10)
    with pytest.raises(BrokerError, match="another cluster"):
        listener.check()


def _failed(check: Callable[[], None]) -> bool:
    try:
        check()
    except BrokerError:
        return True
    return False
