"""Prompts on their way to the engine: which are left out and how that shows, and what a stream that blocks or breaks does."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from echo import sequential
from echo.control import Grant
from echo.errors import TaskError
from producers.engines.base import Limits
from producers.prompts import IN_A_ROW, LeftOut, Made, PromptMaker
from producers.tasks.base import IndexedStream, Prompt
from tests.eventually import eventually
from tests.fakes.engine import FakeTokenizer
from tests.unit.test_produce_loop import Harness, announcement
from tests.unit.test_produce_requests import ask_for

LIMITS = Limits(positions=40, vocabulary=1000)
MAX_TOKENS = 8
FAULTS = ("task", "reference", "tokenizer", "empty", "unknown_token", "too_long")


class FaultyTask:
    """Prompt "p<index>" at each index; `fault(seed, index)` names what is wrong with it, "" for nothing."""

    name = "faulty"
    scorer = "tests.fakes.engine:score"
    scorer_params: Mapping[str, Any] = {}

    def __init__(self, fault: Callable[[int, int], str] = lambda seed, index: "") -> None:
        self._fault = fault

    def prompts(self, seed: int) -> Iterator[Prompt]:
        return IndexedStream(self, seed)

    def prompt(self, seed: int, index: int) -> Prompt:
        fault = self._fault(seed, index)
        if fault == "task":
            raise ZeroDivisionError(f"no item {index}")
        text = {"empty": "", "unknown_token": "\u4e16", "too_long": "x" * 40, "tokenizer": "<tool>"}.get(fault, f"p{index}")
        return Prompt(f"{seed}/{index}", text, {"n": object() if fault == "reference" else index})


class TemplateTokenizer(FakeTokenizer):
    """With a chat template that does not bear every text."""

    def encode(self, text: str) -> list[int]:
        if "<tool>" in text:
            raise RuntimeError("unexpected <tool>")
        return super().encode(text)


def maker(task: Any, left_out: Callable[[LeftOut], None] = lambda _: None) -> PromptMaker:
    return PromptMaker(task, TemplateTokenizer(), limits=LIMITS, max_tokens=MAX_TOKENS, left_out=left_out)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_item_that_can_not_be_used_is_passed_over_counted_and_named(fault: str) -> None:
    seen: list[LeftOut] = []
    with capture_logs() as said:
        made = list(islice(maker(FaultyTask(lambda _, index: fault if index == 1 else ""), seen.append).stream(5), 3))
    assert [one.prompt.text for one in made] == ["p0", "p2", "p3"]
    assert [one.token_ids for one in made] == [FakeTokenizer().encode(one.prompt.text) for one in made]
    (left,), (warning,) = seen, said
    assert left.reason == fault
    assert left.name == ("1 of stream 5" if fault == "task" else "5/1")
    assert (warning["prompt"], warning["reason"], warning["log_level"]) == (left.name, fault, "warning")


@given(st.lists(st.sampled_from(["", *FAULTS]), max_size=60), st.integers(0, 2**63 - 1))
def test_the_usable_prompts_come_in_the_streams_order_whatever_is_between(faults: list[str], seed: int) -> None:
    """The same for the same seed; more than so many in a row end it."""
    task = FaultyTask(lambda _, index: faults[index] if index < len(faults) else "")
    usable = [index for index, fault in enumerate(faults) if not fault]
    row = longest = 0
    for fault in faults:
        row = row + 1 if fault else 0
        longest = max(longest, row)
    for _ in range(2):
        stream = maker(task).stream(seed)
        if longest >= IN_A_ROW:
            with pytest.raises(TaskError, match=f"{IN_A_ROW} prompts in a row can't be used"):
                list(islice(stream, len(usable) + 1))
        else:
            assert [one.prompt.reference["n"] for one in islice(stream, len(usable))] == usable


@given(st.sets(st.integers(0, 30)), st.integers(0, 2**31))
def test_a_place_of_the_runs_stream_has_one_prompt_whoever_asks_and_in_which_order(bad: set[int], seed: int) -> None:
    """Sequential mode: an item that can't be used has a substitute, which follows from its place alone."""
    own = sequential.prompt_seed(seed)
    task = FaultyTask(lambda of, index: "too_long" if of == own and index in bad else "")
    forward = [made.prompt for made in maker(task).asked(seed, range(31))]
    backward = [made.prompt for made in maker(task).asked(seed, range(30, -1, -1))]
    assert forward == backward[::-1]
    assert len({prompt.prompt_id for prompt in forward}) == 31
    assert {index for index, prompt in enumerate(forward) if prompt.prompt_id != f"{own}/{index}"} == bad


def test_a_place_whose_substitutes_all_fail_is_an_error_and_no_wait() -> None:
    with pytest.raises(TaskError, match=r"10 prompts in a row can't be used, the last of them is \d+/8: it has 40 tokens"):
        list(maker(FaultyTask(lambda seed, index: "too_long")).asked(0, range(3)))


def test_a_stream_that_ends_says_so_and_what_was_raised_before() -> None:
    class Short(FaultyTask):
        def prompts(self, seed: int) -> Iterator[Prompt]:
            yield self.prompt(seed, 0)
            raise ConnectionError("the data set's server is away")

    with pytest.raises(TaskError, match=r"its prompts ended after 2, .* raised: ConnectionError: the data set's server"):
        list(maker(Short()).stream(0))


@pytest.fixture
def make() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def build(task: Any, **options: Any) -> Harness:
        made.append(Harness(task=task, limits=LIMITS, **options))
        return made[-1]

    yield build
    for harness in made:
        harness.stop.set()
        harness.join()


def left_out(h: Harness) -> dict[str, float]:
    (family,) = h.metrics.prompts_left_out.collect()
    return {sample.labels["reason"]: sample.value for sample in family.samples if sample.name.endswith("_total")}


def test_the_producer_samples_what_can_be_used_and_counts_the_rest(make: Callable[..., Harness]) -> None:
    faults = [*FAULTS[:1], "", *FAULTS[1:], ""]
    h = make(FaultyTask(lambda _, index: faults[index % len(faults)]))
    h.start().tell(announcement(0))
    eventually(lambda: h.trajectories(), "a record")
    first = h.trajectories()[0]
    assert first.prompt_id.endswith("/1")
    eventually(lambda: left_out(h).keys() == set(FAULTS) - {"tokenizer"}, "the counters")
    assert h.error is None


def test_ten_in_a_row_end_the_producer_with_one_line(make: Callable[..., Harness]) -> None:
    h = make(FaultyTask(lambda _, index: "" if index == 0 else "too_long"))
    h.start().join()
    assert isinstance(h.error, TaskError)
    line = str(h.error)
    assert line.startswith("prompts ended: task faulty: 10 prompts in a row can't be used, the last of them is ")
    assert "lower sampling.max_tokens" in line
    assert "\n" not in line
    assert left_out(h) == {"too_long": 10}


def test_a_stream_that_gives_nothing_is_reported_and_does_not_hold_up_a_stop(make: Callable[..., Harness]) -> None:
    released = threading.Event()

    class Blocking(FaultyTask):
        def prompt(self, seed: int, index: int) -> Prompt:
            if index == 2:
                released.wait(60)
            return super().prompt(seed, index)

    h = make(Blocking(), groups_per_call=4, run={"limits": {"waiting_s": 0.05}})
    with capture_logs() as said:
        h.start().tell(announcement(0, grants={h.me: Grant(window=8, resolved=0)}))
        eventually(
            lambda: any("task faulty has given no prompt for 0 s, 2 are ready" in entry["event"] for entry in said), "the line"
        )
        h.wait_for_heartbeat(lambda one: one.state == "waiting for the task's prompts", "the heartbeat says so, too")
    assert h.trajectories() == []
    h.stop.set()
    assert h.ends_within(20)
    assert h.error is None
    released.set()


def test_a_requested_prompt_that_does_not_come_is_reported_too(make: Callable[..., Harness]) -> None:
    released = threading.Event()

    class Blocking(FaultyTask):
        def prompt(self, seed: int, index: int) -> Prompt:
            released.wait(60)
            return super().prompt(seed, index)

    h = make(Blocking(), run={"mode": "sequential", "limits": {"waiting_s": 0.05}})
    with capture_logs() as said:
        h.start().tell(announcement(0))
        ask_for(h, "g/a/0")
        eventually(lambda: any("task faulty has given no prompt" in entry["event"] for entry in said), "the line")
    released.set()
    eventually(lambda: h.trajectories(), "the answer")


def test_a_stream_that_goes_on_is_sampled_from(make: Callable[..., Harness]) -> None:
    released = threading.Event()

    class Blocking(FaultyTask):
        def prompt(self, seed: int, index: int) -> Prompt:
            if index == 2:
                released.wait(60)
            return super().prompt(seed, index)

    h = make(Blocking(), groups_per_call=4).start()
    h.tell(announcement(0, grants={h.me: Grant(window=8, resolved=0)}))
    h.wait_for_heartbeat(lambda one: one.state == "waiting for the task's prompts", "it waits")
    released.set()
    eventually(lambda: len(h.groups()) >= 4, "a whole call")
    assert [one.prompt_id.rpartition("/")[2] for one in h.trajectories()[::2]][:4] == ["0", "1", "2", "3"]


def test_a_requested_item_that_can_not_be_used_has_the_same_substitute_at_every_producer(make: Callable[..., Harness]) -> None:
    """Else the step would never be complete, or the weights would depend on who answered."""
    own = sequential.prompt_seed(0)
    answers: list[Sequence[str]] = []
    for _ in range(2):
        task = FaultyTask(lambda seed, index: "too_long" if (seed, index) == (own, 41) else "")
        h = make(task, run={"mode": "sequential"}).start()
        h.tell(announcement(0))
        ask_for(h, "g/a/0", "g/a/1", "g/a/2", first=40)
        eventually(lambda h=h: len(h.trajectories()) == 6, "the whole call")
        answers.append([one.prompt_id for one in h.trajectories()[::2]])
        assert left_out(h) == {"too_long": 1}
    assert answers[0] == answers[1]
    assert (answers[0][0], answers[0][2]) == (f"{own}/40", f"{own}/42")
    seed, place = list(islice(sequential.candidates(0, 41), 2))[1]
    assert answers[0][1] == f"{seed}/{place}"


def test_a_request_without_any_usable_prompt_is_given_up_with_the_reason(make: Callable[..., Harness]) -> None:
    """The trainer ends the run after eight such words, and does not wait for ever."""
    h = make(FaultyTask(lambda seed, index: "too_long"), run={"mode": "sequential"}).start()
    h.tell(announcement(0))
    request = ask_for(h, "g/a/0")
    h.join()
    assert isinstance(h.error, TaskError)
    (why,) = [beat.given_up[request.request_id] for beat in h.heartbeats() if beat.leaving]
    assert "10 prompts in a row can't be used" in why


def test_a_prompt_is_made_and_its_text_is_what_the_engine_gets() -> None:
    (made,) = islice(maker(FaultyTask()).stream(0), 1)
    assert made == Made(Prompt("0/0", "p0", {"n": 0}), [ord("p"), ord("0")])
