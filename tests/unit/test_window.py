"""Admission: no interleaving of grants, versions and batches begins a group that the window or the staleness bound forbids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.control import Grant
from echo.staleness import total_window
from producers.window import Window


def test_an_unknown_incarnation_may_have_one_group_outstanding() -> None:
    window = Window(max_staleness=4)
    assert window.room(0, 0) == 1
    window.begin(1)
    assert window.room(0, 0) == 0


def test_nothing_begins_before_a_policy_serves() -> None:
    assert Window(max_staleness=4).room(newest_announced=0, serving=-1) == 0


def test_a_grant_gives_its_window_less_what_is_outstanding() -> None:
    window = Window(max_staleness=4)
    window.begin(6)
    window.granted(Grant(window=5, resolved=4), 0)
    assert window.outstanding == 2
    assert window.room(9, 9) == 3


def test_a_group_that_was_given_up_holds_no_room() -> None:
    """Nobody will ever resolve it: counting it would block production for good."""
    window = Window(max_staleness=0)
    window.begin(1)
    window.give_up(1)
    assert window.room(0, 0) == 1


def test_a_producer_that_is_no_longer_named_falls_back_to_one_and_is_not_stuck() -> None:
    window = Window(max_staleness=4)
    window.begin(8)
    window.granted(Grant(window=20, resolved=8), 0)
    window.granted(None, 0)
    assert window.room(3, 3) == 1


def test_a_trainer_that_went_back_to_a_checkpoint_gives_no_room_twice() -> None:
    window = Window(max_staleness=1)
    window.begin(10)
    window.granted(Grant(window=4, resolved=9), 0)
    window.granted(Grant(window=4, resolved=5), 0)
    assert window.room(7, 7) == 0


@pytest.mark.parametrize(("behind", "room"), [(0, 10), (1, 8), (4, 2), (5, 0)])
def test_under_an_older_policy_a_part_of_the_window_stays_empty(behind: int, room: int) -> None:
    """What is begun `behind` versions late would be stale after a full window was trained before it."""
    window = Window(max_staleness=4)
    window.granted(Grant(window=10, resolved=0), 0)
    assert window.room(newest_announced=20, serving=20 - behind) == room


def test_staleness_0_makes_progress_exactly_at_the_newest_version() -> None:
    window = Window(max_staleness=0)
    window.granted(Grant(window=4, resolved=0), 0)
    assert window.room(7, 7) == 4
    assert window.room(8, 7) == 0


@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 5),
    publish_every=st.integers(1, 3),
    calls=st.integers(1, 6),
    events=st.lists(st.sampled_from(["sample", "train", "pull", "give_up"]), min_size=40, max_size=200),
)
def test_one_producer_with_the_whole_window_never_samples_what_becomes_stale(
    max_staleness: int, groups_per_step: int, publish_every: int, calls: int, events: list[str]
) -> None:
    """Any interleaving of sampling, training (in order, a version every few steps) and late pulls: nothing trained is stale."""
    total = total_window(max_staleness, groups_per_step, publish_every)
    window = Window(max_staleness, publish_every)
    window.granted(Grant(window=total, resolved=0), 0)
    announced = serving = resolved = steps = 0
    queue: list[int] = []
    for event in events:
        room = window.room(announced, serving)
        if event == "sample" and room:
            groups = min(room, calls)
            window.begin(groups)
            queue.extend([serving] * groups)
        elif event == "give_up" and room:
            window.begin(1)
            window.give_up(1)
        elif event == "pull":
            serving = announced
        elif event == "train" and len(queue) >= groups_per_step:
            batch, queue = queue[:groups_per_step], queue[groups_per_step:]
            assert all(announced - version <= max_staleness for version in batch)
            resolved += groups_per_step
            steps += 1
            announced = steps // publish_every
            window.granted(Grant(window=total, resolved=resolved), 0)
        assert window.outstanding == len(queue) <= total
        if serving == announced and len(queue) < total:
            assert window.room(announced, serving) > 0, "a producer that is up to date and below its window may sample"
