"""The staleness rule and the admission window hold for all numbers."""

from hypothesis import example, given
from hypothesis import strategies as st

from echo.staleness import grant_windows, is_stale, may_sample, room, staleness, total_window

versions = st.integers(0, 1000)
rates = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4),
    st.floats(0, 1e9, allow_nan=False) | st.just(float("inf")) | st.just(float("nan")),
    max_size=12,
)


def test_the_bound_itself_is_still_trained() -> None:
    assert not is_stale(newest_announced=10, min_policy_version=6, max_staleness=4)
    assert is_stale(newest_announced=10, min_policy_version=5, max_staleness=4)


@given(versions, versions, st.integers(0, 20))
def test_stale_iff_more_versions_behind_than_the_bound(newest: int, oldest: int, bound: int) -> None:
    assert is_stale(newest, oldest, bound) == (newest - oldest > bound)
    assert staleness(newest, oldest) >= 0
    assert may_sample(newest, oldest, bound) != is_stale(newest, oldest, bound)


@example(total=1, throughput={"a": 5e-324})
@given(st.integers(1, 500), rates)
def test_windows_sum_to_the_total_but_for_one_per_producer(total: int, throughput: dict[str, float]) -> None:
    windows = grant_windows(total, throughput)
    assert windows.keys() == throughput.keys()
    assert all(window >= 1 for window in windows.values())
    if windows:
        assert total <= sum(windows.values()) <= total + len(windows)


@given(st.integers(1, 500), st.dictionaries(st.text("abc", min_size=1), st.floats(0.01, 100), min_size=1, max_size=8))
def test_windows_are_proportional_within_one_group(total: int, throughput: dict[str, float]) -> None:
    windows = grant_windows(total, throughput)
    for name, rate in throughput.items():
        share = total * rate / sum(throughput.values())
        assert windows[name] == 1 or abs(windows[name] - share) < 1.0 + 1e-6


def test_a_producer_of_unknown_throughput_counts_as_the_mean() -> None:
    assert grant_windows(9, {"a": 2.0, "b": 4.0, "new": 0.0}) == {"a": 2, "b": 4, "new": 3}


@given(st.integers(0, 50), st.integers(0, 1000), st.integers(0, 1000))
def test_room_never_lets_outstanding_exceed_the_window(window: int, started: int, resolved: int) -> None:
    free = room(window, started, resolved)
    assert 0 <= free <= window
    outstanding = max(0, started - resolved)
    assert outstanding + free <= max(window, outstanding)


@example(bound=0, per_step=1, kappa=1, turns=[False] * 9 + [True] * 9)
@example(bound=2, per_step=3, kappa=2, turns=[False, True] * 4 + [False] * 99 + [True] * 99)
@given(
    bound=st.integers(0, 4),
    per_step=st.integers(1, 6),
    kappa=st.integers(1, 4),
    turns=st.lists(st.booleans(), min_size=20, max_size=200),
)
def test_what_is_begun_inside_the_window_is_never_stale(bound: int, per_step: int, kappa: int, turns: list[bool]) -> None:
    """Producers and trainer in any order: begun with the newest version, resolved in order, a version every kappa steps."""
    newest, started, resolved, steps = 0, 0, 0, 0
    outstanding: list[int] = []
    for train in turns:
        if train and len(outstanding) >= per_step:
            batch, outstanding = outstanding[:per_step], outstanding[per_step:]
            assert not any(is_stale(newest, version, bound) for version in batch)
            steps += 1
            newest += steps % kappa == 0
            resolved += per_step
        elif room(total_window(bound, per_step, kappa), started, resolved):
            outstanding.append(newest)
            started += 1


@given(st.integers(1, 8))
def test_at_bound_zero_a_whole_batch_can_still_be_begun(per_step: int) -> None:
    assert room(total_window(0, per_step), 0, 0) == per_step
