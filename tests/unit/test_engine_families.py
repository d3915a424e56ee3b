"""Families of models in the transformers engine: one samples from its true distributions, or it is refused when it is built.

Nothing here depends on how a release of transformers names the arguments of a model: `make test-lowest` and `make test-newest`
run it with both ends of the releases that are allowed.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from echo.errors import EngineError
from echo.trajectory import Sampling
from producers.engines.transformers import TransformersEngine
from tests.tiny import VOCABULARY, as_policy, reference_logprobs

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12], [13, 14]]
TOLERANCE = 1e-4
IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = IDS | {"hidden_size": 32, "num_hidden_layers": 2}
HEADS = SIZES | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}

ATTENTION: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**HEADS),
    "a window that is shorter than prompts": lambda: transformers.Gemma3TextConfig(
        **HEADS, head_dim=8, sliding_window=3, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: transformers.GPT2Config(**IDS, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "bloom": lambda: transformers.BloomConfig(**IDS, hidden_size=32, n_layer=2, n_head=4),
}
HYBRID: dict[str, Callable[[], PretrainedConfig]] = {
    "lfm2": lambda: transformers.Lfm2Config(**HEADS, layer_types=["conv", "full_attention"]),
    "bamba": lambda: transformers.BambaConfig(
        **HEADS, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=4, mamba_n_groups=1
    ),
}
STATE: dict[str, Callable[[], PretrainedConfig]] = {
    "mamba": lambda: transformers.MambaConfig(**SIZES, state_size=4),
    "rwkv": lambda: transformers.RwkvConfig(**SIZES, context_length=64, attention_hidden_size=32),
    # It takes the argument for a cache, and keeps its state in its layers.
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(
        **SIZES | {"num_hidden_layers": 3}, intermediate_size=96, num_attention_heads=4, lru_width=32, attention_window_size=16
    ),
}


def _saved(config: PretrainedConfig, folder: Path) -> tuple[PreTrainedModel, str]:
    """A model whose distributions are far from flat, and its folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.mul_(4)
    model.save_pretrained(folder)
    return model, str(folder)


def _assert_samples_from_itself(engine: TransformersEngine, model: PreTrainedModel) -> None:
    """Rows of different lengths, some that end early and leave the batch: every logprob is that of a full forward pass."""
    engine.load(as_policy(model, 0))
    lengths = set()
    for seed in range(5):
        for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, Sampling(max_tokens=12, seed=seed)), strict=True):
            logprobs = reference_logprobs(model, prompt, done.token_ids)
            drawn = logprobs[range(len(done.token_ids)), done.token_ids]
            assert torch.tensor(done.logprobs) == pytest.approx(drawn, abs=TOLERANCE)
            lengths.add(len(done.token_ids))
    assert len(lengths) > 1


@pytest.mark.parametrize("family", ATTENTION)
def test_a_model_of_attention_samples_from_its_own_distributions(family: str, tmp_path: Path) -> None:
    model, folder = _saved(ATTENTION[family](), tmp_path)
    _assert_samples_from_itself(TransformersEngine(folder, dtype="float32", device="cpu"), model)


@pytest.mark.parametrize("family", HYBRID)
def test_a_model_of_attention_and_states_samples_so_or_is_refused(family: str, tmp_path: Path) -> None:
    """Some releases of transformers keep their states in a cache of the ordinary kind, and others in one of their own."""
    model, folder = _saved(HYBRID[family](), tmp_path)
    try:
        engine = TransformersEngine(folder, dtype="float32", device="cpu")
    except EngineError as error:
        refusal = str(error)
    else:
        _assert_samples_from_itself(engine, model)
        return
    assert "key-value cache" in refusal


@pytest.mark.parametrize("family", STATE)
def test_a_model_that_keeps_a_state_of_its_own_is_refused(family: str, tmp_path: Path) -> None:
    """It would sample each token from the one before it alone, or from the padding of its row."""
    config = STATE[family]()
    config.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"(Mamba|Rwkv|RecurrentGemma)ForCausalLM gives no key-value cache"):
        TransformersEngine(str(tmp_path), dtype="float32", device="cpu")
