"""Our losses and gradients are those of TRL, where it has the same objective.

Compared are `GRPOTrainer._compute_loss` and `DPOTrainer._compute_loss` of the pinned version themselves, on the same tensors:
called without a trainer, on a stand-in for what they read of one (settings, and a model whose output is our logprobs). TRL
divides by what it holds at once, so each batch is compared whole. It has no counterpart to `trust_region`, `tapered` and the
advantages' KL (k1). `token_tis`, `sequence_tis` and `icepop` are its importance weights called token_truncate,
sequence_truncate and token_mask; it makes them in the middle of a method that generates, so its loss is given weights made
after its documentation.
"""

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer

from consumers.objectives import BatchSize, Settings, policy_loss

BASE = Settings(clip_low=0.2, clip_high=0.28, tis_cap=1.8, band_low=0.6, band_high=1.7, fixed_length=9)


def example(rows: int = 6, positions: int = 7) -> dict[str, Tensor]:
    generator = np.random.default_rng(7)
    behaviour = -generator.exponential(1.5, (rows, positions))
    proximal = behaviour + generator.normal(0, 0.5, (rows, positions))
    lengths = generator.integers(1, positions + 1, rows)
    arrays = {
        "logprobs": proximal + generator.normal(0, 0.4, (rows, positions)),
        "proximal": proximal,
        "behaviour": behaviour,
        "reference": behaviour + generator.normal(0, 0.5, (rows, positions)),
        "advantages": generator.normal(0, 1, rows),
        "mask": np.arange(positions) < lengths[:, None],
        "entropy": generator.random((rows, positions)),
    }
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def accelerator() -> SimpleNamespace:
    """One process: every collective is the identity."""
    same = lambda value, **_: value  # noqa: E731
    return SimpleNamespace(num_processes=1, gather=same, gather_for_metrics=same, reduce=same, device=torch.device("cpu"))


def grpo_loss(v: dict[str, Tensor], *, weights: Tensor | None = None, old: str = "proximal", **settings: Any) -> Tensor:
    """TRL's loss of one batch. `settings` replace attributes of its trainer; `args` those of its arguments."""
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1} | settings.pop("args", {})
    trainer = SimpleNamespace(
        **{
            "loss_type": "dapo", "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28,
            "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0, "aux_loss_enabled": False,
            "max_completion_length": 9, "use_vllm": weights is not None,
            "vllm_importance_sampling_correction": weights is not None,
            "_entropy_bonus_enabled": False, "current_gradient_accumulation_steps": 1, "use_adaptive_entropy": False,
            "model": SimpleNamespace(training=True), "args": SimpleNamespace(**args), "accelerator": accelerator(),
            "_metrics": {"train": defaultdict(list)}, "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
            "_get_per_token_logps_and_entropies": lambda *_, **__: (v["logprobs"], v["entropy"], None),
        } | settings
    )  # fmt: skip
    rows = len(v["mask"])
    inputs = {
        "prompt_ids": torch.zeros(rows, 1), "prompt_mask": torch.ones(rows, 1),
        "completion_ids": torch.zeros(v["mask"].shape), "completion_mask": v["mask"].double(),
        "advantages": v["advantages"], "old_per_token_logps": v[old], "sampling_per_token_logps": v["behaviour"],
        "ref_per_token_logps": v["reference"], "num_items_in_batch": v["mask"].sum(),
    }  # fmt: skip
    if weights is not None:
        inputs["importance_sampling_ratio"] = weights
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def weights_of(v: dict[str, Tensor], mode: str) -> Tensor:
    """TRL's importance weights (its documentation of vllm_importance_sampling_mode), cap 1.8 and band 0.6..1.7."""
    ratio = torch.where(v["mask"], v["proximal"] - v["behaviour"], torch.zeros(()))
    if mode == "sequence_truncate":
        return ratio.sum(-1, keepdim=True).exp().clamp(max=1.8)
    q = ratio.exp()
    return q.clamp(max=1.8) if mode == "token_truncate" else q.masked_fill((q < 0.6) | (q > 1.7), 0.0)


# Our settings, and TRL's.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo": ({"correction": "none"}, {"old": "behaviour"}),
    "ppo, sequence mean": ({"correction": "none", "normalization": "sequence_mean"}, {"old": "behaviour", "loss_type": "grpo"}),
    "ppo, fixed length": (
        {"correction": "none", "normalization": "fixed_length"},
        {"old": "behaviour", "loss_type": "dr_grpo"},
    ),
    "ppo, token mean": ({"correction": "none"}, {"old": "behaviour", "loss_type": "bnpo"}),
    "k3": ({"correction": "none", "kl_coefficient": 0.1}, {"old": "behaviour", "beta": 0.1}),
    "masked rows": ({"correction": "none", "off_policy_mask": 0.05}, {"old": "behaviour", "off_policy_mask_threshold": 0.05}),
    "gspo": (
        {"objective": "gspo", "correction": "none", "normalization": "sequence_mean"},
        {"old": "behaviour", "importance_sampling_level": "sequence", "loss_type": "grpo"},
    ),
    "cispo": ({"objective": "cispo", "correction": "none"}, {"old": "behaviour", "loss_type": "cispo", "epsilon_high": 1.28}),
    "token_tis": ({"correction": "token_tis"}, {"weights": "token_truncate"}),
    "sequence_tis": ({"correction": "sequence_tis"}, {"weights": "sequence_truncate"}),
    "icepop": ({"correction": "icepop"}, {"weights": "token_mask"}),
}


@pytest.mark.parametrize("name", SAME)
def test_policy_losses_are_trls(name):
    ours, theirs = SAME[name]
    results = []
    for mine in (True, False):
        v = example()
        v["logprobs"].requires_grad_(True)
        if mine:
            size = BatchSize(len(v["mask"]), int(v["mask"].sum()))
            loss = policy_loss(**v, size=size, settings=dataclasses.replace(BASE, **ours)).loss
        else:
            changes = dict(theirs)
            if "weights" in changes:
                changes["weights"] = weights_of(v, changes["weights"])
            loss = grpo_loss(v, **changes)
        loss.backward()
        results.append((loss.item(), v["logprobs"].grad))
    (our_loss, our_gradient), (their_loss, their_gradient) = results
    assert our_loss == pytest.approx(their_loss, abs=1e-6)  # TRL keeps some weights in float32.
    torch.testing.assert_close(our_gradient, their_gradient, atol=1e-7, rtol=1e-6)
    assert our_gradient.abs().max() > 1e-3


def dpo_reference(v: dict[str, Tensor], beta: float) -> Tensor:
    """TRL's loss, whose batch has all chosen rows before all rejected ones, and whose logprobs are 0 where masked."""
    order = torch.cat([torch.arange(0, len(v["mask"]), 2), torch.arange(1, len(v["mask"]), 2)])

    def padded(name: str) -> Tensor:
        return torch.where(v["mask"], v[name], torch.zeros(()))[order]

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator(), beta=beta, ld_alpha=None, aux_loss_enabled=False,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=["sigmoid"], loss_weights=[1.0],
        use_weighting=False, _total_train_tokens=0, _tp_size=1, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    chosen, rejected = padded("reference").sum(-1).chunk(2)
    completion = torch.nn.functional.pad(v["mask"][order].long(), (1, 0))  # A prompt of one token.
    inputs = {
        "input_ids": completion, "attention_mask": torch.ones_like(completion), "completion_mask": completion,
        "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
    }  # fmt: skip
    output = SimpleNamespace(
        log_probs=padded("logprobs"), entropy=padded("entropy"), mean_logits=torch.zeros(v["mask"].shape), is_top1=v["mask"]
    )
    return DPOTrainer._compute_loss(trainer, lambda **_: output, inputs, return_outputs=False)


def test_the_preference_loss_is_trls():
    results = []
    for mine in (True, False):
        v = example()
        v["advantages"] = torch.tensor([1.0, -1.0] * 3, dtype=torch.float64)
        v["logprobs"].requires_grad_(True)
        settings = dataclasses.replace(BASE, objective="dpo", dpo_beta=0.3)
        loss = policy_loss(**v, size=BatchSize(6, 1), settings=settings).loss if mine else dpo_reference(v, 0.3)
        loss.backward()
        results.append((loss.item(), v["logprobs"].grad))
    (our_loss, our_gradient), (their_loss, their_gradient) = results
    assert our_loss == pytest.approx(their_loss, abs=1e-9)
    torch.testing.assert_close(our_gradient, their_gradient, atol=1e-9, rtol=1e-9)
    assert our_gradient.abs().max() > 1e-3
