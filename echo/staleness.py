"""The staleness rule and the admission window, as pure functions.

Refuses to know about Kafka, clocks or models. Staleness counts published policy versions, never offsets (that is lag).
"""

import math
from collections.abc import Mapping


def staleness(newest_announced: int, min_policy_version: int) -> int:
    """Versions between the newest announced policy and the oldest token of a trajectory; judged when it is consumed.

    Never negative: a producer may hear an announcement, and sample from it, before a reader does.
    """
    return max(0, newest_announced - min_policy_version)


def is_stale(newest_announced: int, min_policy_version: int, max_staleness: int) -> bool:
    """True iff the trajectory is staler than the bound: staleness == max_staleness is still trained."""
    return staleness(newest_announced, min_policy_version) > max_staleness


def may_sample(newest_announced: int, serving_version: int, max_staleness: int) -> bool:
    """Whether a producer that serves `serving_version` may begin a group: not if it would be stale at birth."""
    return not is_stale(newest_announced, serving_version, max_staleness)


def total_window(max_staleness: int, groups_per_step: int, publish_every: int = 1) -> int:
    """Groups that may be outstanding (published or running, not resolved) over all producers.

    (S * kappa + 1) * groups_per_step. A step consumes `groups_per_step` groups, and every `publish_every`-th (kappa) publishes
    a version. A group begun under version v at the last moment before v + 1 still sees one step of v and kappa steps of
    each of the next S versions, so the last of this many groups is trained while the newest version is at most v + S.
    """
    return (max_staleness * publish_every + 1) * groups_per_step


def grant_windows(total: int, throughput: Mapping[str, float]) -> dict[str, int]:
    """Share `total` outstanding groups among live producers in proportion to measured throughput (groups per second).

    Largest remainder, ties by name, so that equal inputs give equal grants on every host. A producer of unknown (0) throughput
    counts as the mean of the known ones. Everyone gets at least 1, or it could never be measured: the sum is therefore
    at most `total` + one per producer, and exactly `total` when total >= the number of producers and no share rounds to 0.
    """
    if not throughput:
        return {}
    known = [rate for rate in throughput.values() if rate > 0 and math.isfinite(rate)]
    default = sum(known) / len(known) if known else 1.0
    weights = {name: (rate if rate > 0 and math.isfinite(rate) else default) for name, rate in sorted(throughput.items())}
    whole = sum(weights.values())
    # As parts of the whole first: total / whole is infinite for the smallest of rates.
    shares = {name: total * (weight / whole) for name, weight in weights.items()}
    granted = {name: int(share) for name, share in shares.items()}
    left = total - sum(granted.values())
    by_remainder = sorted(shares, key=lambda name: (granted[name] - shares[name], name))
    for name in by_remainder[:left]:
        granted[name] += 1
    return {name: max(1, window) for name, window in granted.items()}


def room(window: int, started: int, resolved: int) -> int:
    """Groups that a producer may still begin: its window less what it began and the trainer has not resolved.

    Never negative. `resolved` above `started` (a count from before a restart) gives the whole window, not more.
    """
    outstanding = max(0, started - resolved)
    return max(0, window - outstanding)
