"""What rewards say about the members of one group: advantages, or a pair of which one is preferred. Pure.

Refuses to know trajectories, losses or batches. Shapes: G members of a group.
"""

import torch
from torch import Tensor

from echo.config import Advantage

# Keeps a group whose rewards hardly differ from being blown up; TRL's value.
_EPS = 1e-4


def advantages(rewards: Tensor, kind: Advantage) -> Tensor:
    """Advantages of one group.

        grpo     (r - mean) / (std + 1e-4)       DeepSeekMath (arXiv 2402.03300, section 4.1.2)
        dr_grpo  r - mean                        Dr. GRPO (arXiv 2503.20783, section 3.2): hard and easy prompts weigh alike
        rloo     r - mean of the others          Kool et al. 2019; Ahmadian et al. (arXiv 2402.14740): an unbiased baseline

    rewards: (G,) floating. Returns (G,). std is the sample standard deviation (divisor G - 1). A group whose rewards are all
    equal, or that has one member, has advantage 0, exactly.
    """
    size = len(rewards)
    if size < 2 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if kind == "grpo":
        return centred / (rewards.std(correction=1) + _EPS)
    if kind == "rloo":
        return centred * (size / (size - 1))
    return centred


def preference(rewards: Tensor) -> tuple[int, int, bool]:
    """The pair that preference learning makes of a group: index of the best, of the worst, and whether one is better at all.

    rewards: (G,) floating, G >= 1. Of equal rewards the first member counts, so that equal groups give equal pairs. A group
    whose rewards are all equal gives a pair that says nothing: its first member and its last.
    """
    best, worst = int(rewards.argmax()), int(rewards.argmin())
    if rewards[best] == rewards[worst]:
        return 0, len(rewards) - 1, False
    return best, worst, True
