"""What belongs to one optimiser step: the numbers that it tells, its clock, its sums over micro-batches and ranks, its rate.

Refuses to know models and losses.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import get_scheduler

from consumers.batching import MicroBatch
from consumers.objectives import TokenLoss
from consumers.parallel import Team
from echo.config import LearnerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one step did. Ratios and means are over the batch's trained tokens, before the update.

    skipped: the loss or the gradient norm was not finite, or no token was trainable; weights and optimiser are unchanged.
    loss, grad_norm (before clipping): as they were, so they may be NaN or infinite when skipped.
    clipped_ratio, truncated_ratio: shares of tokens, see `objectives.policy_loss`. entropy: nats.
    mismatch_kl: KL(behaviour || learner) in nats, by staleness of the trajectory: "0" and ">0", each only where it has
    tokens. At "0" it is the engines' difference, plus the steps taken since the last publication where publish_every > 1.
    ess_ratio: effective sample size of the importance weights q = learner / behaviour, (sum q)^2 / sum q^2, as a share of the
    tokens: 1 where all weigh the same. reference_kl: nats, 0 without a reference. learning_rate: of this step.
    tokens: prompt and completion tokens. loss_tokens: those that are trained. staleness: one per trajectory, in versions.
    seconds: wall time by phase: unpack (groups to micro-batches on the device, other ranks told), forward, backward (which
    includes the optimiser).
    """

    loss: float
    grad_norm: float
    entropy: float
    clipped_ratio: float
    truncated_ratio: float
    mismatch_kl: dict[str, float]
    tokens: int
    loss_tokens: int
    ess_ratio: float
    reference_kl: float
    learning_rate: float
    reward_mean: float
    reward_std: float
    staleness: list[int]
    seconds: dict[str, float]
    skipped: bool


def marking_last(parts: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    iterator = iter(parts)
    held = next(iterator)
    for part in iterator:
        yield held, False
        held = part
    yield held, True


class Clock:
    """Seconds by phase: `lap` gives the time since the last lap to one of them."""

    def __init__(self, now: Callable[[], float], started: float) -> None:
        self._now = now
        self._last = started
        self.seconds = dict.fromkeys(("unpack", "forward", "backward"), 0.0)

    def lap(self, phase: str) -> None:
        now = self._now()
        self.seconds[phase] += now - self._last
        self._last = now


class Sums:
    """Sums over micro-batches, kept in float64 on the device, and over ranks; read once."""

    _NAMES = (
        "loss",
        "entropy",
        "clipped",
        "truncated",
        "weight",
        "weight squared",
        "reference",
        "mismatch 0",
        "mismatch >0",
        "tokens 0",
        "tokens >0",
    )

    def __init__(self, device: torch.device) -> None:
        self._values = torch.zeros(len(self._NAMES), dtype=torch.float64, device=device)

    def add(self, found: TokenLoss, batch: MicroBatch) -> None:
        fresh = batch.staleness == 0
        tokens = batch.loss_mask.sum(dim=-1)
        parts = (
            found.loss.detach(),
            found.entropy,
            found.clipped,
            found.truncated,
            found.weight,
            found.weight_squared,
            found.reference_kl,
            found.mismatch[fresh].sum(),
            found.mismatch[~fresh].sum(),
            tokens[fresh].sum(),
            tokens[~fresh].sum(),
        )
        self._values += torch.stack([part.double() for part in parts])

    def read(self, grad_norm: Tensor, team: Team) -> dict[str, float]:
        values = torch.cat([team.sum(self._values), grad_norm.detach().double().reshape(1)])
        return dict(zip((*self._NAMES, "grad_norm"), values.tolist(), strict=True))


def schedule(config: LearnerConfig) -> Callable[[int], float]:
    """Factor of the learning rate by steps done, from transformers: linear warm-up from 0, then as `schedule` says."""
    name = "constant_with_warmup" if config.schedule == "constant" else config.schedule
    # Its function of the step alone is taken: a state that is one number is restored exactly.
    made = get_scheduler(
        name,
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.steps,
    )
    factor: Callable[[int], float] = made.lr_lambdas[0]
    return factor
