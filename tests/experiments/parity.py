"""parity: what decoupling itself costs: the same task, model, data and number of trained samples, in three ways.

    colocated    one process that samples and trains in turns (`loop`), with no lag
    sequential   trainer, weight server and two producers as processes over a real log; every step is asked for
    async        the same, with producers that never wait for the trainer except at the window, S = 4

All compute in float32 on one thread. Sequential mode must give the same bits as the co-located loop: compared is the digest of
the final weights, after all steps, for every seed. Judged are the last policies of each run, as in `loop`: the processes' ones
are pulled from their weight server.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echo.config import RunConfig
from tests.experiments import loop, processes
from tests.experiments.outcome import Run, Spread, digest, from_json, to_json

WAYS = ("colocated", "sequential", "async")
STEPS = 120
# Gentler than `loop`'s, which is near what the task bears: what is asked here is not how much a lag can do, but whether there
# is any difference.
LEARNING_RATE = 6e-4
STALENESS = 4
PRODUCERS = 2
LIMIT_S = 900.0

Runs = dict[str, list[Run]]


def collect(work: Path, *, seeds: Sequence[int], steps: int = STEPS, say: Callable[[str], None]) -> Runs:
    """Train in every way that `work` does not hold yet."""
    found: Runs = {way: [] for way in WAYS}
    for seed in seeds:
        for way in WAYS:
            run = _run(work, seed, way, steps)
            found[way].append(run)
            say(f"seed {seed}, {way}: final reward {run.final_reward:.3f}, weights {run.digest[:12]} ({run.seconds:.0f} s)")
    return found


def _run(work: Path, seed: int, way: str, steps: int) -> Run:
    kept = work / "parity" / f"{way}-seed{seed}-{steps}.json"
    if kept.exists():
        return from_json(json.loads(kept.read_text()))
    run = loop.make_run(
        loop.make_model(work, seed),
        seed,
        run_id=f"parity-{way}-{seed}",
        mode="sequential" if way == "sequential" else "async",
        max_staleness=STALENESS if way == "async" else 0,
        producer={"groups_per_call": 8},
        learner={"steps": steps, "lr": LEARNING_RATE},
        checkpoint={"every": steps},
        weights={"keep": loop.LAST_STEPS + STALENESS + 2},
    )
    done = loop.train(run, 0) if way == "colocated" else in_processes(run, work / "parity")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(to_json(done)))
    return done


def in_processes(run: RunConfig, folder: Path) -> Run:
    """The run as processes, `run.mode` and all else as its file says."""
    with processes.start(run, folder, producers=PRODUCERS) as running:
        running.finish(limit_s=LIMIT_S)
        lines = running.steps()
        newest = max(running.versions())
        assert newest == run.learner.steps, f"{newest} versions for {run.learner.steps} steps"
        policies = [running.policy(version) for version in range(max(1, newest - loop.LAST_STEPS + 1), newest + 1)]
    with loop.sampler_of(run) as sampler:
        final = float(np.mean([sampler.reward(policy, prompts=loop.LAST_PROMPTS) for policy in policies]))
    return Run(
        sampled=[line["reward_mean"] for line in lines],
        curve={newest: final},
        skipped=sum(line["skipped"] for line in lines),
        digest=digest(policies[-1].tensors.values()),
        seconds=lines[-1]["time"] - lines[0]["time"],
    )


def conclude(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "sequential_equals_colocated": all(
            one.digest == other.digest for one, other in zip(runs["sequential"], runs["colocated"], strict=True)
        )
    }
    for way, found in runs.items():
        finals = [run.final_reward for run in found]
        result[way] = {"final_reward": Spread.of(finals)._asdict(), "seeds": finals, "digests": [run.digest for run in found]}
    return result


def misses(result: Mapping[str, Any]) -> list[str]:
    """The lines of Must show that are not met."""
    found = []
    if not result["sequential_equals_colocated"]:
        found.append("sequential mode's final weights differ from the co-located loop's")
    base, other = Spread(**result["colocated"]["final_reward"]), Spread(**result["async"]["final_reward"])
    if not abs(other.mean - base.mean) <= base.sd:
        found.append(
            f"async's final reward {other.mean:.4f} is not within one standard deviation ({base.sd:.4f}) of "
            f"the co-located loop's {base.mean:.4f}"
        )
    return found


def plot(runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Rewards of the batches over trained samples: mean over seeds, with the range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (way, found), colour, style in zip(runs.items(), ("#1f60c4", "#37872d", "#c4162a"), ("-", "--", "-"), strict=True):
        rewards = np.array([run.sampled for run in found])
        steps = np.arange(1, rewards.shape[1] + 1)
        axes.fill_between(steps, rewards.min(axis=0), rewards.max(axis=0), color=colour, alpha=0.12, linewidth=0)
        axes.plot(steps, rewards.mean(axis=0), color=colour, linestyle=style, label=way)
    axes.set(xlabel="optimiser step", ylabel="reward of the step's batch, mean and range over seeds", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=90)
