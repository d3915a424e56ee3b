"""One record at the very bounds of what `echo.trajectory` lets through makes no step non-finite, whatever the objective."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from consumers.groups import Group
from consumers.learner import Learner
from echo import codec
from echo.trajectory import MAX_REWARD, MAX_TEMPERATURE, MIN_LOGPROB, MIN_TEMPERATURE, Sampling
from tests.helpers import make_group
from tests.unit.test_learner import make_batch, make_run, model_path, weights

__all__ = ["model_path"]

pytestmark = pytest.mark.usefixtures("own_process")

OBJECTIVES = ("ppo", "gspo", "cispo")
CORRECTIONS = ("none", "token_tis", "sequence_tis", "icepop", "trust_region", "tapered")
LOGPROBS = {"lowest": [MIN_LOGPROB] * 4, "highest": [0.0] * 4, "both": [0.0, MIN_LOGPROB, 0.0, MIN_LOGPROB]}
# dpo looks at no correction and at no advantage.
COMBINATIONS = [("dpo", "none", "grpo"), *itertools.product(OBJECTIVES, CORRECTIONS, ("grpo", "dr_grpo"))]
EXTREMES = list(itertools.product((MAX_REWARD, -MAX_REWARD), (MIN_TEMPERATURE, MAX_TEMPERATURE), LOGPROBS))


def batch_with(reward: float, temperature: float, logprobs: str) -> list[Group]:
    """An ordinary group, and one in which the first of four members is at the bounds."""
    sampling = Sampling(max_tokens=64, temperature=temperature)
    extreme: dict[str, Any] = {"reward": reward, "sampling": sampling, "logprobs": np.array(LOGPROBS[logprobs], np.float32)}
    members = [extreme, *({"reward": float(index % 2)} for index in range(3))]
    (ordinary,) = make_batch(1, groups=1)
    return [ordinary, make_group(4, members=members)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("objective", "correction", "advantage"), COMBINATIONS)
def test_a_record_at_the_bounds_makes_no_step_non_finite(model_path, objective, correction, advantage, dtype) -> None:
    keys = {"objective": objective, "correction": correction, "advantage": advantage, "kl_coefficient": 0.1}
    learner = Learner(make_run(model_path, dtype=dtype, lr=1e-3, **keys))
    for extremes in EXTREMES:
        batch = batch_with(*extremes)
        for group in batch:
            codec.encode_many([member.trajectory for member in group.members])  # All of it is let through.
        stats = learner.step(batch, newest_version=7)
        assert not stats.skipped, extremes
        told = (stats.loss, stats.grad_norm, stats.entropy, stats.ess_ratio, stats.reward_std, *stats.mismatch_kl.values())
        assert all(math.isfinite(number) for number in told), (extremes, told)
    assert all(bool(value.isfinite().all()) for value in weights(learner).values())
