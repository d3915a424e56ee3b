"""What a training run of the laboratory gave, and what is concluded from several of them. Pure.

Refuses to run anything.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from blake3 import blake3

from echo.weights.manifest import HostTensor

DIVERGED_BELOW = 0.7
"""A run has diverged whose reward, at any point of its curve, is below this share of the best before, or that had to skip a
step: also where it recovers later."""


class Run(NamedTuple):
    """sampled: the mean reward of each step's batch, of the policy that sampled it. curve: by version, the reward of that
    policy on fresh prompts; the last one is the mean over the last policies, `final_reward`. skipped: steps whose loss or
    gradient was not finite. digest: of the final weights. seconds: wall clock."""

    sampled: list[float]
    curve: dict[int, float]
    skipped: int
    digest: str
    seconds: float

    @property
    def final_reward(self) -> float:
        return self.curve[max(self.curve)]

    @property
    def diverged(self) -> bool:
        rewards = [self.curve[version] for version in sorted(self.curve)]
        best = itertools.accumulate(rewards, max)
        return self.skipped > 0 or any(reward < DIVERGED_BELOW * top for reward, top in zip(rewards, best, strict=True))


def digest(tensors: Iterable[HostTensor]) -> str:
    """blake3 (hex) of weights: names, dtypes, shapes and bytes, in the order of names."""
    hasher = blake3()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        hasher.update(f"{tensor.name} {tensor.dtype} {list(tensor.shape)} {tensor.data.nbytes}\n".encode())
        hasher.update(tensor.data)
    return hasher.hexdigest()


class Spread(NamedTuple):
    """Mean and sample standard deviation (0 of one value)."""

    mean: float
    sd: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


def to_json(run: Run) -> dict[str, Any]:
    return {**run._asdict(), "curve": {str(version): reward for version, reward in run.curve.items()}}


def from_json(data: Mapping[str, Any]) -> Run:
    return Run(**{**data, "curve": {int(version): reward for version, reward in data["curve"].items()}})
