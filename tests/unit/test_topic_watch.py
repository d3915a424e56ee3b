"""The run's topics are looked at while it runs: what is grown, gone or made anew is known, and named with its remedy."""

import pytest
from structlog.testing import capture_logs

from echo.errors import BrokerError, FencedError, OtherClusterError, TopicError
from echo.topic_spec import TopicNames
from echo.topic_watch import GONE_AFTER_S, TopicWatch
from tests.eventually import eventually
from tests.fakes.log import FakeAdmin, FakeLog

NAMES = TopicNames.with_prefix("a-")
VITAL = ("trajectories", "control", "requests")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    def __init__(self) -> None:
        self.log, self.clock = FakeLog(), Clock()
        for name in NAMES:
            self.log.create_topic(name)
        self.silent = False
        self.watch = TopicWatch(self._ask, NAMES, NAMES._fields, waiting_s=30.0, clock=self.clock)

    def _ask(self, names, timeout_s):  # type: ignore[no-untyped-def]
        if self.silent:
            raise BrokerError("nobody answers", retriable=True)
        return FakeAdmin(self.log).topics(names, timeout_s)

    def later(self, seconds: float) -> None:
        self.clock.now += seconds
        self.watch.turn()


def test_more_partitions_are_known_at_the_next_look() -> None:
    watched = Watched()
    for role in ("trajectories", "requests", "heartbeats", "dead_letter"):
        name = getattr(NAMES, role)
        watched.log.add_partitions(name, 3)
        assert watched.watch.partitions(name) == 1
        watched.later(5.0)
        assert watched.watch.partitions(name) == 3
    watched.watch.check()


@pytest.mark.parametrize("role", VITAL)
def test_a_topic_that_the_run_rests_on_ends_both_sides_where_it_is_gone(role: str) -> None:
    """After some seconds: a broker that has just started may not know it yet."""
    watched, name = Watched(), getattr(NAMES, role)
    watched.log.delete_topic(name)
    watched.later(0.0)
    watched.watch.check()
    watched.later(GONE_AFTER_S)
    remedy = "--accept-lost" if role == "trajectories" else "resumes from its last checkpoint"
    with pytest.raises(TopicError, match=rf"topic {name} was deleted in mid-run: .*`echo-topics apply`.*{remedy}"):
        watched.watch.check()
    with pytest.raises(TopicError):
        watched.watch.check(name)
    watched.watch.check(NAMES.heartbeats)


@pytest.mark.parametrize("role", VITAL)
def test_a_topic_that_the_run_rests_on_ends_both_sides_where_it_was_made_anew(role: str) -> None:
    watched, name = Watched(), getattr(NAMES, role)
    watched.log.delete_topic(name)
    watched.log.create_topic(name)
    watched.later(1.0)
    with pytest.raises(TopicError, match=rf"topic {name} was deleted and made anew in mid-run"):
        watched.watch.check()


def test_a_topic_that_is_unknown_for_a_moment_ends_nothing() -> None:
    watched = Watched()
    hidden = watched.log._topics.pop(NAMES.trajectories)
    watched.later(1.0)
    watched.log._topics[NAMES.trajectories] = hidden
    watched.later(1.0)
    watched.later(GONE_AFTER_S + 1.0)
    watched.watch.check()
    assert watched.watch.describe() == ""


@pytest.mark.parametrize("role", ["heartbeats", "dead_letter"])
def test_a_topic_that_can_be_made_again_is_waited_for_aloud(role: str) -> None:
    watched, name = Watched(), getattr(NAMES, role)
    before = watched.watch.topic_id(name)
    watched.log.delete_topic(name)
    with capture_logs() as said:
        for _ in range(14):
            watched.later(5.0)
    watched.watch.check()
    waiting = [entry["event"] for entry in said]
    assert len(waiting) == 2
    assert all(f"topic {name} does not exist any more: `echo-topics apply` makes it again" in event for event in waiting)
    assert name in watched.watch.describe()
    watched.log.create_topic(name, 2)
    watched.later(5.0)
    watched.watch.check()
    assert (watched.watch.describe(), watched.watch.partitions(name)) == ("", 2)
    assert watched.watch.topic_id(name) != before


def test_a_second_partition_of_the_control_topic_ends_both_sides() -> None:
    watched = Watched()
    watched.log.add_partitions(NAMES.control, 2)
    watched.later(5.0)
    with pytest.raises(TopicError, match=rf"topic {NAMES.control} has 2 partitions instead of 1"):
        watched.watch.check()


def test_a_broker_that_is_away_says_nothing_about_its_topics() -> None:
    watched = Watched()
    watched.silent = True
    for _ in range(10):
        watched.later(60.0)
    watched.watch.check()
    assert watched.watch.describe() == ""


def test_a_clients_error_is_explained_by_the_topic_that_is_gone() -> None:
    """At once: the error and the look agree. Any other error is told as it is."""
    watched = Watched()
    odd = BrokerError("committing to a-control: INVALID_TXN_STATE")
    with pytest.raises(BrokerError) as caught:
        watched.watch.blame(odd)
    assert caught.value is odd
    watched.log.delete_topic(NAMES.control)
    for plain in (FencedError("another trainer"), OtherClusterError("this is cluster b, and it was a before")):
        with pytest.raises(type(plain), match=str(plain)):
            watched.watch.blame(plain)
    watched.silent = True
    with pytest.raises(BrokerError) as caught:
        watched.watch.blame(odd)
    assert caught.value is odd
    watched.silent = False
    with pytest.raises(TopicError, match=r"topic a-control was deleted in mid-run: .*INVALID_TXN_STATE"):
        watched.watch.blame(odd)


def test_a_topic_that_is_missing_at_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo.topic_watch._START_S", 0.0)
    log = FakeLog()
    log.create_topic(NAMES.control)
    with pytest.raises(TopicError, match="topic a-trajectories does not exist: `echo-topics apply` makes it"):
        TopicWatch(FakeAdmin(log).topics, NAMES, ("control", "trajectories"))


def test_a_broker_that_is_away_at_the_start_is_asked_again() -> None:
    """It may just be restarting; an error that can't pass is raised at once, and none is waited for longer than allowed."""
    log = FakeLog()
    log.create_topic(NAMES.control)
    errors = [BrokerError("nobody answers", retriable=True), BrokerError("nobody answers", retriable=True)]

    def ask(names, timeout_s):  # type: ignore[no-untyped-def]
        if errors:
            raise errors.pop()
        return FakeAdmin(log).topics(names, timeout_s)

    assert TopicWatch(ask, NAMES, ("control",)).partitions(NAMES.control) == 1
    errors.append(BrokerError("no right to describe topics"))
    with pytest.raises(BrokerError, match="no right"):
        TopicWatch(ask, NAMES, ("control",))
    errors.append(BrokerError("nobody answers", retriable=True))
    with pytest.raises(BrokerError, match="nobody answers"):
        TopicWatch(ask, NAMES, ("control",), patience_s=0.0)


def test_the_thread_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo.topic_watch.LOOK_EVERY_S", 0.01)
    watched = Watched()
    watched.watch.start()
    watched.log.add_partitions(NAMES.trajectories, 5)
    eventually(lambda: watched.watch.partitions(NAMES.trajectories) == 5, "the new partitions are known")
    watched.watch.close()
    watched.watch.check()
