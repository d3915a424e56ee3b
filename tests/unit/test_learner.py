"""The learner on a tiny random Qwen3: gradients, learning, published bytes, bit-exact resume, and what it refuses."""

import copy
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Qwen3Config, Qwen3ForCausalLM

from consumers.checkpoint import CheckpointStore
from consumers.groups import Group
from consumers.learner import Learner
from echo.config import RunConfig
from echo.errors import CheckpointError, ConfigError, RecordError
from echo.trajectory import Sampling
from echo.weights.manifest import DTYPE_BYTES
from tests.helpers import make_group
from tests.tiny import tiny_config

VOCABULARY = 24


pytestmark = pytest.mark.usefixtures("own_process")


def make_model(folder: Path, *, tied: bool = True) -> str:
    torch.manual_seed(0)
    config = tiny_config(
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        attention_dropout=0.5,  # Were dropout on, nothing here would be exact.
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def make_run(model: str, *, dtype: str = "float32", published: str = "float32", seed: int = 0, **learner: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_id": "test-run",
            "seed": seed,
            "model": {"path": model, "dtype": dtype},
            "weights": {"dtype": published},
            "learner": {"lr": 3e-3, "tokens_per_microbatch": 64} | learner,
        }
    )


def make_batch(seed: int, groups: int = 3, size: int = 4, **changes: Any) -> list[Group]:
    """Groups of random tokens, lengths, logprobs, rewards and versions."""
    generator = np.random.default_rng(seed)
    batch = []
    for number in range(groups):
        prompt = generator.integers(0, VOCABULARY, generator.integers(1, 6))
        members = []
        for _ in range(size):
            length = int(generator.integers(1, 12))
            members.append(
                {
                    "prompt_ids": prompt,
                    "completion_ids": generator.integers(0, VOCABULARY, length),
                    "logprobs": -generator.uniform(1.5, 4.5, length).astype(np.float32),
                    "loss_mask": generator.random(length) < 0.8,
                    "reward": float(generator.random()),
                    "sampling": Sampling(max_tokens=16, temperature=float(generator.choice([0.7, 1.0]))),
                }
                | changes
            )
        batch.append(make_group(size, number=number, policy_version=(7, 6, 4)[number % 3], members=members))
    return batch


def gradients(learner: Learner, batch: list[Group]) -> dict[str, torch.Tensor]:
    """The gradient that `step` gives the optimiser, read in a hook before it moves the weights."""
    found: dict[str, torch.Tensor] = {}

    def read(*_: Any) -> None:
        found.update({name: p.grad.clone() for name, p in learner._parameters.items()})

    with_hook = learner._adam.register_step_pre_hook(read)
    learner.step(batch, newest_version=7)
    with_hook.remove()
    return found


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in learner.state()[0].items() if not name.startswith("rng.")}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


OBJECTIVES: list[dict[str, Any]] = [
    {"correction": "none", "entropy_coefficient": 0.01},
    {"correction": "token_tis", "normalization": "fixed_length", "advantage": "dr_grpo"},
    {"objective": "gspo", "correction": "tapered", "normalization": "sequence_mean", "kl_coefficient": 0.1},
    {"objective": "dpo"},
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda keys: "-".join(str(value) for value in keys.values()))
def test_the_gradient_does_not_depend_on_the_micro_batches(model_path, objective):
    """One row at a time, a few, or all at once: the same gradient within 1e-6 of its norm, and the same statistics."""
    batch = make_batch(1)
    results = []
    for tokens in (1, 40, 100_000):
        run = make_run(model_path, tokens_per_microbatch=tokens, **objective)
        results.append((gradients(Learner(run), batch), Learner(run).step(batch, newest_version=7)))
    (whole, stats), *others = reversed(results)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in whole.values()])).item()
    assert norm == pytest.approx(min(1, stats.grad_norm), rel=1e-3)
    for parts, other in others:
        for name, value in whole.items():
            torch.testing.assert_close(parts[name], value, atol=1e-6 * norm, rtol=0, msg=name)
        for field in ("loss", "grad_norm", "entropy", "clipped_ratio", "truncated_ratio"):
            assert getattr(other, field) == pytest.approx(getattr(stats, field), rel=1e-6, abs=1e-6), field
        assert other.mismatch_kl == pytest.approx(stats.mismatch_kl, rel=1e-5)


def test_statistics_equal_a_reference_made_row_by_row(model_path):
    """Loss, entropy and mismatch from unpadded rows, a plain model and numpy; masked tokens and temperatures included."""
    batch = make_batch(2)
    stats = Learner(make_run(model_path, correction="token_tis")).step(batch, newest_version=7)
    model = Qwen3ForCausalLM.from_pretrained(model_path).eval().double()
    loss, entropy, truncated, tokens = 0.0, 0.0, 0, 0
    mismatch: dict[str, list[float]] = {"0": [], ">0": []}
    staleness = []
    for group in batch:
        rewards = np.array([m.trajectory.reward for m in group.members])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        for member, advantage in zip(group.members, advantages, strict=True):
            t = member.trajectory
            ids = torch.tensor([*t.prompt_ids.tolist(), *t.completion_ids.tolist()])
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0].numpy() / t.sampling.temperature
            logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            staleness.append(7 - t.min_policy_version)
            for index in np.nonzero(t.loss_mask)[0]:
                here = logprobs[len(t.prompt_ids) + index - 1]
                ratio = math.exp(here[t.completion_ids[index]] - t.logprobs[index])
                loss -= min(ratio, 2.0) * advantage
                truncated += ratio > 2.0
                entropy -= (np.exp(here) * here).sum()
                mismatch["0" if staleness[-1] == 0 else ">0"].append(ratio - 1 - math.log(ratio))
                tokens += 1
    assert 0 < truncated < tokens
    assert stats.staleness == staleness
    assert stats.loss_tokens == tokens
    assert stats.tokens == sum(m.trajectory.token_count for g in batch for m in g.members)
    assert stats.loss == pytest.approx(loss / tokens, abs=1e-5)
    assert stats.entropy == pytest.approx(entropy / tokens, abs=1e-5)
    assert stats.truncated_ratio == pytest.approx(truncated / tokens)
    assert stats.clipped_ratio == 0  # One step per batch: new is proximal.
    assert stats.mismatch_kl == pytest.approx({key: np.mean(values) for key, values in mismatch.items() if values}, rel=1e-4)
    assert stats.reward_mean == pytest.approx(np.mean([m.trajectory.reward for g in batch for m in g.members]))
    assert stats.seconds.keys() == {"unpack", "forward", "backward"}
    assert min(stats.seconds.values()) > 0
    assert not stats.skipped


def test_rewarded_tokens_become_likelier(model_path):
    """A few steps on one batch with true behaviour logprobs: rewarded completions gain probability, the others lose."""
    learner = Learner(make_run(model_path))

    def logprob(completion: list[int]) -> np.ndarray:
        ids = torch.tensor([[3, 4, *completion]])
        with torch.no_grad():
            logits = learner._module(input_ids=ids).logits[0, 1:-1]
        return torch.log_softmax(logits, -1).gather(-1, ids[0, 2:, None]).squeeze(-1).numpy()

    good, bad = [5, 6, 7], [8, 9, 10]
    before = logprob(good).sum(), logprob(bad).sum()
    for _ in range(5):
        members = [
            {"prompt_ids": [3, 4], "completion_ids": c, "logprobs": logprob(c), "reward": float(c is good)} for c in (good, bad)
        ]
        stats = learner.step([make_group(2, members=members)], newest_version=0)
        assert stats.mismatch_kl["0"] == pytest.approx(0, abs=1e-6)
    assert logprob(good).sum() > before[0] + 0.5
    assert logprob(bad).sum() < before[1] - 0.5


def test_the_preferred_completion_becomes_likelier_than_the_other(model_path):
    """A few steps of DPO on a group whose second is best and third is worst: only the difference of these two counts."""
    learner = Learner(make_run(model_path, objective="dpo", dpo_beta=0.5))
    completions, rewards = ([5, 6], [7, 8, 9], [10, 11], [12]), (0.5, 1.0, 0.0, 0.5)
    members = [{"prompt_ids": [3, 4], "completion_ids": c, "reward": r} for c, r in zip(completions, rewards, strict=True)]
    members = [member | {"logprobs": np.full(len(c), -3, np.float32)} for member, c in zip(members, completions, strict=True)]
    stats = [learner.step([make_group(4, members=members)], newest_version=0) for _ in range(6)]
    losses = [one.loss for one in stats]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)  # The policy is its own reference.
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.3
    assert (stats[0].reward_mean, stats[0].loss_tokens) == (0.5, 5)
    assert stats[0].reference_kl == pytest.approx(0, abs=1e-6)
    assert stats[-1].reference_kl > 0.01


def test_masked_tokens_have_no_influence(model_path):
    """Other tokens' masks decide: what a masked last token is, and its logprob, changes no gradient."""
    results = []
    for last, logprob in ((5, -1.0), (9, -8.0)):
        members = [
            {
                "completion_ids": [7, 8, last],
                "logprobs": np.array([-1, -2, logprob], np.float32),
                "loss_mask": np.array([True, True, False]),
            }
            for _ in range(2)
        ]
        results.append(gradients(Learner(make_run(model_path)), [make_group(2, rewards=[0, 1], members=members)]))
    assert_same(*results)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("published", ["float32", "bfloat16", "float16"])
def test_host_tensors_load_back_equal(tmp_path, tied, published):
    """Published bytes, read by name, dtype and shape alone, rebuild the model that `save_pretrained` would have saved."""
    learner = Learner(make_run(make_model(tmp_path / "model", tied=tied), published=published))
    learner.step(make_batch(3), newest_version=7)
    numpy_dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<i2"}
    torch_dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    received: dict[str, torch.Tensor] = {}
    for tensor in learner.host_tensors():
        assert tensor.name not in received
        assert len(tensor.data) == tensor.data.nbytes == math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        values = np.frombuffer(bytes(tensor.data), dtype=numpy_dtype[tensor.dtype])
        received[tensor.name] = torch.from_numpy(values.copy()).view(torch_dtype[tensor.dtype]).reshape(tensor.shape)
    assert ("lm_head.weight" in received) == (not tied)
    target = Qwen3ForCausalLM(Qwen3Config.from_pretrained(tmp_path / "model")).to(getattr(torch, published))
    missing, unexpected = target.load_state_dict(received, strict=False)
    assert (missing, unexpected) == ((["lm_head.weight"] if tied else []), [])
    trained = learner._module.state_dict()
    for name, value in target.state_dict().items():
        assert torch.equal(value, trained[name].to(value.dtype)), name


def test_published_bytes_do_not_change_with_the_next_step(model_path):
    """What was handed out is a copy: a slow store may still be writing it."""
    learner = Learner(make_run(model_path))
    handed_out = list(learner.host_tensors())
    before = [bytes(tensor.data) for tensor in handed_out]
    learner.step(make_batch(4), newest_version=7)
    assert [bytes(tensor.data) for tensor in handed_out] == before
    assert [bytes(tensor.data) for tensor in learner.host_tensors()] != before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_is_exact_to_the_bit(model_path, tmp_path, dtype):
    """k steps, a checkpoint on disk, a fresh learner of another seed, k steps: the bits of 2k steps, RNG included."""
    batches = [make_batch(seed) for seed in range(6)]
    straight = Learner(make_run(model_path, dtype=dtype))
    straight_stats = [straight.step(batch, newest_version=7) for batch in batches]
    draws = torch.rand(3), np.random.rand(3), np.random.standard_normal(), random.random()

    first = Learner(make_run(model_path, dtype=dtype))
    for batch in batches[:3]:
        first.step(batch, newest_version=7)
    store = CheckpointStore(tmp_path, "test-run", keep=1)
    store.save(3, *first.state(), policy_version=3, reader={})
    loaded = store.newest()
    assert loaded is not None
    second = Learner(make_run(model_path, dtype=dtype, seed=99))
    second.load_state(loaded.tensors, loaded.meta)
    stats = [second.step(batch, newest_version=7) for batch in batches[3:]]
    assert_same(weights(straight), weights(second))
    assert [(s.loss, s.grad_norm) for s in stats] == [(s.loss, s.grad_norm) for s in straight_stats[3:]]
    assert torch.equal(torch.rand(3), draws[0])
    assert np.array_equal(np.random.rand(3), draws[1])
    assert (np.random.standard_normal(), random.random()) == draws[2:]


def test_equal_seeds_give_equal_bits(model_path):
    batches = [make_batch(seed) for seed in range(2)]
    learners = [Learner(make_run(model_path)) for _ in range(2)]
    for learner in learners:
        for batch in batches:
            learner.step(batch, newest_version=7)
    assert_same(weights(learners[0]), weights(learners[1]))


def test_bfloat16_keeps_float32_master_weights(model_path):
    """Computing in bfloat16 leaves weights and moments float32, so that small updates are not rounded away."""
    learner = Learner(make_run(model_path, dtype="bfloat16", lr=1e-6))
    before = weights(learner)
    stats = learner.step(make_batch(5), newest_version=7)
    after = weights(learner)
    AcceleratorState._reset_state(True)
    exact = Learner(make_run(model_path)).step(make_batch(5), newest_version=7)
    assert stats.entropy != exact.entropy
    assert stats.entropy == pytest.approx(exact.entropy, rel=0.02)
    for name, value in before.items():
        assert after[name].dtype == torch.float32
        assert not torch.equal(after[name], value), name
        assert (after[name] - value).abs().max() < 2e-6


@pytest.mark.parametrize("poison", ["reward", "weights"])
def test_a_step_that_is_not_finite_changes_nothing(model_path, poison):
    """An infinite reward, or a weight that overflows: skipped is reported, bits stay, and the next step works."""
    learner = Learner(make_run(model_path))
    learner.step(make_batch(6), newest_version=7)
    batch = make_batch(7)
    parameter = next(iter(learner._parameters.values()))
    kept = parameter.detach().clone()
    if poison == "reward":
        batch[0] = make_group(4, rewards=[1, 0, math.inf, 0])
    else:
        with torch.no_grad():
            parameter[0, 0] = math.inf
        batch[0] = make_group(2, members=[{"prompt_ids": [0, 1]}] * 2)
    before = weights(learner)
    stats = learner.step(batch, newest_version=7)
    assert stats.skipped
    assert not math.isfinite(stats.grad_norm)
    assert_same(before, weights(learner))
    with torch.no_grad():
        parameter.copy_(kept)
    assert not learner.step(make_batch(7), newest_version=7).skipped


def test_a_batch_without_trainable_tokens_is_skipped(model_path):
    learner = Learner(make_run(model_path))
    before = weights(learner)
    stats = learner.step([make_group(2, loss_mask=np.zeros(4, np.bool_))], newest_version=0)
    assert (stats.skipped, stats.loss_tokens, stats.mismatch_kl) == (True, 0, {})
    assert_same(before, weights(learner))


def test_the_gradient_norm_is_clipped(model_path):
    """grad_norm is told before clipping; what the optimiser gets has the bound as its norm."""
    run = make_run(model_path, grad_clip=0.01)
    found = gradients(Learner(run), make_batch(8))
    assert torch.linalg.vector_norm(torch.stack([g.norm() for g in found.values()])) == pytest.approx(0.01, rel=1e-3)
    assert Learner(run).step(make_batch(8), newest_version=7).grad_norm > 0.02


def test_token_ids_outside_the_vocabulary_are_refused(model_path):
    """An error that names trajectory and offset, before anything is computed."""
    learner = Learner(make_run(model_path))
    before = weights(learner)
    group = make_group(2, first_offset=40, members=[{}, {"completion_ids": [1, 2, 3, VOCABULARY]}])
    with pytest.raises(RecordError, match=r"partition 0, offset 41.*outside the vocabulary of tiny, 0\.\.23"):
        learner.step([group], newest_version=0)
    assert_same(before, weights(learner))


def test_a_model_that_cannot_be_loaded_is_a_clear_error(tmp_path, model_path):
    """A folder without a model, and one that lacks tensors, are named; nothing is initialised at random in silence."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"model\.path: .*empty can't be loaded"):
        Learner(make_run(str(tmp_path / "empty")))
    holes = Qwen3ForCausalLM.from_pretrained(model_path)
    state = {name: v for name, v in holes.state_dict().items() if "layers.1.mlp" not in name and name != "lm_head.weight"}
    holes.save_pretrained(tmp_path / "holes", state_dict=state)
    with pytest.raises(ConfigError, match=r"3 tensors are missing, model\.layers\.1\.mlp"):
        Learner(make_run(str(tmp_path / "holes")))


def test_float16_without_a_gpu_is_a_clear_error(model_path, monkeypatch):
    """accelerate would compute in float32 and say nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.dtype float16"):
        Learner(make_run(model_path, dtype="float16"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path, model_path):
    """Missing, unknown and misshapen tensors are named, and nothing is changed."""
    learner = Learner(make_run(model_path))
    learner.step(make_batch(9), newest_version=7)
    tensors, meta = copy.deepcopy(learner.state())
    before = weights(learner)
    for change in (
        lambda t: t.pop("model.model.norm.weight"),
        lambda t: t.pop("optimizer.exp_avg.model.norm.weight"),
        lambda t: t.update({"model.extra": torch.zeros(2)}),
        lambda t: t.update({"model.model.norm.weight": torch.zeros(31)}),
    ):
        damaged = dict(tensors)
        change(damaged)
        with pytest.raises(CheckpointError, match=r"not of model 'tiny'.*(norm\.weight|extra)"):
            learner.load_state(damaged, meta)
        assert_same(before, weights(learner))


def test_a_bound_on_tokens_beyond_the_models_positions_is_refused(model_path):
    run = make_run(model_path)
    assert Learner(run).positions == 128
    too_many = run.model_copy(update={"batch": run.batch.model_copy(update={"max_tokens": 129})})
    with pytest.raises(ConfigError, match=r"batch\.max_tokens is 129, tiny has 128 positions"):
        Learner(too_many)


def test_groups_of_one_teach_nothing_and_are_refused(model_path):
    run = make_run(model_path)
    alone = run.model_copy(update={"sampling": run.sampling.model_copy(update={"group_size": 1})})
    with pytest.raises(ConfigError, match=r"sampling\.group_size is 1.*take 2 or more"):
        Learner(alone)
