"""Where a trainer begins to read: at its frontiers, at the beginning of what is new, and never past records in silence."""

import pytest

from consumers.ledger import Ledger
from consumers.positions import Beginning, beginning, refuse_losses
from echo.errors import CheckpointError
from echo.log import TopicState

NOW = TopicState("id-1", 3)
STATE = {
    "frontier": {"0": 5, "1": 0},
    "above": {"0": [[7, 9]]},
    "resolved": {"trained": 7},
    "letters": [[0, 6, "corrupt", "x"]],
}


def test_a_run_without_a_checkpoint_loses_nothing() -> None:
    assert beginning({}, None, NOW, {0: 9, 1: 0, 2: 0}) == Beginning({"frontier": {}}, {}, None)


def test_partitions_that_came_after_the_checkpoint_are_read_from_offset_0() -> None:
    start = beginning(STATE, "id-1", NOW, {0: 0, 1: 0, 2: 0})
    assert (start.losses, start.former) == ({}, None)
    assert Ledger(range(3), start.state).frontiers() == {0: 5, 1: 0, 2: 0}
    refuse_losses(start, "c", "t")


def test_what_was_deleted_above_a_frontier_is_named_with_the_way_on() -> None:
    """Also of a partition of which nothing was read, and of one that the checkpoint does not know."""
    start = beginning(STATE, "id-1", NOW, {0: 6, 1: 2, 2: 1})
    assert start.losses == {0: 6, 1: 2, 2: 1}
    with pytest.raises(
        CheckpointError, match=r"step-1: .*t\[0\] begins at offset 6, and is read up to 5; t\[1\] .*--accept-lost"
    ):
        refuse_losses(start, "step-1", "t")


def test_what_was_deleted_below_a_frontier_is_no_loss() -> None:
    assert beginning(STATE, "id-1", NOW, {0: 5, 1: 0, 2: 0}).losses == {}


def test_offsets_of_a_topic_that_was_made_anew_are_not_used() -> None:
    """Counts and decisions hold; positions and dead letters are of records that are gone."""
    start = beginning({**STATE, "decided": {"g": ["stale", 1]}}, "id-1", TopicState("id-2", 1), {0: 0})
    assert start == Beginning({"resolved": {"trained": 7}, "decided": {"g": ["stale", 1]}}, {}, {"0": 5, "1": 0})
    with pytest.raises(CheckpointError, match=r"step-1: topic t was deleted and made anew since.*--accept-lost"):
        refuse_losses(start, "step-1", "t")


def test_a_checkpoint_that_knows_no_topic_is_held_to_its_frontiers() -> None:
    start = beginning(STATE, None, NOW, {0: 6, 1: 0, 2: 4})
    assert start.losses == {0: 6}
    assert Ledger(range(3), start.state).frontiers() == {0: 5, 1: 0}
