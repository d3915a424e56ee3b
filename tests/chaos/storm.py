"""Kills at random: who, when, and for how long it stays away are drawn from a seed.

Between kills other faults strike as often as kills do (`tests.chaos.faults`), where they are asked for.

Refuses to be kind: a kill may hit a start-up, a checkpoint, a pull, or a process that was restarted a moment ago. In two of
three cases it waits until the trainer has done a step since its start, so that a storm is survived by going on and not by luck.
"""

import random
from collections.abc import Mapping
from typing import NamedTuple

from echo.broker import ApacheBroker
from tests.chaos.faults import Faults
from tests.chaos.swarm import TRAINER, WEIGHTS, Swarm

BROKER = "broker"

_TRAINING_FIRST, _FAULTS = 2 / 3, 2 / 3
# Seconds until a kill, and until the restart: about a life's first steps, and less than what anybody would call dead.
_LIFE_S, _AWAY_S = 1.2, 0.5


class Told(NamedTuple):
    """How often each was killed, and how often each other fault struck."""

    killed: Mapping[str, int]
    faults: Mapping[str, int]


class Odds(NamedTuple):
    """How often each is the victim, relative to the others. A restart of the broker takes seconds, so it is rare."""

    trainer: int = 9
    producers: int = 6
    weights: int = 4
    broker: int = 1


def storm(swarm: Swarm, *, kills: int, seed: int, odds: Odds = Odds(), faults: bool = True) -> Told:  # noqa: B008
    """Run, kill and restart so many times, with a fault before most kills, and bring the run to its end.

    faults: False kills and does nothing else. Raises ChaosError.
    """
    draw = random.Random(seed)
    choices = {TRAINER: odds.trainer, WEIGHTS: odds.weights, **dict.fromkeys(swarm.producers, odds.producers / 2)}
    if isinstance(swarm.broker, ApacheBroker):
        choices[BROKER] = odds.broker
    killed = dict.fromkeys(choices, 0)
    swarm.start_all()
    with Faults(swarm, random.Random(seed)) as others:
        for _ in range(kills):
            if draw.random() < _TRAINING_FIRST:
                swarm.await_training()
            swarm.live_on(draw.uniform(0.0, _LIFE_S))
            if faults and draw.random() < _FAULTS:
                others.strike()
            (victim,) = draw.choices(list(choices), weights=list(choices.values()))
            killed[victim] += 1
            if victim == BROKER:
                swarm.restart_broker()
                continue
            swarm.kill(victim)
            swarm.live_on(draw.uniform(0.0, _AWAY_S))
            swarm.start(victim)
    swarm.end_well()
    return Told(killed, others.struck)
