"""staleness: how much reward a forced lag costs, under each off-policy correction.

One process, one cause: `loop` trains batches that are exactly S versions old, everything else is equal. Judged are the last
policies on fresh prompts. `none` is naive PPO: the clip of new / behaviour, and nothing else. The default is LearnerConfig's.

Must show: under the default correction no seed diverges at any S, and at the largest S it keeps 0.95 of the on-policy reward
(the same correction at S = 0).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from echo.config import LearnerConfig
from tests.experiments.loop import make_model, make_run, train
from tests.experiments.outcome import Run, Spread, from_json, to_json

LAGS = (0, 1, 4, 8, 11, 16)
STEPS = 100
KEPT = 0.95
DEFAULT: str = LearnerConfig().correction
CORRECTIONS: tuple[str, ...] = tuple(dict.fromkeys((DEFAULT, "none", "token_tis")))

Runs = dict[str, dict[int, list[Run]]]
"""By correction and lag, one run per seed."""


def collect(
    work: Path,
    *,
    seeds: Sequence[int],
    corrections: Sequence[str] = CORRECTIONS,
    lags: Sequence[int] = LAGS,
    steps: int = STEPS,
    say: Callable[[str], None],
) -> Runs:
    """Train every combination that `work` does not hold yet."""
    found: Runs = {correction: {lag: [] for lag in lags} for correction in corrections}
    # Seeds outermost: what is there after an interruption is whole for some of them.
    for seed in seeds:
        for correction in corrections:
            for lag in lags:
                run = _run(work, seed, correction, lag, steps)
                found[correction][lag].append(run)
                say(
                    f"seed {seed}, {correction}, S = {lag}: final reward {run.final_reward:.3f}"
                    f"{', diverged' if run.diverged else ''} ({run.seconds:.0f} s)"
                )
    return found


def _run(work: Path, seed: int, correction: str, lag: int, steps: int) -> Run:
    kept = work / "staleness" / f"{correction}-S{lag}-seed{seed}-{steps}.json"
    if kept.exists():
        return from_json(json.loads(kept.read_text()))
    model = make_model(work, seed)
    run = train(make_run(model, seed, learner={"correction": correction, "steps": steps}), lag)
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(".part")
    part.write_text(json.dumps(to_json(run)))
    part.replace(kept)
    return run


def conclude(runs: Runs) -> dict[str, Any]:
    """What is told: {"default": correction, correction: {S: {final_reward, final_reward_ratio, diverged, ...}}}."""
    result: dict[str, Any] = {"default": DEFAULT}
    for correction, by_lag in runs.items():
        on_policy = Spread.of([run.final_reward for run in by_lag[0]]).mean
        result[correction] = {
            str(lag): {
                "final_reward": Spread.of(finals := [run.final_reward for run in found])._asdict(),
                "final_reward_ratio": Spread.of(finals).mean / on_policy,
                "diverged": any(run.diverged for run in found),
                "diverged_seeds": sum(run.diverged for run in found),
                "seeds": finals,
            }
            for lag, found in by_lag.items()
        }
    return result


def misses(result: dict[str, Any]) -> list[str]:
    """The lines of Must show that are not met."""
    return list(_misses(result[result["default"]], result["default"]))


def _misses(by_lag: dict[str, Any], name: str) -> Iterator[str]:
    largest = max(by_lag, key=int)
    ratio = by_lag[largest]["final_reward_ratio"]
    if not ratio >= KEPT:
        yield f"{name} keeps {ratio:.3f} of the on-policy reward at S = {largest}, less than {KEPT}"
    for lag, cell in by_lag.items():
        if cell["diverged"]:
            yield f"{cell['diverged_seeds']} of {len(cell['seeds'])} seeds diverge under {name} at S = {lag}"


def table(result: dict[str, Any]) -> str:
    """Ratios by correction and lag, as lines of text; an asterisk for each seed that diverged."""
    names = [name for name in result if name != "default"]
    lags = list(result[names[0]])
    lines = ["".join(["S".ljust(16), *(lag.rjust(11) for lag in lags)])]
    for name in names:
        cells = (f"{result[name][lag]['final_reward_ratio']:.3f}{'*' * result[name][lag]['diverged_seeds']}" for lag in lags)
        lines.append("".join([name.ljust(16), *(cell.rjust(11) for cell in cells)]))
    return "\n".join(lines)


def plot(runs: Runs, path: Path) -> None:
    """Final reward over S, and every seed's curve at the largest S."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = ("#1f60c4", "#c4162a", "#e0b400", "#37872d", "#8f3bb8", "#707070")
    largest = max(next(iter(runs.values())))
    for (name, by_lag), colour in zip(runs.items(), colours, strict=False):
        spreads = [Spread.of([run.final_reward for run in found]) for found in by_lag.values()]
        label = {DEFAULT: f"{DEFAULT} (default)", "none": "none (naive PPO)"}.get(name, name)
        left.errorbar(
            list(by_lag), [s.mean for s in spreads], [s.sd for s in spreads], color=colour, marker="o", capsize=3, label=label
        )
        for number, run in enumerate(by_lag[largest]):
            right.plot(list(run.curve), list(run.curve.values()), color=colour, alpha=0.7, label=label if number == 0 else None)
    left.set(xlabel="forced lag S (versions)", ylabel="final reward, mean and sd over seeds", ylim=(-0.02, 1.02))
    right.set(xlabel="optimiser step", ylabel="reward of that step's policy", ylim=(-0.02, 1.02), title=f"S = {largest}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=90)
