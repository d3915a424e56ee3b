"""A producer in sequential mode: it samples what it is asked for, from exactly the version that is named, and nothing else."""

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from echo import sequential
from echo.control import Request
from echo.errors import EngineError
from tests.eventually import eventually
from tests.fakes.engine import FakeTask
from tests.unit.test_produce_loop import RUN, Harness, announcement, end_of_run

Make = Callable[..., Harness]
_numbers = itertools.count()


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Harness] = []

    def build(*, refresh: str = "if_behind", **options: Any) -> Harness:
        limits = {"waiting_s": options.pop("waiting_s", 30.0), "record_bytes": options.pop("record_bytes", 2**20)}
        keys = {"mode": "sequential", "refresh": refresh, "limits": limits}
        made.append(Harness(run=keys, **options))
        return made[-1]

    yield build
    for harness in made:
        harness.stop.set()
        harness.join()


def ask_for(h: Harness, *groups: str, version: int = 0, first: int = 40, seed: int = 11, **fields: Any) -> Request:
    values: dict[str, Any] = {
        "run_id": RUN,
        "request_id": f"r{next(_numbers)}",
        "producer": h.me,
        "version": version,
        "step": version,
        "first_prompt": first,
        "group_ids": groups,
        "seed": seed,
        "issue": 0,
        "created": 1.0,
    }
    request = Request(**(values | fields))
    h.ask(request)
    return request


def test_a_request_is_answered_with_its_ids_prompts_and_seed_in_one_call(make: Make) -> None:
    h = make(group_size=3).start()
    h.tell(announcement(0))
    ask_for(h, "g/a/1", "g/a/2")
    eventually(lambda: len(h.trajectories()) == 6, "two groups of three")
    prompts = [FakeTask().prompt(sequential.prompt_seed(0), index).prompt_id for index in (40, 41)]
    members = [(t.group_id, t.group_index, t.prompt_id) for t in h.trajectories()]
    assert members == [
        (name, index, prompt) for name, prompt in zip(("g/a/1", "g/a/2"), prompts, strict=True) for index in range(3)
    ]
    assert {(t.spans, t.sampling.seed) for t in h.trajectories()} == {(((0, 0),), 11)}
    assert [(version, rows) for version, rows, _ in h.engine.calls] == [(0, 6)]


def test_any_producer_answers_a_request_alike(make: Make) -> None:
    """So members of a group that was asked for twice are interchangeable."""
    answers = []
    for h in (make(), make()):
        h.start().tell(announcement(0))
        ask_for(h, "g/a/1")
        eventually(lambda h=h: len(h.trajectories()) == 2, "the group")
        answers.append([(t.prompt_ids.tolist(), t.completion_ids.tolist(), t.logprobs.tolist()) for t in h.trajectories()])
    assert answers[0] == answers[1]


def test_nothing_is_sampled_unasked_and_nothing_that_others_were_asked_for(make: Make) -> None:
    h = make().start()
    h.tell(announcement(0))
    ask_for(h, "g/a/1", producer="p0-other")
    ask_for(h, "g/a/2", run_id="foreign")
    h.append(b"junk", b"\x80not json")
    ask_for(h, "g/a/3")
    eventually(lambda: h.trajectories(), "the one that is ours")
    h.wait_until_idle()
    assert h.groups() == ["g/a/3"]
    assert h.loop.state == "waiting for a request"


def test_a_request_waits_for_its_version_however_late_that_is_announced(make: Make) -> None:
    """Topics are read apart from each other: the request may be there first."""
    h = make().start()
    h.tell(announcement(0))
    ask_for(h, "g/a/1", version=1)
    h.wait_for_heartbeat(lambda one: one.requests_held == 1, "it holds the request")
    h.wait_until_idle()
    assert h.engine.calls == []
    h.tell(announcement(1))
    eventually(lambda: h.trajectories(), "the group")
    assert {t.spans for t in h.trajectories()} == {((0, 1),)}
    assert h.weights.asked == [1], "version 0 was never needed"
    assert h.wait_for_heartbeat(lambda one: one.groups_published == 1, "published", new=True).requests_held == 0


def test_requests_for_an_older_version_are_given_up(make: Make) -> None:
    """Their step is over, or they are of a trainer that has died."""
    h = make().start()
    h.tell(announcement(0), announcement(1))
    ask_for(h, "g/a/1", version=0)
    ask_for(h, "g/a/2", version=1)
    eventually(lambda: h.trajectories(), "the newer one")
    h.wait_until_idle()
    assert h.groups() == ["g/a/2"]
    assert h.heartbeats()[-1].requests_held == 0


def test_weights_are_pulled_when_a_request_is_behind_and_not_before(make: Make) -> None:
    h = make().start()
    h.tell(announcement(0))
    for number in range(2):
        ask_for(h, f"g/a/{number}")
    eventually(lambda: len(h.groups()) == 2, "two requests")
    assert h.weights.asked == [0]
    h.tell(announcement(1))
    h.wait_for_heartbeat(lambda one: one.announced == 1, "version 1 was heard of")
    h.wait_until_idle()
    assert h.weights.asked == [0], "nobody has asked for version 1 yet"
    ask_for(h, "g/a/2", version=1)
    eventually(lambda: len(h.groups()) == 3, "the third request")
    assert h.weights.asked == [0, 1]
    assert h.engine.loads == [0, 1]


def test_always_pulls_for_every_request(make: Make) -> None:
    h = make(refresh="always").start()
    h.tell(announcement(0))
    for number in range(3):
        ask_for(h, f"g/a/{number}")
    eventually(lambda: len(h.groups()) == 3, "three requests")
    assert h.weights.asked == [0, 0, 0]
    assert h.engine.loads == [0], "the same version is not swapped in again"


def test_weights_that_change_while_it_samples_wait_for_the_next_request(make: Make) -> None:
    """A group that was asked for is of one version from its first to its last token."""
    h: Harness

    def at_token(index: int) -> None:
        if index == 1 and len(h.engine.calls) == 1:
            h.tell(announcement(1))
            h.wait_for_heartbeat(lambda one: one.announced == 1, "version 1 was heard of")
            h.loop._puller.refresh()
            h.wait_for_heartbeat(lambda one: one.pulls == 2, "version 1 is there")

    h = make(tokens=4, before_token=at_token)
    h.start().tell(announcement(0))
    ask_for(h, "g/a/1")
    ask_for(h, "g/a/2", version=1)
    eventually(lambda: len(h.groups()) == 2, "both")
    assert [t.spans for t in h.trajectories()] == [((0, 0),)] * 2 + [((0, 1),)] * 2


def test_a_pull_that_a_newer_request_overtakes_ends_in_the_newer_version(make: Make) -> None:
    h = make().start()
    h.weights.hold(0)
    h.tell(announcement(0))
    ask_for(h, "g/a/1", version=0)
    eventually(lambda: h.weights.asked == [0], "the pull of version 0")
    h.tell(announcement(1))
    ask_for(h, "g/a/2", version=1)
    eventually(lambda: h.groups() == ["g/a/2"], "the newer one")
    assert h.weights.cancelled == [0]


def test_a_policy_that_no_request_is_left_for_does_not_keep_the_loop_awake(make: Make) -> None:
    """Its request was given up when a newer version was announced, and nobody has asked for that one yet."""

    class CountedStop(threading.Event):
        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            return super().is_set()

    stop = CountedStop()
    h = make(stop=stop).start()
    h.weights.hold(0)
    h.tell(announcement(0))
    ask_for(h, "g/a/1", version=0)
    eventually(lambda: h.weights.asked == [0], "the pull of version 0")
    h.tell(announcement(1))
    h.wait_for_heartbeat(lambda one: one.pulls == 1, "version 1 was pulled in its stead")
    h.wait_until_idle()
    before = stop.looks
    for _ in range(10):
        h.wait_for_heartbeat(lambda one: True, "any", new=True)
    assert stop.looks - before < 100
    ask_for(h, "g/a/2", version=1)
    eventually(lambda: h.groups() == ["g/a/2"], "the next request")


def test_a_refresh_that_is_asked_for_in_mid_pull_pulls_anew(make: Make) -> None:
    """What the running pull brings may be older than what the refresh is for."""
    h = make().start()
    h.weights.hold(0)
    h.tell(announcement(0))
    h.loop._puller.refresh()
    eventually(lambda: h.weights.asked == [0], "the first pull")
    h.loop._puller.refresh()
    h.weights.release(0)
    eventually(lambda: h.weights.asked == [0, 0], "the second pull")


def test_what_is_asked_for_again_is_answered_once(make: Make) -> None:
    h: Harness

    def at_token(index: int) -> None:
        if index == 0 and len(h.engine.calls) == 1:
            ask_for(h, "g/a/1", issue=1)
            ask_for(h, "g/a/9")
            h.wait_for_heartbeat(lambda one: one.requests_held == 2, "what is in hand is not held twice")

    h = make(before_token=at_token)
    h.start().tell(announcement(0))
    ask_for(h, "g/a/1")
    eventually(lambda: len(h.groups()) == 2, "both")
    ask_for(h, "g/a/1", issue=2)
    ask_for(h, "g/a/10")
    eventually(lambda: len(h.groups()) == 3, "the third")
    assert len(h.engine.calls) == 3


def test_a_request_that_could_not_be_answered_in_full_may_be_asked_again(make: Make) -> None:
    h = make()
    real, lied = h.engine.generate, []

    def generate(*args: Any, **options: Any) -> Any:
        completions = real(*args, **options)
        if not lied:
            lied.append(True)
            return [one._replace(logprobs=[float("nan")] * len(one.logprobs)) for one in completions]
        return completions

    h.engine.generate = generate  # type: ignore[method-assign]
    h.start().tell(announcement(0))
    ask_for(h, "g/a/1")
    eventually(lambda: lied and h.loop.state == "waiting for a request", "it was given up")
    assert h.trajectories() == []
    ask_for(h, "g/a/1", issue=1)
    eventually(lambda: len(h.trajectories()) == 2, "the second try")


def test_a_group_that_can_not_be_published_is_told_with_the_key_to_raise_and_the_producer_goes_on(make: Make) -> None:
    h = make(tokens=600, record_bytes=1024)
    with capture_logs() as said:
        h.start().tell(announcement(0))
        first = ask_for(h, "g/a/1")
        told = h.wait_for_heartbeat(lambda one: bool(one.given_up), "the word")
    assert list(told.given_up) == [first.request_id]
    why = told.given_up[first.request_id]
    assert re.match(r"group g/a/1 of 2 records: record \S+ of \d{4} bytes is above limits\.record_bytes = 1024; raise it", why)
    assert told.requests_held == 0
    assert [one["event"] for one in said if one["log_level"] == "error"] == [f"given up: {why}"]
    assert h.trajectories() == []
    h.engine._tokens = 3
    ask_for(h, "g/a/1", issue=1)
    ask_for(h, "g/a/2")
    eventually(lambda: h.groups() == ["g/a/1", "g/a/2"], "what fits")
    h.engine._tokens = 600
    h.tell(announcement(1))
    second = ask_for(h, "g/a/3", version=1)
    h.wait_for_heartbeat(lambda one: list(one.given_up) == [second.request_id], "what is older is not told any more")


def test_a_producer_that_ends_of_a_request_says_so_in_its_last_heartbeat(make: Make) -> None:
    """Else those that ask for it can't tell this from a machine that was switched off."""

    def at_token(index: int) -> None:
        raise EngineError("the device is gone")

    h = make(before_token=at_token).start()
    h.tell(announcement(0))
    request = ask_for(h, "g/a/1")
    h.join()
    assert isinstance(h.error, EngineError)
    last = h.heartbeats()[-1]
    assert last.leaving
    assert last.given_up == {request.request_id: "EngineError: the device is gone"}


def test_it_says_what_it_waits_for(make: Make) -> None:
    h = make(waiting_s=0.01)
    with capture_logs() as said:

        def heard(text: str) -> Callable[[], bool]:
            return lambda: any(text in entry["event"] for entry in said)

        h.start()
        eventually(heard("no policy of run loop-run is announced on control"), "no trainer")
        h.tell(announcement(0))
        eventually(heard(f"{h.me} is asked for nothing on requests; newest announced 0, serving -1"), "no request")
        h.weights.fails.add(1)
        ask_for(h, "g/a/1", "g/a/2", version=1)
        eventually(heard("2 groups of step 1 are asked for of version 1, 1 requests in hand; newest announced 0"), "no version")
        h.tell(announcement(1))
        eventually(heard("version 1 could not be pulled"), "no weights")


def test_the_end_of_the_run_ends_it_also_with_requests_in_hand(make: Make) -> None:
    h = make().start()
    h.tell(announcement(0))
    ask_for(h, "g/a/1", version=5)
    h.wait_for_heartbeat(lambda one: one.requests_held == 1, "it holds the request")
    h.tell(end_of_run())
    h.join()
    assert h.error is None
    assert h.heartbeats()[-1].leaving
    assert h.trajectories() == []
