"""The model: loaded whole and without dropout, its tensors by their Hugging Face names, LoRA adapters merged into them.

Refuses to know optimisers, losses and ranks (but for sharded tensors, which it gathers): `learner.py` trains what is made here.

LoRA (Hu et al., arXiv 2106.09685), by peft: W + scale * B A with scale = alpha / rank, on the linear layers named in
`learner.lora`. The base is frozen. B begins at zero, so that the first policy is the base to the bit.
"""

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as hf_logging

from consumers.parallel import whole
from echo.config import LoraConfig
from echo.errors import ConfigError
from echo.model_path import check_model_path, unloadable
from echo.weights.manifest import HostTensor

_ADAPTER = "default"
# torch -> safetensors names, those that a state dict may hold.
_DTYPE_NAME = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Policy:
    """A causal language model and the names of its tensors; with `lora`, adapters on a frozen base.

    module: what computes (peft's where there are adapters). positions: tokens that a row may have, None without a bound.
    Raises ConfigError where the model can't be loaded, or the adapters can't be put on it.
    """

    def __init__(self, path: str, *, lora: LoraConfig | None, recompute: bool) -> None:
        base = _load(path)
        self.vocabulary = int(base.get_input_embeddings().num_embeddings)
        self.positions: int | None = getattr(base.config.get_text_config(), "max_position_embeddings", None)
        self.keeps_logits = "logits_to_keep" in inspect.signature(base.forward).parameters
        self._names = _names(base)
        self.lora = lora is not None
        self.base_digest = ""
        self.module: Any = base
        if lora is not None:
            self.base_digest = _digest(base, self._names)
            self.module = _with_adapters(base, lora, self._names)
        self.module.eval()  # Gradients flow all the same; dropout must not.
        if recompute:
            _recompute(self.module)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimiser moves, by the module's names. They change when the module is sharded."""
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}

    def held(self) -> dict[str, Tensor]:
        """What a checkpoint holds, live, each storage once: all of the model, or the adapters alone. Parts where sharded."""
        if self.lora:
            return {name: value.detach() for name, value in self.trained.items()}
        state = self.module.state_dict()
        return {name: state[name] for name in self._names}

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The whole policy by Hugging Face names, adapters merged or left out; tied weights once. Gathers: on all ranks, or
        none."""
        if not self.lora:
            yield from ((name, whole(value)) for name, value in self.held().items())
            return
        base = self.module.get_base_model()
        state = base.state_dict()
        for name in self._names:
            place, _, kind = name.rpartition(".")
            frozen = f"{place}.base_layer.{kind}"
            if frozen not in state:
                yield name, whole(state[name])
                continue
            value = whole(state[frozen])
            yield name, value + _delta(base.get_submodule(place)) if merged and kind == "weight" else value

    @property
    def adapter_config(self) -> dict[str, Any]:
        """What peft's LoraConfig is made of, to put these adapters on the base: plain values."""
        made = self.module.peft_config[_ADAPTER]
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": made.r,
            "lora_alpha": made.lora_alpha,
            "target_modules": sorted(made.target_modules),
            "lora_dropout": 0.0,
            "bias": "none",
        }

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters by the names of peft's files (`base_model.model....lora_A.weight`). Gathers as `weights` does."""
        for name, value in self.held().items():
            yield name.replace(f".{_ADAPTER}.", "."), whole(value)


def host_tensor(name: str, value: Tensor, dtype: torch.dtype) -> HostTensor:
    """A tensor's bytes on the host, a copy of their own; floating ones in `dtype`."""
    target = dtype if value.is_floating_point() else value.dtype
    host = value.to("cpu", target, copy=True).contiguous()
    return HostTensor(name, _DTYPE_NAME[target], tuple(host.shape), host.reshape(-1).view(torch.uint8).numpy().data)


def _load(path: str) -> Any:
    """The model in float32, whole: never unpickled, and no tensor left to a random initialisation."""
    check_model_path(path)
    hf_logging.disable_progress_bar()  # Standard error is for the log.
    try:
        config = AutoConfig.from_pretrained(path)
        # Also off where a layer is set to training to have it recomputed, see `_recompute`.
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            for name, value in part.to_dict().items():
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
    except (OSError, ValueError) as error:
        raise ConfigError(unloadable(path, "can't be loaded", error)) from error
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        # Among others: no file of safetensors, one that is cut off, tensors of other shapes than config.json has.
        said = unloadable(path, "can't be loaded", error)
        raise ConfigError(f"{said} (weights are read from whole safetensors files that fit config.json)") from error
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ConfigError(
            f"model.path {path!r}: {len(missing)} tensors are missing, {', '.join(missing[:3])} among them: "
            "is the download complete, and is it a causal language model?"
        )
    return model


def _names(model: Any) -> tuple[str, ...]:
    """Names of the state dict, each storage once: of tied weights the source, as `save_pretrained` keeps it."""
    everything = model.state_dict()
    tied: dict[str, str] = model.all_tied_weights_keys
    return tuple(
        name
        for name, value in everything.items()
        if not (name in tied and tied[name] in everything and everything[tied[name]].data_ptr() == value.data_ptr())
    )


def _digest(model: Any, names: tuple[str, ...]) -> str:
    """blake3 (hex) of the base: adapters fit one base alone, and a checkpoint does not hold it."""
    state, hasher = model.state_dict(), blake3(max_threads=blake3.AUTO)
    for name in names:
        hasher.update(name.encode())
        hasher.update(state[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _with_adapters(base: Any, lora: LoraConfig, names: tuple[str, ...]) -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ConfigError(f"learner.lora needs the extra `lora` (pip install 'echo-rl[lora]'): {error}") from None
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules),
        lora_dropout=0.0,
        bias="none",
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings", UserWarning)  # An error below.
            # What peft asks transformers by its older name.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            module = peft.get_peft_model(base, settings)
    except ValueError as error:
        raise ConfigError(f"learner.lora.target_modules: {' '.join(str(error).split())}") from None
    for name, layer in base.named_modules():
        # A tied output layer has no name of its own: what is published could not tell it from the embedding.
        if hasattr(layer, "base_layer") and (not len(layer.lora_A) or f"{name}.weight" not in names):
            raise ConfigError(f"learner.lora.target_modules: {name} can't have an adapter: it is tied, or no linear layer")
    return module


def _delta(layer: Any) -> Tensor:
    """scale * B A of one layer, in the layout of its weight, gathered."""
    product = whole(layer.lora_B[_ADAPTER].weight.detach()) @ whole(layer.lora_A[_ADAPTER].weight.detach())
    return (product.T if layer.fan_in_fan_out else product) * layer.scaling[_ADAPTER]


def _recompute(module: Any) -> None:
    """Gradient checkpointing: keep the inputs of layers alone, and compute their insides again on the way back."""
    # Newer releases of transformers call it activation checkpointing, and warn at the older name.
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"learner.gradient_checkpointing: {type(module).__name__} has no layers that can be recomputed")
    for layer in layers:
        layer.training = True  # Itself and nothing inside: layers are recomputed in training only, and dropout stays off.
