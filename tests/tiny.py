"""A real but tiny causal language model: its shape, a folder of it, and its weights as policies, for tests of engines.

Refuses a tokenizer: engine tests speak in token ids.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from echo.weights.manifest import HostTensor
from producers.engines.base import Policy

VOCABULARY = 19
END_IDS = (1, 2)
POSITIONS = 64

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def tiny_config(**fields: Any) -> Qwen3Config:
    """Two layers of some 8,000 weights each, with grouped heads; `fields` are the rest of Qwen3Config's."""
    return Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        **fields,
    )


def tiny_model(seed: int, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A Qwen3 model with weights large enough that its distributions are far from flat."""
    torch.manual_seed(seed)
    config = tiny_config(
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
        initializer_range=0.4,
        eos_token_id=END_IDS[0],
    )
    return Qwen3ForCausalLM(config).to(dtype).eval()


def save_tiny(folder: Path, *, tied: bool = False) -> str:
    """A model folder as users have it: config, weights, and a generation config with two end tokens."""
    model = tiny_model(0, tied=tied)
    model.generation_config = GenerationConfig(eos_token_id=list(END_IDS), pad_token_id=0)
    model.save_pretrained(folder)
    return str(folder)


def host_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, HostTensor]:
    found = {}
    for name, tensor in state.items():
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found[name] = HostTensor(name, _NAMES[tensor.dtype], tuple(tensor.shape), memoryview(data))
    return found


def as_policy(model: PreTrainedModel, version: int) -> Policy:
    """A model's weights as they arrive at a producer."""
    return Policy(version, host_tensors(model.state_dict()))


@torch.inference_mode()
def reference_logprobs(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """float32 (C, V): natural logs of each completion token's distribution, by one full forward pass without cache."""
    ids = torch.tensor([prompt + completion])
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
