"""Advantages: the rewards of one group in, one number per member out. Pure.

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
