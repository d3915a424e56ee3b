"""Whom a step's calls are asked of: by throughput, of the living, again when one dies or is slow; always the same groups."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.dispatcher import MAX_ATTEMPTS, Dispatcher, UndeliverableGroupError
from consumers.fleet import GivenUp, ProducerStatus
from consumers.ledger import Reason
from echo.control import Request
from tests.helpers import make_group

DEADLINE_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock | None = None, *, groups: int = 8, per_call: int = 2) -> Dispatcher:
    made = Dispatcher(
        run_id="r",
        groups_per_step=groups,
        groups_per_call=per_call,
        seed=3,
        deadline_s=DEADLINE_S,
        clock=clock or Clock(),
        wall_clock=lambda: 1.0,
    )
    made.begin(5, 7)
    return made


def producer(name: str, *, throughput: float = 0.0, heartbeat: int = 0, held: int = 0, error: str = "") -> ProducerStatus:
    return ProducerStatus(name, f"{name}.1", 7, "sampling", throughput, 0, error, heartbeat, held)


def turn(
    made: Dispatcher, *producers: ProducerStatus, ready: Any = (), dropped: Any = None, given_up: Any = None
) -> list[Request]:
    return made.turn(producers, ready=ready, dropped=dropped or {}, given_up=given_up or {})


def word(request: Request, why: str = "too large") -> dict[str, GivenUp]:
    return {request.request_id: GivenUp(request.producer, why)}


def shares(requests: list[Request]) -> Counter[str]:
    found: Counter[str] = Counter()
    for request in requests:
        found[request.producer] += len(request.group_ids)
    return found


def test_groups_are_shared_in_proportion_to_throughput() -> None:
    requests = turn(make(groups=40), producer("a", throughput=3.0), producer("b", throughput=1.0))
    assert shares(requests) == {"a.1": 30, "b.1": 10}


def test_an_unknown_throughput_counts_as_the_mean_of_the_known_ones() -> None:
    requests = turn(make(groups=40), producer("a", throughput=3.0), producer("b", throughput=1.0), producer("c"))
    assert shares(requests)["c.1"] in (12, 14)
    assert shares(turn(make(), producer("a"), producer("b"))) == {"a.1": 4, "b.1": 4}


def test_a_request_names_version_prompts_and_seed_and_no_other_has_its_groups() -> None:
    first, *others = turn(make(), producer("a"))
    assert (first.run_id, first.version, first.step, first.first_prompt, first.issue) == ("r", 7, 5, 40, 0)
    assert [request.first_prompt for request in others] == [42, 44, 46]
    names = [name for request in (first, *others) for name in request.group_ids]
    assert len(set(names)) == len(names) == 8
    assert len({request.seed for request in (first, *others)}) == 4
    assert len({request.request_id for request in (first, *others)}) == 4


def test_who_is_asked_changes_nothing_about_what_is_asked() -> None:
    alone = turn(make(), producer("a"))
    shared = turn(make(), producer("a"), producer("b"))
    assert [(r.group_ids, r.first_prompt, r.seed) for r in alone] == [(r.group_ids, r.first_prompt, r.seed) for r in shared]


def test_nobody_is_asked_twice_for_what_is_on_its_way_and_nobody_where_no_one_lives() -> None:
    made = make()
    assert turn(made) == []
    assert made.describe().startswith("step 5 lacks 8 groups of version 7: 2 groups from prompt 40 on asked of nobody")
    assert len(turn(made, producer("a"))) == 4
    assert turn(made, producer("a"), producer("b")) == []
    assert "2 groups from prompt 44 on at a.1 for 0 s" in made.describe()
    assert make(groups=40).describe().endswith("asked of nobody; and 15 calls more")


def test_what_a_dead_producer_holds_is_asked_of_another_at_once_and_nothing_else() -> None:
    made = make()
    first = turn(made, producer("a"), producer("b"))
    mine = [request for request in first if request.producer == "a.1"]
    delivered = mine[0].group_ids
    again = turn(made, producer("b"), ready=delivered)
    assert {request.producer for request in again} == {"b.1"}
    assert [(r.group_ids, r.seed, r.issue) for r in again] == [(r.group_ids, r.seed, 1) for r in mine[1:]]


def test_holders_may_die_any_number_of_times() -> None:
    """A supervisor starts a producer that is killed at each call again and again; the deadline does not grow beyond numbers."""
    clock = Clock()
    made = make(clock, groups=2)
    for number in range(1100):
        assert len(turn(made, producer(f"p{number}"))) == 1
    assert turn(made, producer("p1099")) == []
    clock.now = DEADLINE_S * 2**17
    assert [request.producer for request in turn(made, producer("p1099"), producer("q"))] == ["q.1"]


def test_a_slow_producer_s_calls_go_to_others_and_it_gets_no_new_ones_until_its_hands_are_empty() -> None:
    clock = Clock()
    made = make(clock)
    first = turn(made, producer("a"), producer("b"))
    theirs = {name: [r for r in first if r.producer == name] for name in ("a.1", "b.1")}
    clock.now = DEADLINE_S - 0.1
    ready = [name for request in theirs["b.1"] for name in request.group_ids]
    assert turn(made, producer("a", heartbeat=1, held=2), producer("b"), ready=ready) == []
    clock.now = DEADLINE_S
    again = turn(made, producer("a", heartbeat=1, held=2), producer("b"))
    assert [(r.group_ids, r.seed, r.producer) for r in again] == [(r.group_ids, r.seed, "b.1") for r in theirs["a.1"]]
    made.begin(6, 8)
    assert shares(turn(made, producer("a", heartbeat=2, held=1), producer("b"))) == {"b.1": 8}
    made.begin(7, 9)
    assert shares(turn(made, producer("a", heartbeat=3, held=0, error="no route"), producer("b"))) == {"b.1": 8}
    made.begin(8, 10)
    assert shares(turn(made, producer("a", heartbeat=4, held=0), producer("b"))) == {"a.1": 4, "b.1": 4}


def test_a_producer_that_delivers_is_not_slow() -> None:
    """The deadline is for doing nothing, not for holding much."""
    clock = Clock()
    made = make(clock)
    requests = turn(made, producer("a"))
    for request in requests:
        clock.now += DEADLINE_S - 0.1
        assert turn(made, producer("a"), producer("b"), ready=request.group_ids) == []
    assert made.missing() == frozenset()


def test_where_only_the_slow_one_is_left_it_is_asked_again_ever_more_patiently() -> None:
    clock = Clock()
    made = make(clock, groups=1)
    assert len(turn(made, producer("a"))) == 1
    asked_at = []
    for _ in range(100):
        clock.now += 1.0
        if turn(made, producer("a", heartbeat=int(clock.now), held=1)):
            asked_at.append(clock.now)
    assert asked_at == [10.0, 30.0, 70.0]


def test_a_dropped_group_is_asked_for_under_another_id_and_sampled_otherwise() -> None:
    made = make(groups=2)
    (first,) = turn(made, producer("a"))
    lost, kept = first.group_ids
    (again,) = turn(made, producer("a"), ready={kept}, dropped={lost: Reason.INCOMPLETE_GROUP})
    assert again.group_ids[1] == kept
    assert again.group_ids[0] not in (lost, kept)
    assert again.first_prompt == first.first_prompt
    assert again.seed != first.seed
    assert made.wanted() == set(again.group_ids)
    assert made.missing() == {again.group_ids[0]}


def test_a_group_that_is_dropped_again_and_again_ends_the_run_with_a_remedy() -> None:
    made = make(groups=1)
    turn(made, producer("a"))
    for _ in range(MAX_ATTEMPTS - 1):
        assert turn(made, producer("a"), dropped=dict.fromkeys(made.missing(), Reason.TOO_LARGE))
    with pytest.raises(UndeliverableGroupError, match=r"prompt 5 .* as too_large.*batch\.max_tokens"):
        turn(made, producer("a"), dropped=dict.fromkeys(made.missing(), Reason.TOO_LARGE))


def test_what_a_producer_gives_up_is_asked_of_one_that_did_not_try_it_the_same_as_before() -> None:
    """However fast the first one is, and though it holds nothing."""
    made = make(groups=2)
    fleet = [producer("a", throughput=9.0), producer("b", throughput=2.0), producer("c", throughput=1.0)]
    (first,) = turn(made, *fleet)
    (second,) = turn(made, *fleet, given_up=word(first))
    (third,) = turn(made, *fleet, given_up=word(second))
    (fourth,) = turn(made, *fleet, given_up=word(third))
    assert [r.producer for r in (first, second, third, fourth)] == ["a.1", "b.1", "c.1", "a.1"]
    assert {(r.group_ids, r.seed, r.first_prompt) for r in (second, third, fourth)} == {
        (first.group_ids, first.seed, first.first_prompt)
    }
    assert "at a.1 for 0 s, asked for 4 times, given up 3 times (too large)" in made.describe()


def test_a_word_counts_once_and_only_while_its_groups_are_missing() -> None:
    """Every heartbeat repeats it; another may have answered meanwhile, and it may be of a step that is over."""
    made = make(groups=2)
    (first,) = turn(made, producer("a"))
    assert len(turn(made, producer("a"), given_up=word(first))) == 1
    for _ in range(2 * MAX_ATTEMPTS):
        assert turn(made, producer("a"), given_up=word(first)) == [], "the second issue is not given up"
    assert turn(made, producer("a"), given_up=word(first), ready=first.group_ids) == []
    made.begin(6, 8)
    (other,) = turn(made, producer("a"), given_up=word(first))
    assert (other.version, other.issue) == (8, 0)


def test_a_late_word_of_the_slow_one_leaves_the_call_at_who_has_it() -> None:
    clock = Clock()
    made = make(clock, groups=2)
    (first,) = turn(made, producer("a"), producer("b"))
    clock.now = DEADLINE_S
    (second,) = turn(made, producer("a"), producer("b"))
    assert (first.producer, second.producer) == ("a.1", "b.1")
    assert turn(made, producer("a"), producer("b"), given_up=word(first)) == []
    assert made.held() == {"b.1": 2}


def test_a_call_that_is_given_up_again_and_again_ends_the_run_saying_what_by_whom_and_why() -> None:
    """Also by producers that end of it: each is another one, and the last word is its last."""
    made = make(groups=2)
    for number in range(MAX_ATTEMPTS):
        (request,) = turn(made, producer(f"p{number % 3}"))
        if number < MAX_ATTEMPTS - 1:
            turn(made, given_up=word(request))
    told = r"step 5 .* prompts 10 to 11 was asked for 8 times and given up 8 times, by p0\.1, p1\.1, p2\.1; .*: 99 bytes"
    with pytest.raises(UndeliverableGroupError, match=told):
        turn(made, given_up=word(request, "99 bytes"))


def test_death_and_slowness_are_no_words_however_often_they_come() -> None:
    clock = Clock()
    made = make(clock, groups=2)
    for number in range(3 * MAX_ATTEMPTS):
        assert len(turn(made, producer(f"p{number}"))) == 1
    for _ in range(2 * MAX_ATTEMPTS):
        clock.now += DEADLINE_S * 2.0 ** (5 * MAX_ATTEMPTS)
        assert len(turn(made, producer("last", heartbeat=int(clock.now), held=1))) == 1
    assert turn(made) == []
    assert "given up" not in made.describe()
    (request,) = turn(made, producer("last"))
    assert len(turn(made, producer("last"), given_up=word(request))) == 1, "the first word about it, whatever came before"


def test_the_last_word_does_not_count_where_the_groups_came_all_the_same() -> None:
    """Of one that was slow, too: another has answered meanwhile."""
    made = make(groups=2)
    (request,) = turn(made, producer("a"))
    for _ in range(MAX_ATTEMPTS - 1):
        (request,) = turn(made, producer("a"), given_up=word(request))
    assert turn(made, producer("a"), given_up=word(request), ready=request.group_ids) == []
    assert made.missing() == frozenset()


def test_a_batch_is_trained_in_the_order_of_its_prompts() -> None:
    """Whatever came first; as numbers and not as text."""
    made = Dispatcher(run_id="r", groups_per_step=4, groups_per_call=4, seed=0, deadline_s=1, clock=Clock())
    made.begin(2, 0)
    (request,) = turn(made, producer("a"))
    assert request.first_prompt == 8
    groups = [make_group(1)._replace(group_id=name) for name in request.group_ids]
    assert made.complete([groups[2], groups[3], groups[0], groups[1]]) == groups
    assert made.missing() == frozenset()
    assert made.held() == {}


class Swarm:
    """Producers that live, die, stall and answer as hypothesis says; what they answer to is exactly what they were asked."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.clock = Clock()
        self.made = Dispatcher(
            run_id="r",
            groups_per_step=6,
            groups_per_call=2,
            seed=1,
            deadline_s=DEADLINE_S,
            clock=self.clock,
            wall_clock=lambda: 0.0,
        )
        self.births = 2
        self.alive = ["p0", "p1"]
        self.hands: dict[str, list[Request]] = {}
        self.beats = 0
        self.answers: list[tuple[int, str]] = []
        self.ready: set[str] = set()
        self.dropped: dict[str, Reason] = {}
        self.asked: dict[str, tuple[int, int]] = {}
        self.words: dict[str, GivenUp] = {}

    def statuses(self) -> list[ProducerStatus]:
        self.beats += 1
        return [
            producer(name, throughput=1.0 + index, heartbeat=self.beats, held=len(self.hands.get(f"{name}.1", ())))
            for index, name in enumerate(self.alive)
        ]

    def turn(self) -> None:
        statuses = self.statuses()
        missing = self.made.missing()
        requests = turn(
            self.made,
            *statuses,
            ready=self.ready & missing,
            dropped={name: reason for name, reason in self.dropped.items() if name in missing},
            given_up=self.words,
        )
        for request in requests:
            assert request.producer in {status.incarnation for status in statuses}, "asked of the living alone"
            self.hands.setdefault(request.producer, []).append(request)
            for place, name in enumerate(request.group_ids):
                what = (request.version, request.first_prompt + place)
                assert self.asked.setdefault(name, what) == what, "an id means one prompt and one version for ever"

    def act(self) -> None:
        busy = [name for name, requests in self.hands.items() if requests and name.removesuffix(".1") in self.alive]
        deed = self.data.draw(st.sampled_from(["wait", "answer", "answer", "drop", "die", "join", "give up"]))
        if deed == "wait":
            self.clock.now += self.data.draw(st.sampled_from([1.0, DEADLINE_S]))
        elif deed == "answer" and busy:
            name = self.data.draw(st.sampled_from(busy))
            self.answer(self.hands[name].pop(0))
        elif deed == "drop":
            lost = sorted(self.made.missing() - self.ready)
            if lost and len(self.dropped) < 3:
                self.dropped[self.data.draw(st.sampled_from(lost))] = Reason.DEADLINE
        elif deed == "give up" and busy and len(self.words) < MAX_ATTEMPTS - 1:
            self.words |= word(self.hands[self.data.draw(st.sampled_from(busy))].pop(0))
        elif deed == "die" and self.alive:
            self.alive.remove(self.data.draw(st.sampled_from(self.alive)))
        elif deed == "join":
            self.alive.append(f"p{self.births}")
            self.births += 1

    def answer(self, request: Request) -> None:
        """What the intake makes of it: each id once, and nothing that was dropped or is not wanted any more."""
        for name in request.group_ids:
            if name in self.made.wanted() and name not in self.dropped:
                self.ready.add(name)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_interleaving_delivers_every_step_once_from_its_own_version(data: st.DataObject) -> None:
    """Deaths, stalls, drops, refusals, late and double answers: each prompt of a step comes once, of the version it named."""
    swarm = Swarm(data)
    trained: list[str] = []
    for step in range(3):
        version = 2 * step + data.draw(st.integers(0, 1))
        swarm.made.begin(step, version)
        for _ in range(data.draw(st.integers(0, 25))):
            swarm.turn()
            swarm.act()
        # From here on nobody dies any more: then the step must come to its end.
        swarm.alive = swarm.alive or ["last"]
        for _ in range(100):
            swarm.turn()
            if swarm.made.wanted() <= swarm.ready:
                break
            for name, requests in swarm.hands.items():
                if name.removesuffix(".1") in swarm.alive and requests:
                    swarm.answer(requests.pop(0))
            swarm.clock.now += 1.0
        batch = [make_group(1)._replace(group_id=name) for name in sorted(swarm.made.wanted())]
        assert swarm.made.wanted() <= swarm.ready
        ordered = [group.group_id for group in swarm.made.complete(batch)]
        assert [swarm.asked[name] for name in ordered] == [(version, prompt) for prompt in range(6 * step, 6 * step + 6)]
        trained += ordered
        swarm.ready -= set(ordered)
    assert len(set(trained)) == len(trained) == 18
