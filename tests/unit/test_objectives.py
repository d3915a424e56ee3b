"""Policy losses against an independent float64 reference, hand-computed cases, and under any cut into micro-batches.

The reference is plain Python over tokens, written from the formulas of docs/objectives.md and the papers named there; that the
library TRL computes the same is tests/unit/test_objectives_trl.py.
"""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers import objectives
from consumers.objectives import LOG_RATIO_LIMIT, BatchSize, Settings, policy_loss, token_logprobs
from echo.config import LearnerConfig

OBJECTIVES = ("ppo", "cispo", "gspo")
CORRECTIONS = ("none", "token_tis", "sequence_tis", "icepop", "trust_region", "tapered")
NORMALIZATIONS = ("token_mean", "sequence_mean", "fixed_length")
BASE = Settings(clip_low=0.2, clip_high=0.28, tis_cap=1.8, band_low=0.6, band_high=1.7, fixed_length=11)
EVERYTHING = {"off_policy_mask": 0.1, "kl_coefficient": 0.05, "entropy_coefficient": 0.01}


def with_changes(**changes: Any) -> Settings:
    return dataclasses.replace(BASE, **changes)


def bound(value: float) -> float:
    return max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, value))


def row_reference(new, old, behaviour, ref, entropy, advantage, chosen, size, s, base):
    """One row's share of the loss and its counts. `base` holds the row's values at which constants are taken."""
    found = {"loss": 0.0, "clipped": 0, "truncated": 0}
    if not chosen:
        return found
    product = math.exp(bound(sum(bound(old[t] - behaviour[t]) for t in chosen)))
    far = sum(bound(behaviour[t] - base[t]) for t in chosen) / len(chosen)
    dropped = s.off_policy_mask is not None and advantage < 0 and far > s.off_policy_mask
    anchor = behaviour if s.correction == "none" else old
    logs = {t: bound(new[t] - anchor[t]) for t in chosen}
    base_logs = {t: bound(base[t] - anchor[t]) for t in chosen}
    if s.objective == "gspo":
        logs = dict.fromkeys(chosen, sum(logs.values()) / len(chosen))
        base_logs = dict.fromkeys(chosen, sum(base_logs.values()) / len(chosen))
    for t in chosen:
        q = math.exp(bound(old[t] - behaviour[t]))
        weight, cut = {
            "none": (1.0, False),
            "token_tis": (min(q, s.tis_cap), q > s.tis_cap),
            "trust_region": (min(q, s.tis_cap), q > s.tis_cap),
            "sequence_tis": (min(product, s.tis_cap), product > s.tis_cap),
            "icepop": (q, False) if s.band_low <= q <= s.band_high else (0.0, True),
            "tapered": (min(product, 1.0), product > 1) if advantage < 0 else (1.0, False),
        }[s.correction]
        d, base_d = bound(new[t] - ref[t]), bound(base[t] - ref[t])
        a = advantage - (s.kl_coefficient * base_d if s.kl_estimator == "k1" else 0.0)
        kl = {"k1": 0.0, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[s.kl_estimator]
        low, high = 1 - s.clip_low, 1 + s.clip_high

        def gain(log, at, a=a, low=low, high=high):
            ratio = math.exp(log)
            return min(ratio * a, max(low, min(high, ratio)) * a)

        ratio, moved = math.exp(base_logs[t]), math.exp(bound(base[t] - behaviour[t]))
        if s.objective == "cispo":
            value, stopped = min(ratio, high) * a * new[t], ratio > high
            frozen = min(ratio, high) * a * base[t]
        else:
            value, frozen = gain(logs[t], t), gain(base_logs[t], t)
            stopped = (a > 0 and ratio > high) or (a < 0 and ratio < low)
        if s.correction == "trust_region" and ((a > 0 and moved > s.band_high) or (a < 0 and moved < s.band_low)):
            value, stopped = frozen, True
        per_token = -(0.0 if dropped else weight * value) + s.kl_coefficient * kl - s.entropy_coefficient * entropy[t]
        share = {
            "token_mean": 1 / size.tokens,
            "sequence_mean": 1 / (size.rows * len(chosen)),
            "fixed_length": 1 / (size.rows * s.fixed_length),
        }[s.normalization]
        found["loss"] += share * per_token
        found["clipped"] += stopped
        found["truncated"] += cut or dropped
    return found


def reference_of(v: dict[str, np.ndarray], size: BatchSize, s: Settings, new: np.ndarray | None = None) -> dict[str, float]:
    """The whole batch's loss at logprobs `new`, with the constants taken at v["logprobs"]."""
    new = v["logprobs"] if new is None else new
    total: dict[str, float] = {"loss": 0.0, "clipped": 0, "truncated": 0}
    for i in range(len(new)):
        chosen = [int(t) for t in np.nonzero(v["mask"][i])[0]]
        columns = (new[i], v["proximal"][i], v["behaviour"][i], v["reference"][i], v["entropy"][i])
        found = row_reference(*columns, float(v["advantages"][i]), chosen, size, s, v["logprobs"][i])
        total = {key: total[key] + found[key] for key in total}
    return total


def example(seed: int, rows: int = 6, positions: int = 7) -> dict[str, torch.Tensor]:
    """Float64 inputs with a spread that makes clip, cap, band and mask act."""
    generator = np.random.default_rng(seed)
    behaviour = -generator.exponential(1.5, (rows, positions))
    proximal = behaviour + generator.normal(0, 0.7, (rows, positions))
    arrays = {
        "logprobs": proximal + generator.normal(0, 0.3, (rows, positions)),
        "proximal": proximal,
        "behaviour": behaviour,
        "reference": behaviour + generator.normal(0, 0.5, (rows, positions)),
        "advantages": generator.normal(0, 1, rows),
        "mask": generator.random((rows, positions)) < 0.7,
        "entropy": generator.random((rows, positions)),
    }
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def numpy_of(inputs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in inputs.items()}


def counts(inputs: dict[str, torch.Tensor]) -> BatchSize:
    return BatchSize(len(inputs["mask"]), int(inputs["mask"].sum()))


COMBINATIONS = [
    *({"objective": o, "correction": c} | EVERYTHING for o, c in itertools.product(OBJECTIVES, CORRECTIONS)),
    *({"normalization": n, "kl_estimator": k} | EVERYTHING for n, k in itertools.product(NORMALIZATIONS, ("k1", "k2", "k3"))),
    *({"objective": o, "correction": c} for o, c in itertools.product(OBJECTIVES, CORRECTIONS)),
]


@pytest.mark.parametrize("changes", COMBINATIONS, ids=lambda changes: "-".join(str(value) for value in changes.values()))
def test_loss_counts_and_gradient_equal_the_reference(changes):
    """The loss to 1e-12, its counts, and its gradient against finite differences of the reference, constants held."""
    s = with_changes(**changes)
    inputs, size = example(1), BatchSize(9, 51)  # Of a larger batch, of which this is a part.
    inputs["logprobs"].requires_grad_(True)
    found = policy_loss(**inputs, size=size, settings=s)
    found.loss.backward()
    v = numpy_of(inputs)
    expected = reference_of(v, size, s)
    assert found.loss.item() == pytest.approx(expected["loss"], abs=1e-12)
    assert (found.clipped.item(), found.truncated.item()) == (expected["clipped"], expected["truncated"])
    gradient = inputs["logprobs"].grad
    assert gradient is not None
    assert gradient.abs().max() > 1e-3
    for place in np.ndindex(*gradient.shape):
        up, down = v["logprobs"].copy(), v["logprobs"].copy()
        up[place] += 1e-6
        down[place] -= 1e-6
        slope = (reference_of(v, size, s, up)["loss"] - reference_of(v, size, s, down)["loss"]) / 2e-6
        assert gradient[place].item() == pytest.approx(slope, abs=1e-8), place


def test_the_example_makes_everything_act():
    """The case above would prove little if no token were clipped, capped, outside the band or in a masked row."""
    inputs = example(1)
    size = counts(inputs)
    for correction in CORRECTIONS:
        found = policy_loss(**inputs, size=size, settings=with_changes(correction=correction))
        assert found.clipped.item() > 0
        assert (found.truncated.item() > 0) == (correction != "none"), correction
    masked = policy_loss(**inputs, size=size, settings=with_changes(off_policy_mask=0.1))
    assert masked.truncated.item() > 0


def test_sums_by_numpy():
    """Entropy, mismatch, weights and KL are sums over unmasked tokens."""
    inputs = example(4)
    v, mask = numpy_of(inputs), inputs["mask"].numpy()
    found = policy_loss(**inputs, size=counts(inputs), settings=with_changes(kl_coefficient=0.1))
    q = np.exp(v["proximal"] - v["behaviour"])
    d = v["logprobs"] - v["reference"]
    assert found.entropy.item() == pytest.approx(v["entropy"][mask].sum(), abs=1e-12)
    assert found.weight.item() == pytest.approx(q[mask].sum(), abs=1e-12)
    assert found.weight_squared.item() == pytest.approx((q**2)[mask].sum(), abs=1e-12)
    assert found.reference_kl.item() == pytest.approx((np.exp(-d) - 1 + d)[mask].sum(), abs=1e-12)
    np.testing.assert_allclose(found.mismatch.numpy(), np.where(mask, q - 1 - np.log(q), 0).sum(-1), atol=1e-12)


def one(new: float, proximal: float, behaviour: float, advantage: float, **changes: Any) -> Any:
    """One token given as probabilities; returns (TokenLoss, gradient with respect to its logprob)."""
    logprob = torch.tensor([[math.log(new)]], dtype=torch.float64, requires_grad=True)
    reference = changes.pop("reference", None)
    found = policy_loss(
        logprob,
        proximal=torch.tensor([[math.log(proximal)]], dtype=torch.float64),
        behaviour=torch.tensor([[math.log(behaviour)]], dtype=torch.float64),
        reference=None if reference is None else torch.tensor([[math.log(reference)]], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        mask=torch.tensor([[True]]),
        entropy=torch.zeros(1, 1, dtype=torch.float64),
        size=BatchSize(1, 1),
        settings=with_changes(**changes),
    )
    found.loss.backward()
    assert logprob.grad is not None
    return found, logprob.grad.item()


# new, proximal, behaviour, A, settings -> loss, gradient, clipped, truncated. Worked out by hand; unit cap 1.8, clip 0.8..1.28,
# band 0.6..1.7.
BY_HAND: dict[str, tuple[tuple[float, float, float, float], dict[str, Any], tuple[float, float, int, int]]] = {
    "tis weighs what the learner likes more than its sampler, and does not clip": (
        (0.3, 0.3, 0.2, 2.0), {"correction": "token_tis"}, (-3.0, -3.0, 0, 0)),
    "tis: 5 counts as the cap": ((0.5, 0.5, 0.1, 1.0), {"correction": "token_tis"}, (-1.8, -1.8, 0, 1)),
    "none clips what tis trains": ((0.3, 0.3, 0.2, 2.0), {"correction": "none"}, (-2.56, 0.0, 1, 0)),
    "a negative advantage is stopped below": ((0.14, 0.2, 0.2, -1.0), {"correction": "none"}, (0.8, 0.0, 1, 0)),
    "and not above": ((0.3, 0.2, 0.2, -1.0), {"correction": "none"}, (1.5, 1.5, 0, 0)),
    "clip-higher: 1.25 is above 1.2 and below 1.28": ((0.25, 0.2, 0.2, 1.0), {"correction": "none"}, (-1.25, -1.25, 0, 0)),
    "sequence tis of one token is token tis": ((0.5, 0.5, 0.1, 1.0), {"correction": "sequence_tis"}, (-1.8, -1.8, 0, 1)),
    "icepop inside its band": ((0.3, 0.3, 0.2, 2.0), {"correction": "icepop"}, (-3.0, -3.0, 0, 0)),
    "icepop above it": ((0.4, 0.4, 0.2, 2.0), {"correction": "icepop"}, (0.0, 0.0, 0, 1)),
    "icepop below it": ((0.1, 0.1, 0.2, 2.0), {"correction": "icepop"}, (0.0, 0.0, 0, 1)),
    "trust region: inside the band it is tis": ((0.3, 0.3, 0.2, 2.0), {"correction": "trust_region"}, (-3.0, -3.0, 0, 0)),
    "trust region: enough was gained": ((0.35, 0.35, 0.2, 1.0), {"correction": "trust_region"}, (-1.75, 0.0, 1, 0)),
    "trust region: enough was lost": ((0.1, 0.1, 0.2, -1.0), {"correction": "trust_region"}, (0.5, 0.0, 1, 0)),
    "trust region: the way back stays open": ((0.1, 0.1, 0.2, 1.0), {"correction": "trust_region"}, (-0.5, -0.5, 0, 0)),
    "tapered: the good counts in full": ((0.01, 0.01, 0.2, 1.0), {"correction": "tapered"}, (-1.0, -1.0, 0, 0)),
    "tapered: the bad as far as it is still done": ((0.1, 0.1, 0.2, -1.0), {"correction": "tapered"}, (0.5, 0.5, 0, 0)),
    "tapered: and never more than once": ((0.4, 0.4, 0.2, -1.0), {"correction": "tapered"}, (1.0, 1.0, 0, 1)),
    "cispo: 2 counts as 1.28, and still has a gradient": (
        (0.4, 0.4, 0.2, 1.0), {"objective": "cispo", "correction": "none"}, (-1.28 * math.log(0.4), -1.28, 1, 0)),
    "off-policy mask: ln 2 > 0.5": ((0.1, 0.1, 0.2, -1.0), {"off_policy_mask": 0.5}, (0.0, 0.0, 1, 1)),
    "off-policy mask: ln 2 < 0.7": (
        (0.1, 0.1, 0.2, -1.0), {"off_policy_mask": 0.7, "clip_low": 0.6}, (0.5, 0.5, 0, 0)),
    "off-policy mask: the good stays": ((0.1, 0.1, 0.2, 1.0), {"off_policy_mask": 0.5}, (-0.5, -0.5, 0, 0)),
    "k1 comes off the advantage: 1 - 0.1 ln 2": (
        (0.2, 0.2, 0.2, 1.0), {"kl_coefficient": 0.1, "kl_estimator": "k1", "reference": 0.1},
        (-(1 - 0.1 * math.log(2)), -(1 - 0.1 * math.log(2)), 0, 0)),
    "k2: 0.1 * ln(2)^2 / 2": (
        (0.2, 0.2, 0.2, 0.0), {"kl_coefficient": 0.1, "kl_estimator": "k2", "reference": 0.1},
        (0.05 * math.log(2) ** 2, 0.1 * math.log(2), 0, 0)),
    "k3: 0.1 * (1/2 - 1 + ln 2)": (
        (0.2, 0.2, 0.2, 0.0), {"kl_coefficient": 0.1, "kl_estimator": "k3", "reference": 0.1},
        (0.1 * (math.log(2) - 0.5), 0.05, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_one_token_by_hand(name):
    probabilities, changes, (loss, slope, clipped, truncated) = BY_HAND[name]
    found, gradient = one(*probabilities, **changes)
    assert found.loss.item() == pytest.approx(loss, abs=1e-12)
    assert gradient == pytest.approx(slope, abs=1e-12)
    assert (found.clipped.item(), found.truncated.item()) == (clipped, truncated)


def two_tokens(mask: tuple[bool, bool], **changes: Any) -> torch.Tensor:
    """A row of ratios 3/2 and 1/2 (new = proximal), and one of ratio 1 with one token. Gradients of the loss, A = 1."""
    logprobs = torch.tensor([[0.3, 0.1], [0.5, 0.5]], dtype=torch.float64).log().requires_grad_(True)
    rows = {"mask": torch.tensor([mask, (True, False)]), "advantages": torch.ones(2, dtype=torch.float64)}
    policy_loss(
        logprobs,
        proximal=logprobs.detach(),
        behaviour=torch.tensor([[0.2, 0.2], [0.5, 0.5]], dtype=torch.float64).log(),
        entropy=torch.zeros(2, 2, dtype=torch.float64),
        size=BatchSize(2, int(rows["mask"].sum())),
        settings=with_changes(**changes),
        **rows,
    ).loss.backward()
    assert logprobs.grad is not None
    return -logprobs.grad


def test_a_completion_weighs_as_one_under_sequence_tis_and_gspo():
    """The product of 3/2 and 1/2 is 3/4, GSPO's mean is sqrt(3/4); both tokens get it. A masked token is no part of it."""
    token = two_tokens((True, True), correction="token_tis")
    assert token.tolist() == [pytest.approx([1.5 / 3, 0.5 / 3]), pytest.approx([1 / 3, 0])]
    sequence = two_tokens((True, True), correction="sequence_tis")
    assert sequence.tolist() == [pytest.approx([0.75 / 3, 0.75 / 3]), pytest.approx([1 / 3, 0])]
    gspo = two_tokens((True, True), objective="gspo", correction="none")
    assert gspo.tolist() == [pytest.approx([math.sqrt(0.75) / 3] * 2), pytest.approx([1 / 3, 0])]
    assert two_tokens((False, True), correction="sequence_tis").tolist() == [pytest.approx([0, 0.25]), pytest.approx([0.5, 0])]


def test_a_completions_log_ratio_is_clamped_as_a_whole():
    """Two tokens of log-ratio -15 each weigh e^-20 together, not e^-30."""
    logprobs = torch.full((1, 2), -16.0, dtype=torch.float64, requires_grad=True)
    policy_loss(
        logprobs,
        proximal=logprobs.detach(),
        behaviour=torch.full((1, 2), -1.0, dtype=torch.float64),
        advantages=torch.ones(1, dtype=torch.float64),
        mask=torch.tensor([[True, True]]),
        entropy=torch.zeros(1, 2, dtype=torch.float64),
        size=BatchSize(1, 2),
        settings=with_changes(correction="sequence_tis"),
    ).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [pytest.approx([-math.exp(-LOG_RATIO_LIMIT) / 2] * 2, rel=1e-12)]


def test_normalisation_by_hand():
    """Two tokens and one token: each token 1/3; each row 1/2, so 1/4 and 1/2; or 1/(2 * 11) whatever the length."""
    for normalization, (long, short) in {
        "token_mean": (1 / 3, 1 / 3),
        "sequence_mean": (1 / 4, 1 / 2),
        "fixed_length": (1 / 22, 1 / 22),
    }.items():
        found = two_tokens((True, True), correction="token_tis", normalization=normalization)
        assert found.tolist() == [pytest.approx([1.5 * long, 0.5 * long]), pytest.approx([short, 0])], normalization


def test_a_kl_needs_a_reference():
    with pytest.raises(ValueError, match="reference"):
        one(0.2, 0.2, 0.2, 1.0, kl_coefficient=0.1)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("behaviour", [math.exp(-300), 1.0])
def test_an_exploding_ratio_stays_finite(objective, correction, advantage, behaviour):
    """A token that its sampler gave e^-300, or that the learner gives e^-300, has a finite loss, gradient and mismatch."""
    new = 0.5 if behaviour < 0.1 else math.exp(-300)
    changes = {"objective": objective, "correction": correction, "kl_coefficient": 0.1, "reference": behaviour}
    found, gradient = one(new, new, behaviour, advantage, **changes)
    assert math.isfinite(gradient)
    assert all(bool(value.isfinite().all()) for value in found)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_masked_positions_count_for_nothing_whatever_they_hold(objective, correction):
    """Infinity and NaN under a False mask change neither loss nor gradient; NaN under a True mask reaches the loss."""
    inputs = example(3)
    s = with_changes(objective=objective, correction=correction, **EVERYTHING)
    garbage = {name: value.clone() for name, value in inputs.items()}
    for name, value in {
        "logprobs": -math.inf, "behaviour": math.nan, "proximal": math.inf, "reference": math.nan, "entropy": math.nan
    }.items():  # fmt: skip
        garbage[name][~inputs["mask"]] = value
    results = []
    for values in (inputs, garbage):
        values["logprobs"].requires_grad_(True)
        found = policy_loss(**values, size=counts(inputs), settings=s)
        found.loss.backward()
        results.append((found, values["logprobs"].grad))
    (clean, clean_gradient), (dirty, dirty_gradient) = results
    assert torch.equal(clean_gradient, dirty_gradient)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a.detach(), b.detach())
    row = int(np.nonzero(inputs["mask"].numpy().sum(-1) * (inputs["advantages"].numpy() > 0))[0][0])
    column = int(np.nonzero(inputs["mask"][row].numpy())[0][0])
    for name in ("logprobs", "behaviour"):
        spoilt = {key: value.detach().clone() for key, value in inputs.items()}
        spoilt[name][row, column] = math.nan
        known = correction == "tapered" and name == "behaviour"  # What was good counts in full, whoever drew it.
        assert math.isnan(policy_loss(**spoilt, size=counts(inputs), settings=s).loss.item()) != known, name


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 2**31),
    objective=st.sampled_from(OBJECTIVES),
    correction=st.sampled_from(CORRECTIONS),
    normalization=st.sampled_from(NORMALIZATIONS),
)
def test_any_cut_into_parts_gives_the_same_gradient(data, seed, objective, correction, normalization):
    """Losses, gradients and sums of parts add up to those of the whole, however its rows are dealt out."""
    rows = data.draw(st.integers(1, 8))
    owner = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    inputs = example(seed, rows=rows)
    size = counts(inputs)
    s = with_changes(objective=objective, correction=correction, normalization=normalization, **EVERYTHING)

    def run(selection: torch.Tensor) -> Any:
        part = {name: value[selection].clone() for name, value in inputs.items()}
        part["logprobs"].requires_grad_(True)
        found = policy_loss(**part, size=size, settings=s)
        found.loss.backward()
        return found, part["logprobs"].grad

    whole, gradient = run(torch.arange(rows))
    sums = dict.fromkeys(("loss", "clipped", "truncated", "weight", "reference_kl"), 0.0)
    for part in set(owner):
        selection = torch.tensor([index for index in range(rows) if owner[index] == part])
        found, part_gradient = run(selection)
        sums = {name: total + getattr(found, name).item() for name, total in sums.items()}
        torch.testing.assert_close(part_gradient, gradient[selection], atol=1e-15, rtol=1e-12)
    for name, total in sums.items():
        assert total == pytest.approx(getattr(whole, name).item(), abs=1e-10), name


def test_a_batch_without_trainable_tokens_has_loss_zero():
    inputs = example(2)
    inputs["mask"][:] = False
    for normalization in NORMALIZATIONS:
        s = with_changes(normalization=normalization)
        assert policy_loss(**inputs, size=BatchSize(6, 0), settings=s).loss.item() == 0


def test_settings_are_the_run_files():
    """Every key of Settings is LearnerConfig's of that name, and none keeps a value of its own."""
    config = LearnerConfig(
        objective="gspo", correction="icepop", normalization="fixed_length", clip_low=0.1, clip_high=0.3, tis_cap=3.0,
        band_low=0.4, band_high=5.0, off_policy_mask=0.2, kl_coefficient=0.5, kl_estimator="k2", entropy_coefficient=0.25,
        dpo_beta=0.7,
    )  # fmt: skip
    found = dataclasses.asdict(Settings.of(config, fixed_length=77))
    assert found.pop("fixed_length") == 77
    assert found == {key: getattr(config, key) for key in found}
    default = LearnerConfig()
    assert all(value != getattr(default, key) for key, value in found.items())


@pytest.mark.parametrize("pieces", [False, True], ids=["at once", "in pieces"])
def test_logprobs_and_entropy_are_of_the_tempered_softmax(pieces, monkeypatch):
    """Against numpy in float64, with another temperature per row; logits in pieces change no bit, nor do gradients."""
    generator = torch.Generator().manual_seed(5)
    logits = (4 * torch.randn(3, 5, 11, generator=generator)).requires_grad_(True)
    targets = torch.randint(11, (3, 5), generator=generator)
    temperature = torch.tensor([1.0, 0.5, 1.7])

    def run() -> tuple[torch.Tensor, ...]:
        logits.grad = None
        logprobs, entropy = token_logprobs(logits, targets, temperature, entropy_gradient=True)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        return logprobs.detach(), entropy.detach(), logits.grad.clone()

    at_once = run()
    if pieces:
        monkeypatch.setattr(objectives, "LOGITS_PER_PIECE", 4 * 11)
    logprobs, entropy, gradient = run()
    scaled = logits.detach().double().numpy() / temperature.double().numpy()[:, None, None]
    exact = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs.numpy(), np.take_along_axis(exact, targets.numpy()[..., None], -1)[..., 0], atol=2e-6)
    np.testing.assert_allclose(entropy.numpy(), -(np.exp(exact) * exact).sum(-1), atol=2e-6)
    for a, b in zip(at_once, (logprobs, entropy, gradient), strict=True):
        assert torch.equal(a, b)


def test_a_token_of_probability_zero_leaves_the_entropy_finite():
    logits = torch.tensor([[[0.0, 0.0, -math.inf]]])
    _, entropy = token_logprobs(logits, torch.tensor([[0]]), torch.ones(1))
    assert entropy.item() == pytest.approx(math.log(2))
