"""Sampling and training taken in turns in one process: the real engine, learner, task and scorer, and a lag that is forced.

Refuses brokers, stored weights and threads: what a run gives follows from its run file, its lag and nothing else. So it is the
co-located baseline that decoupled training is held against, and the place where staleness alone is varied.

    step t (from 0) trains a batch that version max(0, t - lag) sampled, while version t is the newest

so `lag` is the staleness of every batch from step `lag` on. Prompts, engine calls and seeds are those of `echo.sequential`: the
same under any lag, and those of a run in sequential mode.

Rewards are judged on the newest policy, with prompts and seeds of their own: the rewards of a batch tell of the policy that
sampled it, which under a lag is an old one.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from accelerate.state import AcceleratorState

from consumers.groups import Group, Member
from consumers.learner import Learner, StepStats
from echo.config import RunConfig
from echo.sequential import calls_of_step, mix_seed, prompt_seed, requested_group
from echo.trajectory import Sampling, Trajectory, trajectory_id
from producers.engines.base import Completion, Engine, Policy
from producers.engines.registry import make_engine
from producers.tasks.base import Prompt
from producers.tasks.registry import make_task
from producers.tasks.scoring import ScorerPool
from producers.tiny_policy import make_tiny_policy
from producers.wiring import load_tokenizer
from tests.experiments.outcome import Run, digest

LOOP = "colocated"
_CURVE_EVERY, _CURVE_PROMPTS = 10, 256
_LAST_STEPS, _LAST_PROMPTS = 10, 128


def make_run(model: Path, seed: int, **sections: Any) -> RunConfig:
    """The demo's run file with a seed and a model of its own, smaller batches, and `sections` laid over its keys."""
    data = yaml.safe_load(resources.files("echo.cli").joinpath("demo_run.yaml").read_text())
    data |= {"run_id": f"experiment-{seed}", "seed": seed, "model": {"path": str(model), "dtype": "float32"}}
    data["task"]["seed"] = seed
    data["producer"]["seed"] = seed
    # Half of the demo's batch at twice its learning rate learns as much in as many steps.
    data["batch"]["groups_per_step"] = 16
    data["learner"]["lr"] = 8e-4
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section} if isinstance(section, dict) else section
    return RunConfig.model_validate(data)


def make_model(folder: Path, seed: int) -> Path:
    """The demo's tiny policy for a seed: random weights and a short supervised warm-up. Made once."""
    path = folder / f"model-{seed}"
    if not path.exists():
        make_tiny_policy(make_run(path, seed), path, seed)
    return path


def policy_of(learner: Learner, version: int) -> Policy:
    """The learner's weights as a producer gets them."""
    return Policy(version, {tensor.name: tensor for tensor in learner.host_tensors()})


class Sampler:
    """Samples and scores: for training as sequential mode would, for judging with prompts of its own."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._task = make_task(run.task)
        self._scorer = ScorerPool(
            self._task, workers=1, timeout_s=run.task.scorer_timeout_s, memory_mib=run.task.scorer_memory_mib
        )
        self._tokenizer = load_tokenizer(run.model.path, chat=False)
        self._engine, self._judge = make_engine(run), make_engine(run)
        self._records = 0

    def close(self) -> None:
        self._scorer.close()
        self._engine.close()
        self._judge.close()

    def batch(self, step: int, policy: Policy) -> list[Group]:
        """The groups of a step in the order of their prompts, sampled by `policy`, whose versions never go back."""
        run, groups = self._run, []
        if policy.version > self._engine.policy_version:
            self._engine.load(policy)
        for call in calls_of_step(
            step,
            groups_per_step=run.batch.groups_per_step,
            groups_per_call=run.producer.groups_per_call,
            seed=run.seed,
        ):
            prompts = [self._task.prompt(prompt_seed(run.task.seed), index) for index in call.prompts]
            size, sampling = run.sampling.group_size, self._sampling(call.seed)
            completions = self._sample(self._engine, [prompt for prompt in prompts for _ in range(size)], sampling)
            for place, (index, prompt) in enumerate(zip(call.prompts, prompts, strict=True)):
                members = completions[place * size : (place + 1) * size]
                groups.append(self._group(requested_group(run.run_id, policy.version, index), prompt, members, sampling))
        return groups

    def reward(self, policy: Policy, *, prompts: int) -> float:
        """The mean reward of one completion each of fresh prompts, the same for every policy of this version."""
        self._judge.load(policy)
        seed = mix_seed("judge", self._run.seed)
        first = policy.version * _CURVE_PROMPTS
        asked = [self._task.prompt(seed, first + number) for number in range(prompts)]
        found = self._sample(self._judge, asked, self._sampling(mix_seed(seed, policy.version)))
        return float(np.mean([reward for _, reward, _ in found]))

    def _sampling(self, seed: int) -> Sampling:
        config = self._run.sampling
        return Sampling(
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, max_tokens=config.max_tokens, seed=seed
        )

    def _sample(
        self, engine: Engine, prompts: list[Prompt], sampling: Sampling
    ) -> list[tuple[Completion, float, dict[str, float]]]:
        completions = engine.generate([self._tokenizer.encode(prompt.text) for prompt in prompts], sampling)
        texts = [self._tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in completions]
        scores = self._scorer.score([(text, prompt.reference) for text, prompt in zip(texts, prompts, strict=True)])
        return [(one, score.reward, score.components) for one, score in zip(completions, scores, strict=True)]

    def _group(
        self,
        group_id: str,
        prompt: Prompt,
        sampled: list[tuple[Completion, float, dict[str, float]]],
        sampling: Sampling,
    ) -> Group:
        prompt_ids = np.asarray(self._tokenizer.encode(prompt.text), dtype=np.int32)
        members = []
        for index, (completion, reward, components) in enumerate(sampled):
            number, self._records = self._records, self._records + 1
            record = Trajectory(
                run_id=self._run.run_id,
                trajectory_id=trajectory_id(self._run.run_id, LOOP, number),
                group_id=group_id,
                group_size=len(sampled),
                group_index=index,
                task=self._task.name,
                prompt_id=prompt.prompt_id,
                prompt_ids=prompt_ids,
                completion_ids=np.asarray(completion.token_ids, dtype=np.int32),
                logprobs=np.asarray(completion.logprobs, dtype=self._run.producer.logprob_dtype),
                loss_mask=np.ones(len(completion.token_ids), dtype=np.bool_),
                spans=completion.spans,
                reward=reward,
                reward_components=components,
                finish_reason=completion.finish_reason,
                sampling=sampling,
                engine=self._engine.identity,
                model=Path(self._run.model.path).name,
                producer_id=LOOP,
                sequence_number=number,
                started_at=0.0,
                finished_at=0.0,
            )
            members.append(Member(0, number, record))
        return Group(group_id, tuple(members))


@contextmanager
def sampler_of(run: RunConfig) -> Iterator[Sampler]:
    sampler = Sampler(run)
    try:
        yield sampler
    finally:
        sampler.close()


class Schedule:
    """Which of the learner's versions samples: the one of `lag` steps before, or version 0 where there is none yet."""

    def __init__(self, lag: int, first: Policy) -> None:
        self._lag = lag
        self._kept: deque[Policy] = deque([first])

    @property
    def sampling(self) -> Policy:
        return self._kept[0]

    def published(self, policy: Policy) -> None:
        """The step that comes next has this one as its newest version."""
        self._kept.append(policy)
        while self._kept[0].version < policy.version - self._lag:
            self._kept.popleft()


def train(run: RunConfig, lag: int, *, judge: bool = True, watch: Callable[[int, StepStats], None] | None = None) -> Run:
    """`learner.steps` steps under a lag. judge: whether the policies are judged on the way."""
    began = time.perf_counter()
    # accelerate keeps one configuration per process; every run is a process's worth.
    AcceleratorState._reset_state(True)
    learner = Learner(run)
    steps, rewards, curve, last, skipped = run.learner.steps, [], {}, [], 0
    with sampler_of(run) as sampler:
        schedule = Schedule(lag, policy_of(learner, 0))
        for step in range(steps):
            stats = learner.step(sampler.batch(step, schedule.sampling), step)
            rewards.append(stats.reward_mean)
            skipped += stats.skipped
            if watch is not None:
                watch(step, stats)
            newest = policy_of(learner, step + 1)
            schedule.published(newest)
            if judge and newest.version > steps - _LAST_STEPS:
                last.append(sampler.reward(newest, prompts=_LAST_PROMPTS))
            elif judge and newest.version % _CURVE_EVERY == 0:
                curve[newest.version] = sampler.reward(newest, prompts=_CURVE_PROMPTS)
    if last:
        curve[steps] = float(np.mean(last))
    return Run(
        sampled=rewards,
        curve=curve,
        skipped=skipped,
        digest=digest(learner.host_tensors()),
        seconds=time.perf_counter() - began,
    )
