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
from consumers.learner import Learner
from consumers.step import StepStats
from echo.config import RunConfig
from echo.sequential import calls_of_step, mix_seed, requested_group
from producers import rollout
from producers.engines.base import Completion, Engine, Policy
from producers.engines.registry import make_engine
from producers.prompts import Made, PromptMaker
from producers.rollout import Stamp, Timed, Work
from producers.tasks.base import Score
from producers.tasks.registry import make_task
from producers.tasks.scoring import ScorerPool
from producers.tiny_policy import make_tiny_policy
from producers.wiring import load_tokenizer
from tests.experiments.outcome import Run, digest

LOOP = "colocated"
_CURVE_EVERY, _CURVE_PROMPTS = 10, 256
LAST_STEPS, LAST_PROMPTS = 10, 128


def make_run(model: Path, seed: int, **sections: Any) -> RunConfig:
    """The demo's run file with a seed and a model of its own, smaller batches, and `sections` laid over its keys."""
    data = yaml.safe_load(resources.files("echo.cli").joinpath("demo_run.yaml").read_text())
    data |= {"run_id": f"experiment-{seed}", "seed": seed, "model": {"path": str(model), "dtype": "float32"}}
    data["task"]["seed"] = seed
    data["producer"]["seed"] = seed
    # Half of the demo's batch, so that a run takes half a minute. The rate rises first: Adam's first steps are as large as any,
    # on the least knowledge, and without it a seed lost all in them. It falls to 0 in the end: what is judged there
    # is where learning came to rest, not the last of the noise that full steps make on a task nearly solved.
    data["batch"]["groups_per_step"] = 16
    data["learner"] |= {"lr": 1e-3, "warmup_steps": 8, "schedule": "linear", "clip_low": 0.2, "clip_high": 0.28}
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
        limits = run.task
        self._scorer = ScorerPool(self._task, timeout_s=limits.scorer_timeout_s, memory_mib=limits.scorer_memory_mib)
        self._tokenizer = load_tokenizer(run.model.path, chat=False)
        self._engine, self._judge = make_engine(run), make_engine(run)
        self._maker = PromptMaker(self._task, self._tokenizer, limits=self._engine.limits, max_tokens=run.sampling.max_tokens)
        self._stamp = Stamp(
            run.run_id, LOOP, LOOP, self._task.name, self._engine.identity, run.model.path, run.producer.logprob_dtype
        )
        self._records = 0

    def close(self) -> None:
        self._scorer.close()
        self._engine.close()
        self._judge.close()

    def batch(self, step: int, policy: Policy) -> list[Group]:
        """The groups of a step in the order of their prompts, sampled by `policy`, whose versions never go back."""
        if policy.version > self._engine.policy_version:
            self._engine.load(policy)
        run, groups = self._run, []
        for call in calls_of_step(
            step, groups_per_step=run.batch.groups_per_step, groups_per_call=run.producer.groups_per_call, seed=run.seed
        ):
            prompts = list(self._maker.asked(run.task.seed, call.prompts))
            ids = [requested_group(run.run_id, policy.version, index) for index in call.prompts]
            work = Work(prompts, ids, rollout.sampling_of(run.sampling, call.seed))
            completions, scores = self._sample(self._engine, work, run.sampling.group_size)
            for number, group_id in enumerate(ids):
                sampled = Timed(completions, 0.0, 0.0)
                records = rollout.group(number, work, sampled, scores, self._stamp, self._records)
                groups.append(Group(group_id, tuple(Member(0, record.sequence_number, record) for record in records)))
                self._records += len(records)
        return groups

    def reward(self, policy: Policy, *, prompts: int) -> float:
        """The mean reward of one completion each of fresh prompts: the same ones for every policy of this version."""
        self._judge.load(policy)
        seed = mix_seed("judge", self._run.seed)
        first = policy.version * _CURVE_PROMPTS
        judged = [self._task.prompt(seed, first + number) for number in range(prompts)]
        asked = [Made(prompt, self._tokenizer.encode(prompt.text)) for prompt in judged]
        work = Work(asked, (), rollout.sampling_of(self._run.sampling, mix_seed(seed, policy.version)))
        _, scores = self._sample(self._judge, work, 1)
        return float(np.mean([score.reward for score in scores]))

    def _sample(self, engine: Engine, work: Work, group_size: int) -> tuple[list[Completion], list[Score]]:
        completions = engine.generate(rollout.repeated(work.prompts, group_size), work.sampling)
        scores = self._scorer.score(rollout.to_score(self._tokenizer, work.prompts, completions))
        return completions, scores


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
            if judge and newest.version > steps - LAST_STEPS:
                last.append(sampler.reward(newest, prompts=LAST_PROMPTS))
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
