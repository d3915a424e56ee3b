"""Losses and off-policy corrections: pure torch functions over token tensors. `docs/objectives.md` has them as a table.

Refuses to know models, Kafka, groups or devices. Shapes: N rows, T token positions, V vocabulary. A (N, T) tensor holds one
value per token position; where `mask` is False its values count for nothing, whatever they are.

**The off-policy correction, thought through.** Three policies meet in one step:

    behaviour   drew the tokens; its logprobs come with the record. It is other than the learner for two reasons: it is
                up to S versions older, and an engine computes the same weights slightly differently.
    proximal    the learner at the beginning of the optimiser step.
    new         the learner being updated, the one that carries the gradient.

PPO's one ratio does two jobs: it weighs a token for who drew it, and its clip bounds the update. Decoupled PPO (Hilton et al.,
arXiv 2110.00641) parts them: a constant weight made of proximal / behaviour, and a clip of new / proximal. With one optimiser
step per batch new == proximal when the gradient is taken, so that clip never acts, and nothing but the weight's cap holds back
a stale batch: S batches in a row may each push the same token as far as they like, because none of them sees what the ones
before it did. `trust_region` therefore also looks at new / behaviour, the ratio that does see it, and stops a token's gradient
where that has left a band in the direction in which its advantage would push it further.

    correction      ratio r          weight w, constant                        else
    none            new / behaviour  1                                         PPO as it stands: the clip does both jobs
    token_tis       new / proximal   min(q, cap)
    sequence_tis    new / proximal   min(product of the row's q, cap)
    icepop          new / proximal   q inside [band_low, band_high], else 0
    trust_region    new / proximal   min(q, cap)                               stopped where new / behaviour leaves the band
    tapered         new / proximal   A >= 0: 1; A < 0: min(product of q, 1)

with q = proximal / behaviour per token. Weights per token neglect how the prefix's probability has changed, the usual trade of
bias for variance.

Log-ratios are clamped to +-LOG_RATIO_LIMIT before exp; beyond it a ratio is constant, so such a token has no gradient where the
ratio carries it. NaN is never clamped away: it reaches the loss, where the learner's guard finds it.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from echo.config import Correction, KlEstimator, LearnerConfig, Normalization, ObjectiveName

# exp(20) = 4.9e8: far beyond any ratio that means something, far below overflow, also of a sum over a batch.
LOG_RATIO_LIMIT = 20.0

# Logits turned to float32 at once: 256 MiB. More are taken in pieces, recomputed on the way back.
LOGITS_PER_PIECE = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a loss depends on beside tensors: the objective keys of LearnerConfig, whose docstrings say what each one does.
    What is left out is PPO as it stands.

    fixed_length: tokens that a completion may have, for `normalization: fixed_length`.
    """

    objective: ObjectiveName = "ppo"
    correction: Correction = "none"
    normalization: Normalization = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    tis_cap: float = 2.0
    band_low: float = 0.5
    band_high: float = 2.0
    off_policy_mask: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coefficient: float = 0.0
    dpo_beta: float = 0.1
    fixed_length: int = 1

    @classmethod
    def of(cls, config: LearnerConfig, *, fixed_length: int) -> Self:
        keys = {field.name: getattr(config, field.name) for field in fields(cls) if field.name != "fixed_length"}
        return cls(**keys, fixed_length=fixed_length)


class BatchSize(NamedTuple):
    """Rows and unmasked tokens of the whole batch, over all micro-batches and ranks: what a mean is a mean of."""

    rows: int
    tokens: int


class TokenLoss(NamedTuple):
    """A loss, and sums over its unmasked tokens, from which shares and means of a whole batch are made.

    loss: () with gradient. clipped, truncated: () tokens, see `ratio_loss`. entropy: () nats.
    mismatch: (N,) nats per row, k3 = q - 1 - log q: an unbiased, never negative estimate of KL(behaviour || proximal).
    weight, weight_squared: () sums of q = proximal / behaviour and of its square, for the effective sample size.
    reference_kl: () nats, 0 without a reference.
    """

    loss: Tensor
    clipped: Tensor
    truncated: Tensor
    entropy: Tensor
    mismatch: Tensor
    weight: Tensor
    weight_squared: Tensor
    reference_kl: Tensor


class RatioLoss(NamedTuple):
    """loss: () with gradient. clipped, truncated: (N, T) bool, see `ratio_loss`. kl: (N, T) nats, or () without a reference."""

    loss: Tensor
    clipped: Tensor
    truncated: Tensor
    kl: Tensor


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


def policy_loss(
    logprobs: Tensor,
    *,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    entropy: Tensor,
    size: BatchSize,
    settings: Settings,
    reference: Tensor | None = None,
) -> TokenLoss:
    """The loss of a batch, or of a part of it, that the settings ask for: `ratio_loss`, or `dpo_loss` on rows that are pairs.

    logprobs: (N, T) of `new`, with gradient. proximal, behaviour, reference: (N, T), constants. advantages: (N,), one per row.
    mask: (N, T) bool. entropy: (N, T) nats of `new`, with gradient where entropy_coefficient > 0. size: of the whole batch.
    Losses of parts add up to that of the batch, and so do their gradients.
    Raises ValueError where a reference is needed and there is none.
    """
    proximal, behaviour = proximal.detach(), behaviour.detach()
    off_policy = _log_ratio(proximal, behaviour, mask)
    if settings.objective == "dpo":
        if reference is None:
            raise ValueError("objective dpo needs the reference's logprobs")
        loss = dpo_loss(logprobs, reference, advantages, mask, size=size, beta=settings.dpo_beta)
        clipped = truncated = logprobs.new_zeros(())
        _, kl = _kl(logprobs.detach(), reference, mask, settings)
    else:
        loss, clipped, truncated, kl = ratio_loss(
            logprobs,
            proximal=proximal,
            behaviour=behaviour,
            advantages=advantages,
            mask=mask,
            entropy=entropy,
            size=size,
            settings=settings,
            reference=reference,
        )
    with torch.no_grad():
        importance = torch.where(mask, off_policy.exp(), logprobs.new_zeros(()))
        return TokenLoss(
            loss=loss,
            clipped=clipped.sum(),
            truncated=truncated.sum(),
            entropy=torch.where(mask, entropy, logprobs.new_zeros(())).sum(),
            mismatch=(off_policy.exp() - 1 - off_policy).sum(dim=-1),
            weight=importance.sum(),
            weight_squared=importance.square().sum(),
            reference_kl=kl.sum(),
        )


def ratio_loss(
    logprobs: Tensor,
    *,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    entropy: Tensor,
    size: BatchSize,
    settings: Settings,
    reference: Tensor | None = None,
) -> RatioLoss:
    """The policy-gradient losses (ppo, cispo, gspo) with an off-policy correction (see the top of this file).

        ppo    l = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
        gspo   the same, with the row's r = exp(mean over its tokens of log r) for each of its tokens
        cispo  l = -w * min(r, 1 + clip_high) * A * log new, where w * min(..) is constant: no token's gradient is stopped
        loss = sum over unmasked tokens of scale * (l + kl_coefficient * KL - entropy_coefficient * entropy)

    `scale` makes a mean over the whole batch, of which this may be a part: see `row_scales`.

    Sources: the clip, PPO eq. 7 (arXiv 1707.06347); its asymmetric bounds ("clip-higher") and the token mean, DAPO
    (arXiv 2503.14476, sections 3.1 and 3.3); gspo, GSPO eq. 5-7 (arXiv 2507.18071); cispo, MiniMax-M1 eq. 4-5
    (arXiv 2506.13585), with no lower bound, as it was used there. Weights: see `_weights`; the row mask: see
    `_off_policy_rows`; KL: see `_kl`.

    Arguments are those of `policy_loss`.

    `clipped` marks the tokens whose gradient the clip or the band stops (cispo: whose ratio is capped). `truncated` marks those
    whose weight met the cap or was set to 0, and those of rows that are masked.
    """
    zero = logprobs.new_zeros(())
    proximal, behaviour = proximal.detach(), behaviour.detach()
    off_policy = _log_ratio(proximal, behaviour, mask)
    advantage = advantages.unsqueeze(-1).expand_as(logprobs)
    penalty, kl = _kl(logprobs, reference, mask, settings)
    if settings.kl_estimator == "k1":
        advantage, penalty = advantage - penalty, zero  # k1 has the right gradient only as a part of the reward.

    log_ratio = _log_ratio(logprobs, behaviour if settings.correction == "none" else proximal, mask)
    if settings.objective == "gspo":
        lengths = mask.sum(dim=-1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio.sum(dim=-1, keepdim=True) / lengths).expand_as(log_ratio)
    ratio = log_ratio.exp()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    if settings.objective == "cispo":
        gain = ratio.detach().clamp(max=high) * advantage * torch.where(mask, logprobs, zero)
        stopped = ratio > high
    else:
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        stopped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    weight, truncated = _weights(off_policy, advantages.unsqueeze(-1), settings)
    gain = weight * gain
    drift = _log_ratio(logprobs.detach(), behaviour, mask)
    if settings.correction == "trust_region":
        moved = drift.exp()
        outside = ((advantage > 0) & (moved > settings.band_high)) | ((advantage < 0) & (moved < settings.band_low))
        gain = torch.where(outside, gain.detach(), gain)
        stopped = stopped | outside
    if settings.off_policy_mask is not None:
        dropped = _off_policy_rows(drift, advantages, mask, settings.off_policy_mask)
        gain = torch.where(dropped, zero, gain)
        truncated = truncated | dropped

    per_token = penalty - gain
    if settings.entropy_coefficient:
        per_token = per_token - settings.entropy_coefficient * entropy
    scale = row_scales(mask, size, settings, logprobs.dtype).unsqueeze(-1)
    loss = (scale * torch.where(mask, per_token, zero)).sum()
    return RatioLoss(loss, stopped & mask, truncated & mask, kl)


def dpo_loss(logprobs: Tensor, reference: Tensor, advantages: Tensor, mask: Tensor, *, size: BatchSize, beta: float) -> Tensor:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290, eq. 7), as a mean over the pairs of the batch.

        margin = beta * (sum over chosen of log(new / reference) - sum over rejected of log(new / reference))
        loss   = mean over pairs of -log sigmoid(margin)

    logprobs: (N, T) of `new`, with gradient; rows 0, 2, ... are chosen, and each one's rejected follows it. reference: (N, T),
    constant. advantages: (N,), 1 for a chosen row, -1 for a rejected, 0 for both where neither is better: such a pair counts 0,
    and counts as a pair. mask: (N, T) bool. size: rows of the whole batch, two per pair. Returns ().
    """
    score = _log_ratio(logprobs, reference.detach(), mask).sum(dim=-1)
    pairs = len(score) // 2  # A row alone is one of no batch, with nothing to train.
    chosen, rejected = score[: 2 * pairs : 2], score[1 : 2 * pairs : 2]
    losses = -torch.nn.functional.logsigmoid(beta * (chosen - rejected))
    return (losses * advantages[: 2 * pairs : 2]).sum() / max(1, size.rows // 2)


def row_scales(mask: Tensor, size: BatchSize, settings: Settings, dtype: torch.dtype = torch.float32) -> Tensor:
    """What each token of a row counts in the loss, so that the parts of a batch sum to its mean however it is cut.

        token_mean     1 / tokens of the batch                  every token alike (DAPO)
        sequence_mean  1 / (rows * the row's own tokens)        every row alike (GRPO)
        fixed_length   1 / (rows * fixed_length)                no row's length matters (Dr. GRPO, arXiv 2503.20783)

    mask: (N, T) bool. Returns (N,) of `dtype`. A row without unmasked tokens counts as a row.
    """
    lengths = mask.sum(dim=-1).to(dtype)
    if settings.normalization == "token_mean":
        return torch.full_like(lengths, 1 / max(1, size.tokens))
    if settings.normalization == "sequence_mean":
        return 1 / (lengths.clamp(min=1) * max(1, size.rows))
    return torch.full_like(lengths, 1 / (max(1, size.rows) * settings.fixed_length))


def _weights(off_policy: Tensor, advantage: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """The constant weight of each token, and where it is not q or the row's product of q: (N, T) or (N, 1) each.

    off_policy: (N, T) log q, 0 where masked. advantage: (N, 1).

    Sources: token_tis, Yao et al. 2025 ("Your Efficient RL Framework Secretly Brings You Off-Policy RL Training") after
    IMPALA's truncation (arXiv 1802.01561); icepop, the report of Ring-1T (arXiv 2510.18855), there for the engines' difference;
    tapered, TOPR (Le Roux et al., arXiv 2503.14286): what was good is learned from whoever did it, what was bad is
    unlearned only as far as the learner would still do it.
    """
    correction = settings.correction
    if correction in ("sequence_tis", "tapered"):
        off_policy = off_policy.sum(dim=-1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    importance = off_policy.exp()
    if correction == "none":
        return torch.ones_like(importance), torch.zeros_like(importance, dtype=torch.bool)
    if correction == "icepop":
        outside = (importance < settings.band_low) | (importance > settings.band_high)
        return torch.where(outside, torch.zeros_like(importance), importance), outside
    if correction == "tapered":
        capped = importance.clamp(max=1.0)
        return torch.where(advantage < 0, capped, torch.ones_like(capped)), (advantage < 0) & (importance > 1)
    return importance.clamp(max=settings.tis_cap), importance > settings.tis_cap


def _off_policy_rows(drift: Tensor, advantages: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Rows to leave out, (N, 1) bool: a negative advantage, and a mean of log(behaviour / new) above `threshold` nats.

    Off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556, section 3.1): to push away what the learner hardly does any
    more teaches it little and moves it much. drift: (N, T) log(new / behaviour), constant, 0 where masked.
    """
    distance = -drift.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)
    return ((advantages < 0) & (distance > threshold)).unsqueeze(-1)


def _kl(logprobs: Tensor, reference: Tensor | None, mask: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """kl_coefficient * KL(new || reference) per token, with gradient under k2 and k3, and the bare estimate: (N, T) each.

        d = log(new / reference)    k1 = d (constant)    k2 = d^2 / 2    k3 = exp(-d) - 1 + d

    Schulman 2020 ("Approximating KL Divergence"). k2's gradient is that of the KL on average where the learner drew the
    tokens itself, k3's only near d = 0 (GRPO's choice); k1 has it as a part of the reward: it is taken off the advantage.
    """
    zero = logprobs.new_zeros(())
    if reference is None:
        if settings.kl_coefficient:
            raise ValueError("kl_coefficient > 0 needs the reference's logprobs")
        return zero, zero
    distance = _log_ratio(logprobs, reference.detach(), mask)
    if settings.kl_estimator == "k1":
        estimate = distance.detach()
    elif settings.kl_estimator == "k2":
        estimate = distance.square() / 2
    else:
        estimate = torch.exp(-distance) - 1 + distance
    return settings.kl_coefficient * estimate, estimate.detach()


def _log_ratio(over: Tensor, under: Tensor, mask: Tensor) -> Tensor:
    """log(over / under), clamped, and 0 where masked: before exp, so that no padding can make inf * 0."""
    difference = torch.where(mask, over - under, over.new_zeros(()))
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
