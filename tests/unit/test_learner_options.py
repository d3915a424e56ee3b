"""Schedules, recomputed layers, adapters, the reference policy and the numbers that a step tells, on a tiny model."""

import copy
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from transformers import Qwen3ForCausalLM

from consumers import batching
from consumers.groups import mask_older
from consumers.learner import Learner
from echo.config import RunConfig
from echo.errors import CheckpointError, ConfigError
from tests.helpers import make_group
from tests.unit.test_learner import (
    assert_same,
    gradients,
    make_batch,
    make_run,
    model_path,
    weights,
)

__all__ = ["model_path"]

pytestmark = pytest.mark.usefixtures("own_process")


def published(learner: Learner) -> dict[str, torch.Tensor]:
    return {t.name: torch.frombuffer(bytearray(t.data), dtype=torch.float32).reshape(t.shape) for t in learner.host_tensors()}


def steps(learner: Learner, *seeds: int) -> list[Any]:
    return [learner.step(make_batch(seed), newest_version=7) for seed in seeds]


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [0, 0.5, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0, 0.5, 1, *((1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3))]),
    ],
)
def test_the_learning_rate_follows_its_schedule_also_across_a_checkpoint(
    model_path: str, schedule: str, factors: list[float]
) -> None:
    """Two steps of warm-up, then what the name says, to the last of six steps. A step that is left out counts, too."""
    run = make_run(model_path, lr=0.01, steps=6, schedule=schedule, warmup_steps=2)
    learner = Learner(run)
    told = [stats.learning_rate for stats in steps(learner, 1, 2)]
    told.append(learner.step([make_group(2, loss_mask=np.zeros(4, np.bool_))], newest_version=0).learning_rate)
    later = Learner(run)
    later.load_state(*copy.deepcopy(learner.state()))
    told += [stats.learning_rate for stats in steps(later, 3, 4, 5)]
    assert told == pytest.approx([0.01 * factor for factor in factors])


def test_a_step_at_learning_rate_zero_moves_nothing(model_path: str) -> None:
    """What is told is what the optimiser had."""
    learner = Learner(make_run(model_path, warmup_steps=1))
    before = {name: p.clone() for name, p in learner._parameters.items()}
    steps(learner, 1)
    assert_same(before, {name: p.detach() for name, p in learner._parameters.items()})
    steps(learner, 2)
    assert any(not torch.equal(before[name], p) for name, p in learner._parameters.items())


def test_recomputed_layers_give_the_same_gradient_and_dropout_stays_off(model_path: str) -> None:
    """Layers are computed twice; the model asks for dropout of 0.5, which would show at once."""
    counts = []
    found = []
    for recompute in (False, True):
        learner = Learner(make_run(model_path, gradient_checkpointing=recompute))
        calls: list[int] = []
        for layer in learner._module.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        found.append(gradients(learner, make_batch(1)))
        counts.append(len(calls))
    assert counts[1] == 2 * counts[0]
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-6, rtol=0, msg=name)


def test_adapters_begin_as_the_base_and_are_all_that_is_trained(model_path: str) -> None:
    learner = Learner(make_run(model_path, lora={"rank": 2}))
    base = Qwen3ForCausalLM.from_pretrained(model_path).state_dict()
    first = published(learner)
    assert {name: value for name, value in base.items() if name != "lm_head.weight"}.keys() == first.keys()
    assert all(torch.equal(first[name], base[name]) for name in first)
    assert learner._parameters
    assert all(".lora_" in name for name in learner._parameters)
    steps(learner, 1, 2)
    later = published(learner)
    changed = {name for name in first if not torch.equal(first[name], later[name])}
    assert changed == {name for name in first if "proj" in name}
    frozen = learner._module.get_base_model().state_dict()
    for name, value in base.items():
        if "proj" in name:
            assert torch.equal(frozen[name.replace(".weight", ".base_layer.weight")], value)


# What peft itself asks transformers by an older name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_is_published_computes_what_was_trained_and_adapters_load_into_peft(model_path: str) -> None:
    """Merged weights in a plain model, and the adapters' own tensors in peft's, both give the learner's logits."""
    learner = Learner(make_run(model_path, lora={"rank": 2, "alpha": 7, "target_modules": ["q_proj", "down_proj"]}))
    steps(learner, 1, 2, 3)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad():
        wanted = learner._module(input_ids=ids).logits
        plain = Qwen3ForCausalLM.from_pretrained(model_path).eval()
        base = plain(input_ids=ids).logits
        plain.load_state_dict(published(learner), strict=False)
        torch.testing.assert_close(plain(input_ids=ids).logits, wanted, atol=1e-5, rtol=0)
        settings = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=7, target_modules=["q_proj", "down_proj"])
        theirs = get_peft_model(Qwen3ForCausalLM.from_pretrained(model_path), settings).eval()
        adapters = {
            t.name: torch.frombuffer(bytearray(t.data), dtype=torch.float32).reshape(t.shape) for t in learner.adapter_tensors()
        }
        assert len(adapters) == 2 * 2 * 2
        assert not set_peft_model_state_dict(theirs, adapters).unexpected_keys
        torch.testing.assert_close(theirs(input_ids=ids).logits, wanted, atol=1e-6, rtol=0)
    assert (wanted - base).abs().max() > 1e-3


def test_without_adapters_there_are_no_adapter_tensors(model_path: str) -> None:
    assert list(Learner(make_run(model_path)).adapter_tensors()) == []


def test_a_checkpoint_of_adapters_is_exact_and_holds_them_alone(model_path: str) -> None:
    run = make_run(model_path, lora={"rank": 2})
    straight, first = Learner(run), Learner(run)
    steps(straight, 1, 2, 3)
    steps(first, 1, 2)
    tensors, meta = copy.deepcopy(first.state())
    assert not any("base_layer" in name or "embed" in name for name in tensors)
    second = Learner(make_run(model_path, lora={"rank": 2}, seed=9))
    second.load_state(tensors, meta)
    steps(second, 3)
    assert_same(weights(straight), weights(second))


def test_adapters_refuse_another_base(model_path: str, tmp_path: Path) -> None:
    """Same names and shapes, other numbers: only the digest can tell."""
    other = Qwen3ForCausalLM.from_pretrained(model_path)
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    other.save_pretrained(tmp_path / "tiny")
    state = Learner(make_run(model_path, lora={"rank": 2})).state()
    with pytest.raises(CheckpointError, match=r"of another base than model\.path"):
        Learner(make_run(str(tmp_path / "tiny"), lora={"rank": 2})).load_state(*state)


@pytest.mark.parametrize("modules", [["no_such_layer"], ["embed_tokens"], ["lm_head"]])
def test_layers_that_can_not_have_an_adapter_are_named(model_path: str, modules: list[str]) -> None:
    """A layer that is not there, an embedding, and an output layer that is tied to it."""
    with pytest.raises(ConfigError, match=rf"learner\.lora\.target_modules: .*{modules[0]}"):
        Learner(make_run(model_path, lora={"rank": 2, "target_modules": modules}))


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_reference_is_the_initial_policy_and_stays_it(model_path: str, lora: dict[str, Any] | None) -> None:
    """KL is 0 before the first update, grows with the policy's way, and after a resume is measured from version 0."""
    run = make_run(model_path, kl_coefficient=0.1, lr=1e-3, lora=lora)
    learner = Learner(run)
    told = [stats.reference_kl for stats in steps(learner, 1, 1, 1, 1)]
    assert told[0] == pytest.approx(0, abs=1e-9)
    assert told[1] > 1e-6
    again = Learner(run)
    again.load_state(*copy.deepcopy(learner.state()))
    assert steps(again, 1)[0].reference_kl == steps(learner, 1)[0].reference_kl > 1e-6


def test_without_a_coefficient_there_is_no_second_model(model_path: str) -> None:
    learner = Learner(make_run(model_path))
    assert learner._reference is None
    assert steps(learner, 1)[0].reference_kl == 0


def test_the_effective_sample_size_by_hand(model_path: str) -> None:
    """Importance weights 1, 1, 1 and 2 of four tokens: 25 / 7 of 4."""
    learner = Learner(make_run(model_path))
    (row,) = batching.make_rows([make_group(1, members=[{"completion_ids": [4, 5, 6, 7]}])], 0)
    with torch.no_grad():
        ids = torch.tensor([[*row.trajectory.prompt_ids.tolist(), 4, 5, 6, 7]])
        logits = learner._module(input_ids=ids).logits[0, 2:-1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, ids[0, 3:, None]).squeeze(-1).numpy()
    logprobs = logprobs - np.log([1, 1, 1, 2])
    stats = learner.step(
        [make_group(1, members=[{"completion_ids": [4, 5, 6, 7], "logprobs": logprobs.astype(np.float32)}])], newest_version=0
    )
    assert stats.ess_ratio == pytest.approx(25 / 7 / 4, rel=1e-5)


def test_rewards_spread(model_path: str) -> None:
    stats = Learner(make_run(model_path)).step([make_group(4, rewards=[0, 0, 0, 4])], newest_version=0)
    assert (stats.reward_mean, stats.reward_std) == (1, math.sqrt(3))


def test_run_files_take_adapters_by_their_defaults() -> None:
    run = RunConfig.model_validate({"run_id": "r", "model": {"path": "m"}, "learner": {"lora": {}}})
    assert run.learner.lora is not None
    assert (run.learner.lora.rank, run.learner.lora.alpha, run.learner.lora.target_modules) == (16, 32, "all-linear")


@pytest.mark.parametrize(
    ("objective", "correction", "normalization"),
    [
        ("ppo", "none", "token_mean"),
        ("gspo", "token_tis", "sequence_mean"),
        ("cispo", "sequence_tis", "fixed_length"),
        ("ppo", "icepop", "sequence_mean"),
        ("gspo", "trust_region", "fixed_length"),
        ("cispo", "tapered", "token_mean"),
        ("dpo", "none", "token_mean"),
    ],
)
def test_a_token_that_is_masked_as_too_old_changes_no_bit(
    model_path: str, objective: str, correction: str, normalization: str
) -> None:
    """How old it is and what its sampler gave it: not of the step's gradient, nor of its numbers. The best of each group has no
    other token to train; it counts in the group's advantages alone."""
    keys = {"objective": objective, "correction": correction, "normalization": normalization}
    run = make_run(model_path, **keys, off_policy_mask=0.05, kl_coefficient=0.05)

    def trained(version: int, logprob: float) -> tuple[dict[str, torch.Tensor], Any]:
        members = [
            {
                "completion_ids": [index, 9, 7, 8 - index],
                "logprobs": np.array([logprob, -2, index - 5, index - 5], np.float32),
                "loss_mask": np.array([True, False, index != 3, index != 3]),
                "spans": ((0, version), (2, 6), (3, 7)),
            }
            for index in range(4)
        ]
        groups = [make_group(4, number=number, rewards=[0, 3, 2, 5], members=members) for number in range(2)]
        learner = Learner(run)
        stats = learner.step([mask_older(group, 5) for group in groups], newest_version=7)
        return weights(learner), dataclasses.replace(stats, seconds={})

    (state, stats), (other_state, other_stats) = trained(1, -0.1), trained(4, -30.0)
    assert_same(state, other_state)
    assert stats == other_stats
    assert (stats.skipped, stats.loss_tokens) == (False, 4 if objective == "dpo" else 12)
    assert 0 < stats.grad_norm < math.inf


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        # What `accelerate launch --cpu --num_processes 2` gives the one process that it starts.
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}, "has started one: without --multi_gpu it does"),
        ({"ACCELERATE_USE_FSDP": "true"}, "set learner.sharding, and launch without --use_fsdp"),
    ],
)
def test_a_launch_that_would_not_do_what_was_meant_is_refused(
    model_path: str, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], says: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(says)):
        Learner(make_run(model_path))
