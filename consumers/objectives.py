"""Advantages, losses and off-policy corrections: pure torch functions over token tensors.

Refuses to know models, Kafka, groups or devices. Shapes: G members of a group, N rows, T token positions, V vocabulary.
A (N, T) tensor holds one value per token position; where `mask` is False its values count for nothing, whatever they are.

**The off-policy correction, thought through.** Three policies meet in one step:

    behaviour   drew the tokens; its logprobs come with the record. It is other than the learner for two reasons: it is
                up to S versions older, and an engine computes the same weights slightly differently.
    proximal    the learner at the beginning of the optimiser step. PPO's trust region is around it.
    new         the learner being updated, the one that carries the gradient.

`token_tis` decouples the two jobs of PPO's ratio (decoupled PPO: Hilton et al., arXiv 2110.00641). The truncated importance
weight w = min(proximal / behaviour, cap), a constant, corrects for who drew the token; the clip of new / proximal bounds the
update. A stale but good token is therefore not clipped away merely because the learner has moved on; it counts by w, and the
cap bounds the variance at the price of a bias on tokens that the learner now likes much better than their sampler did. The
correction is per token: that neglects how the prefix's probability has changed, which is the usual trade of bias for variance.
With one optimiser step per batch new == proximal when the gradient is taken: the ratio is 1, the clip never acts (its share is
then 0), and the gradient is that of -w * advantage * log new. The clip acts where several steps are taken on one batch.

`none` is PPO as it stands: the clip of new / behaviour does both jobs.

Log-ratios are clamped to +-LOG_RATIO_LIMIT before exp; beyond it a ratio is constant, so such a token has no gradient under
`none`. NaN is never clamped away: it reaches the loss, where the learner's guard finds it.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Correction = Literal["token_tis", "none"]

# exp(20) = 4.9e8: far beyond any ratio that means something, far below overflow, also of a sum over a batch.
LOG_RATIO_LIMIT = 20.0

# Logits turned to float32 at once: 256 MiB. More are taken in pieces, recomputed on the way back.
LOGITS_PER_PIECE = 2**26


class TokenLoss(NamedTuple):
    """A loss, and sums over its unmasked tokens, from which shares and means of a whole batch are made.

    loss: () with gradient. clipped, truncated: () tokens. entropy: () nats. mismatch: (N,) nats, k3 per row.
    """

    loss: Tensor
    clipped: Tensor
    truncated: Tensor
    entropy: Tensor
    mismatch: Tensor


def grpo_advantages(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """(r - mean) / (std + eps) over one group: GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    rewards: (G,) floating. Returns (G,). std is the sample standard deviation (divisor G - 1), as in TRL. A group whose
    rewards are all equal, or that has one member, has advantage 0.
    """
    if len(rewards) < 2:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(correction=1) + eps)


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: Tensor, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of the targets and entropy of the distribution, both of softmax(logits / temperature), in float32.

    logits: (N, T, V), those that predict `targets`: (N, T) int64. temperature: (N,) > 0. Returns two (N, T), natural log.
    The entropy carries a gradient only where asked, which costs another (N, T, V) on the way back.
    """
    rows, positions, vocabulary = logits.shape
    size = max(1, LOGITS_PER_PIECE // vocabulary)
    # split, not slices: its backward pass joins the pieces once instead of padding each to the whole.
    pieces = zip(
        logits.flatten(0, 1).split(size),
        targets.flatten().split(size),
        temperature.repeat_interleave(positions).split(size),
        strict=True,
    )
    if rows * positions <= size:
        found = [_piece_logprobs(*piece, entropy_gradient) for piece in pieces]
    else:
        found = [
            checkpoint(_piece_logprobs, *piece, entropy_gradient, use_reentrant=False, preserve_rng_state=False)
            for piece in pieces
        ]
    logprobs = torch.cat([logprobs for logprobs, _ in found]).view(rows, positions)
    entropy = torch.cat([entropy for _, entropy in found]).view(rows, positions)
    return logprobs, entropy


def _piece_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits.float() / temperature.unsqueeze(-1), dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = torch.special.entr(logprobs.exp()).sum(dim=-1)  # 0 at p = 0, where p * log p is NaN
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def token_loss(
    logprobs: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: float,
    clip_low: float,
    clip_high: float,
    correction: Correction,
    tis_cap: float,
    entropy: Tensor,
    entropy_coefficient: float = 0.0,
) -> TokenLoss:
    """PPO's clipped loss with an off-policy correction per token (see the top of this file), as a token mean.

        r    = new / proximal  under token_tis,   new / behaviour  under none
        w    = min(proximal / behaviour, tis_cap), constant,       1 under none
        loss = sum over unmasked tokens of  -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) - c * entropy,
               divided by `denominator`

    Sources: the clip, PPO eq. 7 (arXiv 1707.06347); its asymmetric bounds and the token mean, DAPO (arXiv 2503.14476, sections
    3.1 and 3.3); the truncated weight per token, Yao et al. 2025 ("Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training") after IMPALA's truncation (arXiv 1802.01561); k3, Schulman 2020 ("Approximating KL Divergence").

    logprobs: (N, T) of `new`, with gradient. proximal, behaviour: (N, T), constants. advantages: (N,), one per row.
    mask: (N, T) bool. denominator: the unmasked tokens of the whole batch, not of this part of it, so that the sum of the
    gradients of its parts is the gradient of the batch. entropy: (N, T) nats of `new`, with gradient where
    entropy_coefficient > 0.

    `clipped` counts the tokens whose gradient the clip stops. `truncated` counts those whose weight met the cap. `mismatch` is
    k3 = q - 1 - log q with q = proximal / behaviour, an unbiased, never negative estimate of KL(behaviour || proximal).
    """
    zero = logprobs.new_zeros(())
    proximal, behaviour = proximal.detach(), behaviour.detach()
    off_policy = _log_ratio(proximal, behaviour, mask)
    if correction == "token_tis":
        log_ratio = _log_ratio(logprobs, proximal, mask)
        importance = off_policy.exp()
        weight = importance.clamp(max=tis_cap)
        truncated = ((importance > tis_cap) & mask).sum()
    else:
        log_ratio = _log_ratio(logprobs, behaviour, mask)
        weight = torch.ones_like(off_policy)
        truncated = zero
    ratio = log_ratio.exp()
    advantage = advantages.unsqueeze(-1)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    per_token = -weight * surrogate
    if entropy_coefficient:
        per_token = per_token - entropy_coefficient * entropy
    loss = torch.where(mask, per_token, zero).sum() / denominator
    with torch.no_grad():
        stopped = ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & (ratio < 1 - clip_low))
        return TokenLoss(
            loss=loss,
            clipped=(stopped & mask).sum(),
            truncated=truncated,
            entropy=torch.where(mask, entropy, zero).sum(),
            mismatch=(off_policy.exp() - 1 - off_policy).sum(dim=-1),
        )


def _log_ratio(over: Tensor, under: Tensor, mask: Tensor) -> Tensor:
    """log(over / under), clamped, and 0 where masked: before exp, so that no padding can make inf * 0."""
    difference = torch.where(mask, over - under, over.new_zeros(()))
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
