"""Where a trainer begins to read, from its checkpoint and from what the log still holds. Pure.

Never jumps over records in silence: what was deleted before it was read is an error, or counted as lost if the run allows it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from echo.errors import CheckpointError
from echo.log import TopicState

_WAY_ON = (
    "`echo-train RUN_FILE --accept-lost` (checkpoint.accept_lost) resumes with what was learned and counts them as lost. Keep "
    "the topic's retention longer than the trainer's absence"
)


class Beginning(NamedTuple):
    """What to do before the first read.

    state: the ledger's part of the checkpoint that still holds. losses: per partition, the first offset that the log holds, for
    partitions that lost records. former: frontiers in a topic that was deleted since; None if it is the same topic.
    """

    state: dict[str, Any]
    losses: dict[int, int]
    former: dict[str, int] | None


def beginning(state: Mapping[str, Any], topic_id: str | None, now: TopicState, firsts: Mapping[int, int]) -> Beginning:
    """state: what the checkpoint has of the ledger. topic_id: of the topic that its offsets are of, None if it has none.

    firsts: per partition of the topic as it is `now`, the first offset that it holds.
    """
    if topic_id not in (None, now.id):
        # Offsets of the former topic mean nothing in this one. Decisions about groups are by id, and hold.
        kept = {name: value for name, value in state.items() if name not in ("frontier", "above", "letters")}
        return Beginning(kept, {}, dict(state.get("frontier", {})))
    frontier = {int(number): int(offset) for number, offset in state.get("frontier", {}).items()}
    if topic_id is not None:
        # It names all partitions that there were: those that came after it began at offset 0.
        frontier = dict.fromkeys(firsts, 0) | frontier
    losses = {number: first for number, first in firsts.items() if number in frontier and frontier[number] < first}
    whole = {**state, "frontier": {str(number): offset for number, offset in frontier.items()}}
    return Beginning(whole, losses, None)


def refuse_losses(found: Beginning, checkpoint: str, topic: str) -> None:
    """Raises CheckpointError if records were deleted before they were read."""
    if found.former is not None:
        raise CheckpointError(
            f"{checkpoint}: topic {topic} was deleted and made anew since; what it held is gone, and the checkpoint's offsets "
            f"are of the former one: {_WAY_ON}"
        )
    if found.losses:
        places = "; ".join(
            f"{topic}[{number}] begins at offset {first}, and is read up to {found.state['frontier'][str(number)]}"
            for number, first in sorted(found.losses.items())
        )
        raise CheckpointError(f"{checkpoint}: records were deleted before they were read: {places}. {_WAY_ON}")
