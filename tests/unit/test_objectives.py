"""Objectives against an independent float64 reference, hand-computed cases, and under any cut into micro-batches."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers import objectives
from consumers.objectives import LOG_RATIO_LIMIT, grpo_advantages, token_logprobs, token_loss

CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "tis_cap": 2.0}


def reference(new, proximal, behaviour, advantages, mask, *, denominator, correction, entropy, coefficient):
    """The formula of `token_loss`, token by token, in plain Python floats."""
    found = {"loss": 0.0, "clipped": 0, "truncated": 0, "entropy": 0.0}
    mismatch = [0.0] * len(new)
    for i, j in zip(*np.nonzero(mask), strict=True):
        bound = lambda x: max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, x))  # noqa: E731
        advantage = float(advantages[i])
        off = bound(float(proximal[i, j]) - float(behaviour[i, j]))
        if correction == "token_tis":
            ratio, weight = math.exp(bound(float(new[i, j]) - float(proximal[i, j]))), min(math.exp(off), CLIP["tis_cap"])
            found["truncated"] += math.exp(off) > CLIP["tis_cap"]
        else:
            ratio, weight = math.exp(bound(float(new[i, j]) - float(behaviour[i, j]))), 1.0
        low, high = 1 - CLIP["clip_low"], 1 + CLIP["clip_high"]
        found["loss"] -= weight * min(ratio * advantage, min(max(ratio, low), high) * advantage)
        found["loss"] -= coefficient * float(entropy[i, j])
        found["clipped"] += (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
        found["entropy"] += float(entropy[i, j])
        mismatch[i] += math.exp(off) - 1 - off
    found["loss"] /= denominator
    return found, mismatch


def example(seed: int, rows: int = 5, positions: int = 7) -> dict[str, torch.Tensor]:
    """Float64 inputs with a spread that makes clip and cap act."""
    generator = np.random.default_rng(seed)
    behaviour = -generator.exponential(1.5, (rows, positions))
    proximal = behaviour + generator.normal(0, 0.7, (rows, positions))
    return {
        "logprobs": torch.from_numpy(proximal + generator.normal(0, 0.3, (rows, positions))),
        "proximal": torch.from_numpy(proximal),
        "behaviour": torch.from_numpy(behaviour),
        "advantages": torch.from_numpy(generator.normal(0, 1, rows)),
        "mask": torch.from_numpy(generator.random((rows, positions)) < 0.7),
        "entropy": torch.from_numpy(generator.random((rows, positions))),
    }


@pytest.mark.parametrize("correction", ["token_tis", "none"])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_statistics_equal_the_reference(correction, seed):
    """Loss, shares, entropy and mismatch are those of the written formula, in float64 to 1e-12."""
    inputs = example(seed)
    found = token_loss(**inputs, denominator=23.0, correction=correction, entropy_coefficient=0.01, **CLIP)
    values = {name: value.numpy() for name, value in inputs.items()}
    expected, mismatch = reference(
        values["logprobs"],
        values["proximal"],
        values["behaviour"],
        values["advantages"],
        values["mask"],
        denominator=23.0,
        correction=correction,
        entropy=values["entropy"],
        coefficient=0.01,
    )
    assert found.loss.item() == pytest.approx(expected["loss"], abs=1e-12)
    assert found.entropy.item() == pytest.approx(expected["entropy"], abs=1e-12)
    assert (found.clipped.item(), found.truncated.item()) == (expected["clipped"], expected["truncated"])
    assert expected["clipped"] > 0
    assert (expected["truncated"] > 0) == (correction == "token_tis")
    np.testing.assert_allclose(found.mismatch.numpy(), mismatch, atol=1e-12)


@pytest.mark.parametrize("correction", ["token_tis", "none"])
def test_gradient_equals_finite_differences_of_the_reference(correction):
    """What autograd gives is the slope of the reference, with the weight held constant."""
    inputs = example(11, rows=2, positions=4)
    inputs["logprobs"].requires_grad_(True)
    token_loss(**inputs, denominator=5.0, correction=correction, **CLIP).loss.backward()
    values = {name: value.detach().numpy().copy() for name, value in inputs.items()}

    def at(new: np.ndarray) -> float:
        arguments = (values["proximal"], values["behaviour"], values["advantages"], values["mask"])
        extra = {"denominator": 5.0, "correction": correction, "entropy": values["entropy"], "coefficient": 0.0}
        return reference(new, *arguments, **extra)[0]["loss"]

    slope = np.zeros_like(values["logprobs"])
    for place in np.ndindex(slope.shape):
        up, down = values["logprobs"].copy(), values["logprobs"].copy()
        up[place] += 1e-6
        down[place] -= 1e-6
        slope[place] = (at(up) - at(down)) / 2e-6
    assert np.abs(slope).max() > 0.01
    np.testing.assert_allclose(inputs["logprobs"].grad.numpy(), slope, atol=1e-8)


def one(new: float, proximal: float, behaviour: float, advantage: float, correction: Any, **changes: Any) -> Any:
    """One token given as probabilities; returns (TokenLoss, gradient with respect to its logprob)."""
    logprob = torch.tensor([[math.log(new)]], dtype=torch.float64, requires_grad=True)
    found = token_loss(
        logprob,
        torch.tensor([[math.log(proximal)]], dtype=torch.float64),
        torch.tensor([[math.log(behaviour)]], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([[True]]),
        correction=correction,
        entropy=torch.zeros(1, 1, dtype=torch.float64),
        **(CLIP | {"denominator": 1.0} | changes),
    )
    found.loss.backward()
    return found, logprob.grad.item()


def test_tis_weighs_a_token_that_the_learner_likes_more_than_its_sampler():
    """new = proximal = 0.3, behaviour 0.2: weight 1.5, so loss -1.5 A and gradient -1.5 A; no clip although 1.5 > 1.28."""
    found, gradient = one(0.3, 0.3, 0.2, 2.0, "token_tis")
    assert (found.loss.item(), gradient) == (pytest.approx(-3.0), pytest.approx(-3.0))
    assert (found.clipped.item(), found.truncated.item()) == (0, 0)


def test_tis_cap_truncates():
    """proximal / behaviour = 5 counts as 2."""
    found, gradient = one(0.5, 0.5, 0.1, 1.0, "token_tis")
    assert (found.loss.item(), gradient) == (pytest.approx(-2.0), pytest.approx(-2.0))
    assert found.truncated.item() == 1


def test_plain_clip_stops_what_tis_would_train():
    """Under `none` the same token (ratio 1.5 > 1.28, A > 0) is clipped: loss -1.28 A, no gradient."""
    found, gradient = one(0.3, 0.3, 0.2, 2.0, "none")
    assert (found.loss.item(), gradient) == (pytest.approx(-2.56), 0.0)
    assert found.clipped.item() == 1


def test_bounds_are_asymmetric_and_one_sided():
    """A < 0: a ratio below 1 - 0.2 is stopped, a ratio above 1 + 0.28 is not (the pessimistic side stays open)."""
    below, no_gradient = one(0.14, 0.2, 0.2, -1.0, "none")
    assert (below.loss.item(), no_gradient, below.clipped.item()) == (pytest.approx(0.8), 0.0, 1)
    above, gradient = one(0.3, 0.2, 0.2, -1.0, "none")
    assert (above.loss.item(), gradient, above.clipped.item()) == (pytest.approx(1.5), pytest.approx(1.5), 0)
    inside, _ = one(0.25, 0.2, 0.2, 1.0, "none")  # 1.25: above 1 + 0.2, below 1 + 0.28.
    assert (inside.loss.item(), inside.clipped.item()) == (pytest.approx(-1.25), 0)


def test_k3_by_hand():
    """proximal / behaviour = 1.5: k3 = 0.5 - ln 1.5."""
    found, _ = one(0.3, 0.3, 0.2, 1.0, "token_tis")
    assert found.mismatch.tolist() == [pytest.approx(0.5 - math.log(1.5))]


def test_an_exploding_ratio_stays_finite():
    """A token that its sampler gave e^-300 has a finite loss, gradient and mismatch under both corrections."""
    for correction in ("token_tis", "none"):
        found, gradient = one(0.5, 0.5, math.exp(-300), -1.0, correction)
        assert math.isfinite(found.loss.item())
        assert math.isfinite(gradient)
        assert math.isfinite(found.mismatch.item())


def test_masked_positions_count_for_nothing_whatever_they_hold():
    """Infinity and NaN under a False mask change neither loss nor gradient; NaN under a True mask reaches the loss."""
    inputs = example(3)
    garbage = {name: value.clone() for name, value in inputs.items()}
    for name, value in (("logprobs", -math.inf), ("behaviour", math.nan), ("proximal", math.inf), ("entropy", math.nan)):
        garbage[name][~inputs["mask"]] = value
    results = []
    for values in (inputs, garbage):
        values["logprobs"].requires_grad_(True)
        found = token_loss(**values, denominator=9.0, correction="token_tis", entropy_coefficient=0.1, **CLIP)
        found.loss.backward()
        results.append((found, values["logprobs"].grad))
    (clean, clean_gradient), (dirty, dirty_gradient) = results
    assert torch.equal(clean_gradient, dirty_gradient)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a.detach(), b.detach())
    row, column = np.argwhere(inputs["mask"].numpy())[0]
    spoilt = {name: value.detach().clone() for name, value in inputs.items()}
    spoilt["logprobs"][row, column] = math.nan
    assert math.isnan(token_loss(**spoilt, denominator=9.0, correction="token_tis", **CLIP).loss.item())


@settings(max_examples=50, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31), correction=st.sampled_from(["token_tis", "none"]))
def test_any_cut_into_parts_gives_the_same_gradient(data, seed, correction):
    """Losses, gradients and sums of parts add up to those of the whole, however its rows are dealt out."""
    rows = data.draw(st.integers(1, 8))
    owner = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    inputs = example(seed, rows=rows)
    denominator = max(1, int(inputs["mask"].sum()))

    def run(selection: torch.Tensor) -> Any:
        part = {name: value[selection].clone() for name, value in inputs.items()}
        part["logprobs"].requires_grad_(True)
        found = token_loss(**part, denominator=denominator, correction=correction, entropy_coefficient=0.01, **CLIP)
        found.loss.backward()
        return found, part["logprobs"].grad

    whole, gradient = run(torch.arange(rows))
    loss, clipped = 0.0, 0
    for part in set(owner):
        selection = torch.tensor([index for index in range(rows) if owner[index] == part])
        found, part_gradient = run(selection)
        loss += found.loss.item()
        clipped += found.clipped.item()
        torch.testing.assert_close(part_gradient, gradient[selection], atol=1e-15, rtol=1e-12)
    assert loss == pytest.approx(whole.loss.item(), abs=1e-12)
    assert clipped == whole.clipped.item()


def test_advantages_by_hand():
    """Rewards 1, 0, 0, 1: mean 0.5, sample std 0.57735."""
    found = grpo_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64))
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert found.tolist() == pytest.approx([expected, -expected, -expected, expected], abs=1e-12)


def test_equal_rewards_and_single_members_have_no_advantage():
    assert grpo_advantages(torch.tensor([0.1] * 8, dtype=torch.float64)).abs().max() < 1e-9
    assert grpo_advantages(torch.tensor([3.0])).tolist() == [0.0]


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
