"""The preference loss against plain Python, by hand, and under any cut of a batch that keeps pairs together.

That TRL computes the same is tests/unit/test_objectives_trl.py.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.objectives import LOG_RATIO_LIMIT, BatchSize, Settings, policy_loss

BETA = 0.4


def example(seed: int, pairs: int = 4, positions: int = 5) -> dict[str, torch.Tensor]:
    """Float64 pairs; about every third says nothing."""
    generator = np.random.default_rng(seed)
    said = np.repeat(generator.random(pairs) < 0.7, 2)
    arrays = {
        "logprobs": generator.normal(-2, 1, (2 * pairs, positions)),
        "proximal": generator.normal(-2, 1, (2 * pairs, positions)),
        "behaviour": generator.normal(-2, 1, (2 * pairs, positions)),
        "reference": generator.normal(-2, 1, (2 * pairs, positions)),
        "advantages": said * np.tile([1.0, -1.0], pairs),
        "mask": generator.random((2 * pairs, positions)) < 0.7,
        "entropy": generator.random((2 * pairs, positions)),
    }
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def run(inputs: dict[str, torch.Tensor], size: BatchSize) -> tuple[Any, torch.Tensor]:
    logprobs = inputs["logprobs"].clone().requires_grad_(True)
    found = policy_loss(**(inputs | {"logprobs": logprobs}), size=size, settings=Settings(objective="dpo", dpo_beta=BETA))
    found.loss.backward()
    assert logprobs.grad is not None
    return found, logprobs.grad


def score(inputs: dict[str, torch.Tensor], row: int) -> float:
    terms = [
        max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, float(new) - float(ref)))
        for new, ref, kept in zip(inputs["logprobs"][row], inputs["reference"][row], inputs["mask"][row], strict=True)
        if kept
    ]
    return math.fsum(terms)


@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_equal_the_written_formula(seed):
    """-log sigmoid of the margin, a mean over pairs, and its slope: -+beta * sigmoid(-margin) at each token."""
    inputs = example(seed)
    found, gradient = run(inputs, BatchSize(10, 1))  # Of five pairs.
    expected, slopes = 0.0, torch.zeros_like(gradient)
    for chosen in range(0, len(inputs["mask"]), 2):
        margin = BETA * (score(inputs, chosen) - score(inputs, chosen + 1))
        if inputs["advantages"][chosen]:
            expected += math.log1p(math.exp(-margin)) / 5
            slope = BETA / (1 + math.exp(margin)) / 5
            slopes[chosen][inputs["mask"][chosen]] = -slope
            slopes[chosen + 1][inputs["mask"][chosen + 1]] = slope
    assert expected > 0
    assert found.loss.item() == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(gradient, slopes, atol=1e-12, rtol=1e-12)


def test_by_hand():
    """Two tokens against one: margin 0.4 * (ln 2 + ln 3 - ln 9), so the loss is ln(1 + 1.5^0.4)."""
    inputs = example(0, pairs=1, positions=2) | {
        "logprobs": torch.tensor([[0.2, 0.3], [0.9, 0.2]], dtype=torch.float64).log(),
        "reference": torch.tensor([[0.1, 0.1], [0.1, 0.1]], dtype=torch.float64).log(),
        "mask": torch.tensor([[True, True], [True, False]]),
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64),
    }
    found, _ = run(inputs, BatchSize(2, 3))
    assert found.loss.item() == pytest.approx(math.log1p(1.5**0.4), abs=1e-12)
    assert (found.clipped.item(), found.truncated.item()) == (0, 0)
    k3 = [1 / ratio - 1 + math.log(ratio) for ratio in (2, 3, 9)]
    assert found.reference_kl.item() == pytest.approx(sum(k3), abs=1e-12)


def test_masked_positions_and_pairs_that_say_nothing_count_for_nothing():
    """Whatever stands there; a NaN under a True mask reaches the loss."""
    inputs = example(1)
    inputs["advantages"][:2] = 0
    dirty = {name: value.clone() for name, value in inputs.items()}
    for name, value in (("logprobs", -math.inf), ("reference", math.nan), ("entropy", math.nan)):
        dirty[name][~inputs["mask"]] = value
    dirty["logprobs"][:2] -= 3
    (clean, gradient), (found, same) = (run(values, BatchSize(8, 1)) for values in (inputs, dirty))
    assert found.loss.item() == clean.loss.item() > 0
    assert torch.equal(gradient, same)
    assert gradient[:2].abs().max() == 0
    dirty["logprobs"][tuple(np.argwhere(inputs["mask"].numpy())[-1])] = math.nan
    assert math.isnan(run(dirty, BatchSize(8, 1))[0].loss.item())


@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_any_cut_between_pairs_gives_the_same_gradient(data, seed):
    pairs = data.draw(st.integers(1, 6))
    owner = data.draw(st.lists(st.integers(0, 2), min_size=pairs, max_size=pairs))
    inputs, size = example(seed, pairs=pairs), BatchSize(2 * pairs, 1)
    whole, gradient = run(inputs, size)
    loss = 0.0
    for part in set(owner):
        rows = [row for pair in range(pairs) if owner[pair] == part for row in (2 * pair, 2 * pair + 1)]
        found, part_gradient = run({name: value[rows] for name, value in inputs.items()}, size)
        loss += found.loss.item()
        torch.testing.assert_close(part_gradient, gradient[rows], atol=1e-15, rtol=1e-12)
    assert loss == pytest.approx(whole.loss.item(), abs=1e-12)


def test_a_row_that_keeps_a_rank_busy_has_no_loss():
    inputs = {name: value[:1] for name, value in example(0).items()}
    inputs["mask"] = torch.zeros_like(inputs["mask"])
    found, gradient = run(inputs, BatchSize(8, 1))
    assert (found.loss.item(), gradient.abs().max().item()) == (0, 0)


def test_preferences_need_a_reference():
    inputs = {name: value for name, value in example(0).items() if name != "reference"}
    with pytest.raises(ValueError, match="reference"):
        run(inputs, BatchSize(8, 1))
