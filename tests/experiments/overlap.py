"""overlap: whether generation and training really go on at the same time, and the learner is busy where the rule says so.

Real processes over a real log, each paced (`paced`): work is done, and waited out to a given time. So T_gen and T_train are
what they would be on machines of their own, and can be made equal. Both are measured, with everything that belongs to them:

    T_train     a learner step with its publishing (the trainer's journal)
    T_gen       sampling, scoring and publishing the groups of one step (busy seconds per group in the last heartbeat)

Three runs: sequential; asynchronous, with producers slowed down by what the first run's learner needed for publishing, so that
the two are equal; and asynchronous with producers that are faster than that by `HEADROOM`, so that the capacity rule
(`echo.capacity`) is met with something to spare.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echo.capacity import Load, learner_idle, meets_rule, step_seconds
from echo.config import RunConfig
from tests.experiments.loop import make_model, make_run
from tests.experiments.processes import Commands, start

GROUPS, GROUP_SIZE, STALENESS = 8, 4, 4
PACE_S = 1.0
HEADROOM = 1.2
STEPS, WARM_UP = 30, 6
LIMIT_S = 240.0

ASYNC_OVER_MAX = 1.1
SEQUENTIAL_OVER_SUM = (0.9, 1.2)
IDLE = 0.05


class Pace(NamedTuple):
    """Medians over the steps after the warm-up, in seconds; idle: the share of the wall clock without a step in work."""

    step: float
    train: float
    generate: float
    idle: float


def measure(run: RunConfig, folder: Path, *, per_step_s: float) -> Pace:
    """Run it, its producers needing `per_step_s` for the groups of a step and the learner PACE_S for the step."""
    commands = Commands(
        trainer=("tests.experiments.paced", "trainer", f"{PACE_S}"),
        producer=("tests.experiments.paced", "producer", f"{per_step_s / GROUPS}"),
    )
    with start(run, folder, commands=commands) as running:
        running.finish(limit_s=LIMIT_S)
        (heartbeat,) = running.heartbeats()
        return pace_of(running.steps(), generate=GROUPS * heartbeat.busy_seconds / heartbeat.groups_started)


def pace_of(lines: Sequence[Mapping[str, Any]], *, generate: float) -> Pace:
    """From the journal's lines: `time` is when a step had ended, `seconds` what it took with publishing, waits left out."""
    times = [line["time"] for line in lines[WARM_UP - 1 :]]
    working = [line["seconds"] for line in lines[WARM_UP:]]
    steps = [after - before for before, after in itertools.pairwise(times)]
    return Pace(
        step=statistics.median(steps),
        train=statistics.median(working),
        generate=generate,
        idle=1 - sum(working) / (times[-1] - times[0]),
    )


def collect(work: Path, *, say: Callable[[str], None]) -> dict[str, Pace]:
    model = make_model(work, 0)

    def go(name: str, mode: str, per_step_s: float) -> Pace:
        run = make_run(
            model,
            0,
            run_id=f"overlap-{name}",
            mode=mode,
            max_staleness=0 if mode == "sequential" else STALENESS,
            sampling={"group_size": GROUP_SIZE},
            batch={"groups_per_step": GROUPS},
            producer={"groups_per_call": GROUPS // 2},
            learner={"steps": STEPS},
            checkpoint={"every": STEPS},
        )
        pace = measure(run, work / "overlap", per_step_s=per_step_s)
        say(f"{name}: {', '.join(f'{key} {value:.3f}' for key, value in pace._asdict().items())}")
        return pace

    sequential = go("sequential", "sequential", PACE_S)
    equal_s = PACE_S + sequential.train - sequential.generate
    return {
        "sequential": sequential,
        "async": go("async", "async", equal_s),
        "headroom": go("headroom", "async", equal_s / HEADROOM),
    }


def load_of(pace: Pace) -> Load:
    """What the run asks of its producers. One call makes half of a step's groups; the rest of the way is short."""
    return Load(GROUPS, STALENESS, train_seconds=pace.train, round_trip_seconds=pace.train + pace.generate)


def conclude(found: Mapping[str, Pace]) -> dict[str, Any]:
    equal, sequential, headroom = found["async"], found["sequential"], found["headroom"]
    load, rate = load_of(headroom), GROUPS / headroom.generate
    return {
        "async_step_over_max": equal.step / max(equal.generate, equal.train),
        "sequential_step_over_sum": sequential.step / (sequential.generate + sequential.train),
        "learner_idle": headroom.idle,
        "capacity_rule_met": meets_rule(load, rate),
        "predicted": {"step_seconds": step_seconds(load, rate), "learner_idle": learner_idle(load, rate)},
        "runs": {name: pace._asdict() for name, pace in found.items()},
    }


def misses(result: Mapping[str, Any]) -> list[str]:
    """The lines of Must show that are not met."""
    found = []
    if not result["async_step_over_max"] <= ASYNC_OVER_MAX:
        found.append(f"async_step_over_max is {result['async_step_over_max']:.3f}, more than {ASYNC_OVER_MAX}")
    low, high = SEQUENTIAL_OVER_SUM
    if not low <= result["sequential_step_over_sum"] <= high:
        found.append(f"sequential_step_over_sum is {result['sequential_step_over_sum']:.3f}, outside {low} to {high}")
    if not result["capacity_rule_met"]:
        found.append("the producers did not meet the capacity rule, so learner_idle says nothing")
    elif not result["learner_idle"] <= IDLE:
        found.append(f"learner_idle is {result['learner_idle']:.3f}, more than {IDLE}")
    return found


def plot(found: Mapping[str, Pace], path: Path) -> None:
    """The step beside its two parts, for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for place, pace in enumerate(found.values()):
        axes.bar(place - 0.27, pace.generate, 0.25, color="#8ab8ff", label="T_gen" if place == 0 else None)
        axes.bar(place, pace.train, 0.25, color="#1f60c4", label="T_train" if place == 0 else None)
        axes.bar(place + 0.27, pace.step, 0.25, color="#37872d", label="step, wall clock" if place == 0 else None)
        axes.text(place + 0.27, pace.step, f"idle {pace.idle:.0%}", ha="center", va="bottom", fontsize=8)
    axes.set(ylabel="seconds")
    axes.set_xticks(range(len(found)), list(found))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=90)
