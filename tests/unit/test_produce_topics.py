"""A producer while its topics change: it ends with the topic's name and the remedy, or resumes; it never waits in silence."""

import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from echo.control import Grant
from echo.errors import TopicError
from echo.log import LogRecord
from tests.eventually import eventually
from tests.fakes.log import FakeReader
from tests.unit.test_produce_loop import NAMES, Harness, announcement
from tests.unit.test_produce_requests import ask_for

Make = Callable[..., Harness]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr("echo.topic_watch.LOOK_EVERY_S", 0.02)
    monkeypatch.setattr("echo.topic_watch.GONE_AFTER_S", 0.1)
    made: list[Harness] = []

    def build(mode: str = "async", **options: Any) -> Harness:
        made.append(Harness(run={"mode": mode, "limits": {"waiting_s": 0.05}}, **options))
        return made[-1]

    yield build
    for harness in made:
        harness.stop.set()
        harness.join()


class Deaf(FakeReader):
    """As Kafka's client: of a topic that is gone it reads nothing, in silence."""

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        if all(self._log.partitions(topic) for topic, _ in self._positions):
            return super().read(max_records, timeout_s)
        threading.Event().wait(timeout_s)
        return []


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("made_anew", [False, True])
@pytest.mark.parametrize("role", ["trajectories", "control", "requests"])
def test_a_topic_that_the_run_rests_on_ends_it_with_its_name_and_the_remedy(
    make: Make, role: str, made_anew: bool, deaf: bool
) -> None:
    """Also while it waits, and whatever the client says of it."""
    h = make("sequential" if role == "requests" else "async")
    if deaf:
        h.loop._listener._follower._open_reader = lambda: Deaf(h.log)
        if h.loop._requests is not None:
            h.loop._requests._follower._open_reader = lambda: Deaf(h.log)
    h.start().tell(announcement(0))
    h.wait_for_heartbeat(lambda one: one.state.startswith("waiting"), "it waits")
    topic = getattr(NAMES, role)
    h.log.delete_topic(topic)
    if made_anew:
        h.log.create_topic(topic)
    what = "was deleted and made anew" if made_anew else "was deleted"
    assert h.ends_within(20)
    assert isinstance(h.error, TopicError)
    assert f"topic {topic} {what} in mid-run" in str(h.error)
    assert "`echo-topics apply`" in str(h.error)


def test_what_waits_for_a_topic_that_is_gone_is_not_waited_for(make: Make) -> None:
    """The broker's word about records in flight never comes, and the last flush ends all the same."""
    h = make()
    h.producer.hold()
    h.start().tell(announcement(0, grants={h.me: Grant(window=4, resolved=0)}))
    eventually(lambda: h.loop._publisher.queued_records, "records in flight")
    h.log.delete_topic(NAMES.trajectories)
    # Half of what the flush may take.
    assert h.ends_within(h.run.producer.flush_timeout_s / 2)
    assert isinstance(h.error, TopicError)


def test_heartbeats_that_are_deleted_are_waited_for_aloud_and_sent_again(make: Make) -> None:
    with capture_logs() as said:
        h = make().start()
        h.tell(announcement(0))
        h.wait_for_heartbeat(lambda one: one.state.startswith("waiting"), "it waits")
        h.log.delete_topic(NAMES.heartbeats)
        missing = f"topic {NAMES.heartbeats} does not exist any more: `echo-topics apply` makes it again"
        eventually(lambda: any(missing in entry["event"] for entry in said), "it says so")
        h.log.create_topic(NAMES.heartbeats)
        h.wait_for_heartbeat(lambda one: one.serving == 0, "the next heartbeat")
    assert h.error is None


def test_requests_in_new_partitions_are_answered(make: Make) -> None:
    """The trainer's client writes to them as soon as it knows them."""
    h = make("sequential").start()
    h.tell(announcement(0))
    ask_for(h, "g/a/1")
    eventually(lambda: len(h.groups()) == 1, "an answer")
    elsewhere = next(number for number in range(2, 99) if zlib.crc32(h.me.encode()) % number)
    h.log.add_partitions(NAMES.requests, elsewhere)
    ask_for(h, "g/a/2")
    assert h.log.records(NAMES.requests)[-1].partition != 0
    eventually(lambda: len(h.groups()) == 2, "the second answer")


def test_the_readers_last_error_is_in_the_line_of_the_wait(make: Make) -> None:
    h = make()

    def refused() -> FakeReader:
        reader = FakeReader(h.log)
        reader.last_error = "_TRANSPORT: Connection refused"
        return reader

    h.loop._listener._follower._open_reader = refused
    with capture_logs() as said:
        h.start()
        line = eventually(lambda: next((e["event"] for e in said if "is its trainer running?" in e["event"]), None), "a line")
    assert line is not None
    assert "is its trainer running?; the client's last error: _TRANSPORT: Connection refused" in line
