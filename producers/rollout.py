"""One engine call's worth of groups, piece by piece: prompts to rows, completions to texts, both and scores to trajectories.

Refuses to sample, score, publish or count: loops do that with these pieces, `echo-produce`'s as well as one in one process.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from echo import trajectory
from echo.config import SamplingConfig
from echo.control import Request
from echo.trajectory import Sampling, Trajectory
from producers.collaborators import Tokenizer
from producers.engines.base import Completion
from producers.prompts import Made
from producers.tasks.base import Score


class Work(NamedTuple):
    """Groups to sample in one engine call: a prompt and an id for each, and how to draw."""

    prompts: Sequence[Made]
    group_ids: Sequence[str]
    sampling: Sampling


class Stamp(NamedTuple):
    """What every record of a producer says of where it comes from."""

    run_id: str
    producer_id: str
    incarnation: str
    task: str
    engine: str
    model: str
    logprob_dtype: str


class Timed(NamedTuple):
    """What the engine gave for a work, and when: seconds since the epoch."""

    completions: list[Completion]
    started_at: float
    finished_at: float


def requested(request: Request, config: SamplingConfig, prompts: Sequence[Made]) -> Work:
    """What a request asks for, with the prompts of its places: all of it follows from the request alone, whoever answers."""
    return Work(prompts, request.group_ids, sampling_of(config, request.seed))


def sampling_of(config: SamplingConfig, seed: int) -> Sampling:
    """How the run file says to draw, with a seed for one engine call."""
    return Sampling(
        temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, max_tokens=config.max_tokens, seed=seed
    )


def repeated(prompts: Sequence[Made], group_size: int) -> list[Sequence[int]]:
    """What the engine is called with: every prompt's token ids `group_size` times in a row."""
    return [made.token_ids for made in prompts for _ in range(group_size)]


def to_score(
    tokenizer: Tokenizer, prompts: Sequence[Made], completions: Sequence[Completion]
) -> list[tuple[str, Mapping[str, Any]]]:
    """What the scorer is asked: each completion as text, with its prompt's reference."""
    size = len(completions) // len(prompts)
    texts = [tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in completions]
    return [(text, prompts[number // size].prompt.reference) for number, text in enumerate(texts)]


def group(
    number: int,
    work: Work,
    sampled: Timed,
    scores: Sequence[Score],
    stamp: Stamp,
    first_sequence: int,
) -> list[Trajectory]:
    """The members of the work's `number`-th group. first_sequence: the first member's sequence number."""
    size = len(sampled.completions) // len(work.prompts)
    members = slice(number * size, (number + 1) * size)
    prompt, token_ids = work.prompts[number]
    ids = np.asarray(token_ids, dtype=np.int32)
    found = []
    for index, (completion, score) in enumerate(zip(sampled.completions[members], scores[members], strict=True)):
        sequence_number = first_sequence + index
        found.append(
            Trajectory(
                run_id=stamp.run_id,
                trajectory_id=trajectory.trajectory_id(stamp.run_id, stamp.incarnation, sequence_number),
                group_id=work.group_ids[number],
                group_size=size,
                group_index=index,
                task=stamp.task,
                prompt_id=prompt.prompt_id,
                prompt_ids=ids,
                completion_ids=np.asarray(completion.token_ids, dtype=np.int32),
                logprobs=np.asarray(completion.logprobs, dtype=stamp.logprob_dtype),
                loss_mask=np.ones(len(completion.token_ids), dtype=np.bool_),
                spans=completion.spans,
                reward=score.reward,
                reward_components=score.components,
                finish_reason=completion.finish_reason,
                sampling=work.sampling,
                engine=stamp.engine,
                model=stamp.model,
                producer_id=stamp.producer_id,
                sequence_number=sequence_number,
                started_at=sampled.started_at,
                finished_at=sampled.finished_at,
            )
        )
    return found
