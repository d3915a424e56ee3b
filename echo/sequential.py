"""Sequential mode's plan: which prompts a step samples, in which engine calls, with which seeds. Pure.

Refuses to know who samples, when, or how often it was asked for: everything here follows from the run file and the step's
number. So a run's weights do not depend on how many producers there are, nor on which of them died, and a loop in one process
that goes through the same calls (docs/architecture.md, "Modes") comes to the same weights, bit for bit.

    for call in calls_of_step(step, ...):
        prompts = [<the first usable one of the task's, over candidates(run.task.seed, index)> for index in call.prompts]
        completions = engine.generate(<each prompt group_size times>, <run.sampling with seed=call.seed>)
    learner.step(<the groups by prompt index>, version)
"""

import hashlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

ORIGIN = "requested"
"""Stands in group ids where an asynchronous producer puts its incarnation: a requested group belongs to no producer."""


class Call(NamedTuple):
    """One engine call of a step.

    number: counts the step's calls from 0. prompts: consecutive indices into the run's stream of prompts, one group each.
    seed: the sampling seed of the whole call.
    """

    number: int
    prompts: range
    seed: int


def mix_seed(*parts: object) -> int:
    """A 63-bit seed from any parts, the same on every host."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_seed(task_seed: int) -> int:
    """The seed of the run's one stream of prompts."""
    return mix_seed(task_seed, ORIGIN)


def candidates(task_seed: int, index: int) -> Iterator[tuple[int, int]]:
    """Where the prompt of an index of that stream is looked for, as (seed, index) of a task's stream, without end.

    The first is its own place; after it come those of a stream that belongs to this index alone. The first that can be used
    is taken, so that a step is never short of a prompt, and every producer takes the same one.
    """
    yield prompt_seed(task_seed), index
    seed = mix_seed(task_seed, ORIGIN, "instead of", index)
    yield from ((seed, place) for place in itertools.count())


def calls_of_step(step: int, *, groups_per_step: int, groups_per_call: int, seed: int) -> tuple[Call, ...]:
    """The engine calls of a step. `step`: learner steps done before it. `seed`: the run's.

    Groups come in the stream's order, `groups_per_call` to a call, the last call takes what is left.
    """
    first = step * groups_per_step
    starts = range(0, groups_per_step, groups_per_call)
    return tuple(
        Call(number, range(first + start, first + min(start + groups_per_call, groups_per_step)), mix_seed(seed, step, number))
        for number, start in enumerate(starts)
    )


def requested_group(run_id: str, version: int, prompt: int, attempt: int = 0) -> str:
    """The id of the group of a prompt, sampled by `version`.

    No other group ever has it: a version is published once, also over restarts, and a step of it takes each prompt once.
    attempt: counts the groups of this prompt and version that were given up before (a member could not be read).
    """
    return f"{run_id}/{ORIGIN}/v{version}-{prompt}" + (f"-{attempt}" if attempt else "")
