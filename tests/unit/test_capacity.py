"""The overlap model: its rule, its limits, and that it agrees with a run of its own circuit, played in order of time."""

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.capacity import Load, learner_idle, meets_rule, required_rate, required_staleness, step_seconds


def load(**changes) -> Load:
    settings = {"groups_per_step": 32, "max_staleness": 4, "train_seconds": 10.0, "round_trip_seconds": 25.0}
    return Load(**settings | changes)


def test_producers_must_make_a_batch_in_the_time_of_a_step() -> None:
    assert required_rate(load()) == pytest.approx(3.2)
    assert step_seconds(load(), 3.2) == pytest.approx(10)
    assert learner_idle(load(), 1.6) == pytest.approx(0.5)


def test_pauses_for_new_weights_need_faster_producers_and_fewer_versions_slower_ones() -> None:
    assert required_rate(load(pause_seconds=2)) == pytest.approx(4)
    assert required_rate(load(pause_seconds=2, publish_every=4)) == pytest.approx(32 * 4 / 38)
    assert required_rate(load(pause_seconds=10)) == math.inf


def test_staleness_hides_the_round_trip() -> None:
    assert required_staleness(load(round_trip_seconds=10)) == 0
    assert required_staleness(load(round_trip_seconds=25)) == 2
    assert required_staleness(load(round_trip_seconds=25, publish_every=2)) == 1
    assert step_seconds(load(max_staleness=0), 100) == 25
    assert step_seconds(load(max_staleness=1), 100) == 12.5


_seconds = st.floats(0.1, 100)
_loads = st.builds(
    Load,
    groups_per_step=st.integers(1, 64),
    max_staleness=st.integers(0, 8),
    train_seconds=_seconds,
    round_trip_seconds=_seconds,
    pause_seconds=st.floats(0, 10),
    publish_every=st.integers(1, 4),
)


@given(_loads, st.floats(0.01, 1000))
def test_the_learner_is_busy_exactly_where_the_rule_is_met(given_load: Load, rate: float) -> None:
    idle = learner_idle(given_load, rate)
    assert 0 <= idle < 1
    if meets_rule(given_load, rate):
        assert idle == pytest.approx(0, abs=1e-9)
    elif rate < 0.999 * required_rate(given_load) or given_load.max_staleness < required_staleness(given_load):
        assert idle > 0


def played_step_seconds(case: Load, rate: float, steps: int = 400) -> float:
    """The circuit, step by step: producers sample while the window has room, the learner takes a batch when it is there.

    What of the round trip is neither sampling nor training is waited for between the two.
    """
    window = case.steps_in_window
    sample = case.groups_per_step / rate
    wait = max(0.0, case.round_trip_seconds - case.train_seconds - sample)
    sampled = trained = 0.0
    done: deque[float] = deque([0.0] * window)
    for _ in range(steps):
        sampled = max(sampled, done.popleft()) + sample
        trained = max(trained, sampled + wait) + case.train_seconds
        done.append(trained)
    return trained / steps


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("rate", [1.6, 3.2, 6.4])
def test_it_agrees_with_the_circuit_played_in_order_of_time(staleness: int, rate: float) -> None:
    case = load(max_staleness=staleness, round_trip_seconds=10 + 32 / rate + 3)
    assert step_seconds(case, rate) == pytest.approx(played_step_seconds(case, rate), rel=0.02)
