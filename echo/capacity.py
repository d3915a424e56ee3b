"""The overlap model: how much sampling, and how much staleness, keep the learner busy. Pure.

Refuses to measure: it is told times and rates, and says what they allow. Units are seconds, groups and groups per second.

Outstanding groups are bounded by the admission window, so a run is a closed circuit: W = (S * kappa + 1) * B groups go round,
through the producers and through the learner, which takes B of them at a time. A step then takes at least

    train              the learner itself, with publishing
    B / rate           what all producers together need for B groups, their pauses for new weights included
    round_trip / (S * kappa + 1)
                       W groups per round trip (Little's law, L = lambda * W); with S = 0 the whole round trip is waited for

and about the largest of the three where each is steady. The learner is idle for the rest of the step. The rule that follows:
the second and third must not exceed the first. The idea of provisioning rollouts by such an overlap is ECHO-2's
(arXiv 2602.02192); the formulas here follow from Echo's own admission window.
"""

import math
from typing import NamedTuple

from echo.staleness import total_window


class Load(NamedTuple):
    """What a run asks of its producers.

    train_seconds: one learner step, from a batch in hand to the next version announced. round_trip_seconds: from that
    announcement until a batch sampled under it could be trained, were nothing else waiting: hearing, pulling and loading the
    weights, one engine call, scoring, publishing, reading; and the learner step itself. pause_seconds: time that a producer
    doesn't sample per new version (swapping; pulling goes on beside sampling).
    """

    groups_per_step: int
    max_staleness: int
    train_seconds: float
    round_trip_seconds: float
    pause_seconds: float = 0.0
    publish_every: int = 1

    @property
    def steps_in_window(self) -> int:
        """Steps' worth of groups that may be outstanding: S * kappa + 1."""
        return total_window(self.max_staleness, 1, self.publish_every)


def required_rate(load: Load) -> float:
    """Groups per second that the producers must sample together, while they sample, so that they are no bottleneck.

    Infinite where their pauses alone take as long as the steps between two versions.
    """
    sampling = load.train_seconds * load.publish_every - load.pause_seconds
    if sampling <= 0:
        return math.inf
    return load.groups_per_step * load.publish_every / sampling


def required_staleness(load: Load) -> int:
    """The smallest S with which the round trip is hidden behind the steps of the window."""
    steps = math.ceil(load.round_trip_seconds / load.train_seconds)
    return max(0, math.ceil((steps - 1) / load.publish_every))


def meets_rule(load: Load, rate: float) -> bool:
    """Whether `rate` groups per second, under this run's S, keep the learner busy."""
    return rate >= required_rate(load) and load.max_staleness >= required_staleness(load)


def step_seconds(load: Load, rate: float) -> float:
    """The time of a step that the model predicts, for producers that sample `rate` > 0 groups per second together."""
    sampling = load.groups_per_step / rate + load.pause_seconds / load.publish_every
    return max(load.train_seconds, sampling, load.round_trip_seconds / load.steps_in_window)


def learner_idle(load: Load, rate: float) -> float:
    """The share of its time, 0 to 1, that the learner waits according to the model."""
    return 1 - load.train_seconds / step_seconds(load, rate)
