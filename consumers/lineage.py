"""Policy versions that a restart abandoned, and how records from them are told. Pure.

Refuses to judge: such records are off-policy data like any other, with the logprobs of the policy that really sampled them, and
are trained while they are fresh enough. They are counted.

An abandoned version is newer than the checkpoint that a trainer started from, and older than the version under which it
published the restored policy: its weights are in nobody's future. Example: checkpoint at version 7, announced up to 9, the
restored policy is published as 10: versions 8 and 9 are abandoned.
"""

from collections.abc import Iterable, Sequence

from echo.journal import Interval


def abandoned(carried: Iterable[Sequence[int]], *, restored: int, republished: int) -> list[Interval]:
    """Abandoned versions as rising half-open intervals: those that the checkpoint carried, and those of this start.

    restored: the checkpoint's policy version, -1 without one. republished: the first version of this start. What it skipped
    counts, too: a version that was stored and seemed unannounced may have been heard of after all.
    """
    found = [(int(first), int(end)) for first, end in carried]
    if republished > restored + 1:
        found.append((restored + 1, republished))
    return found


def touches(spans: Iterable[tuple[int, int]], versions: Iterable[Interval]) -> bool:
    """Whether any (start_token, policy_version) span is of one of these versions."""
    intervals = tuple(versions)
    return any(first <= version < end for _, version in spans for first, end in intervals)
