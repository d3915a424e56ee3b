"""Both sides of a run with a pace of their own: a step, or an engine call, is waited out until it has taken a given time.

    python -m tests.experiments.paced trainer SECONDS run.yaml
    python -m tests.experiments.paced producer SECONDS run.yaml --id p0

SECONDS: per optimiser step (forward, backward and update), and per group of an engine call. The work itself is done, and is
to be shorter; what is waited stands for larger work on another machine, so that two sides on one do not share its cores.
"""

import sys
import time
from collections.abc import Sequence

import consumers.cli
import producers.cli
from consumers import wiring
from consumers.groups import Group
from consumers.learner import Learner
from consumers.step import StepStats
from echo.config import RunConfig
from echo.trajectory import Sampling
from producers.engines import registry
from producers.engines.base import Completion, Engine, Policy, TakePolicy
from producers.engines.registry import ENGINES


class PacedLearner(Learner):
    seconds = 0.0

    def step(self, groups: Sequence[Group], newest_version: int) -> StepStats:
        until = time.monotonic() + self.seconds
        stats = super().step(groups, newest_version)
        _wait_until(until)
        return stats


class PacedEngine:
    """An engine whose calls take `seconds` per group."""

    def __init__(self, engine: Engine, seconds: float, group_size: int) -> None:
        self._engine = engine
        self._seconds = seconds
        self._group_size = group_size
        self.identity = engine.identity

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    def load(self, policy: Policy) -> None:
        self._engine.load(policy)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, take_policy: TakePolicy | None = None
    ) -> list[Completion]:
        until = time.monotonic() + self._seconds * len(prompts) / self._group_size
        completions = self._engine.generate(prompts, sampling, take_policy=take_policy)
        _wait_until(until)
        return completions

    def close(self) -> None:
        self._engine.close()


def _wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def main() -> None:
    _, side, seconds, *rest = sys.argv
    sys.argv = [side, *rest]
    if side == "trainer":
        PacedLearner.seconds = float(seconds)
        wiring.Learner = PacedLearner  # type: ignore[attr-defined]
        consumers.cli.main()
        return

    real = registry.ENGINES["transformers"]

    def paced(run: RunConfig) -> PacedEngine:
        return PacedEngine(real(run), float(seconds), run.sampling.group_size)

    ENGINES["transformers"] = paced
    producers.cli.main()


if __name__ == "__main__":
    main()
