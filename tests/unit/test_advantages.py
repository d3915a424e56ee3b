"""Advantages against hand-computed groups, a reference in plain Python, and what holds for every group."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consumers.advantages import advantages, preference

KINDS = ("grpo", "dr_grpo", "rloo")


def of(rewards: list[float], kind: str) -> list[float]:
    return advantages(torch.tensor(rewards, dtype=torch.float64), kind).tolist()


def test_advantages_by_hand():
    """Rewards 3, 0, 0, 1: mean 1, sample std sqrt(2); the mean of the others of the first is 1/3."""
    std = math.sqrt(2) + 1e-4
    assert of([3, 0, 0, 1], "grpo") == pytest.approx([2 / std, -1 / std, -1 / std, 0], abs=1e-12)
    assert of([3, 0, 0, 1], "dr_grpo") == pytest.approx([2, -1, -1, 0], abs=1e-12)
    assert of([3, 0, 0, 1], "rloo") == pytest.approx([3 - 1 / 3, -4 / 3, -4 / 3, 0], abs=1e-12)


@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=12).filter(lambda r: max(r) - min(r) > 1e-3))
def test_advantages_equal_the_written_formulas(rewards):
    size, mean = len(rewards), math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (size - 1))
    assert of(rewards, "grpo") == pytest.approx([(r - mean) / (std + 1e-4) for r in rewards], abs=1e-9)
    assert of(rewards, "dr_grpo") == pytest.approx([r - mean for r in rewards], abs=1e-9)
    others = [(math.fsum(rewards) - r) / (size - 1) for r in rewards]
    assert of(rewards, "rloo") == pytest.approx([r - other for r, other in zip(rewards, others, strict=True)], abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_and_single_members_have_no_advantage(kind):
    """Exactly none: 0.1 has a mean that is not quite 0.1."""
    assert of([0.1] * 7, kind) == [0.0] * 7
    assert of([3.0], kind) == [0.0]


@pytest.mark.parametrize(
    ("rewards", "pair"),
    [
        ([0.0, 2.0, 1.0, -1.0], (1, 3, True)),
        ([0.0, 1.0, 1.0, 0.0], (1, 0, True)),  # The first of equals.
        ([1.0, 1.0, 1.0], (0, 2, False)),
        ([5.0], (0, 0, False)),
    ],
)
def test_a_groups_pair_is_its_best_and_its_worst(rewards, pair):
    assert preference(torch.tensor(rewards)) == pair
