"""A policy into a torch model: a plan first, in which everything must fit, then copies. LoRA adapters are merged on the way.

Refuses to change anything before all of it fits.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from echo.errors import EngineError
from echo.weights.manifest import HostTensor
from producers.engines.base import Adapter, Policy

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PEFT = "base_model.model."


class LowRank(NamedTuple):
    """What LoRA adds to a weight: scale * B A, turned round where the layer keeps its weight so. a: (r, in), b: (out, r)."""

    a: HostTensor
    b: HostTensor
    scale: float
    is_turned: bool


class Step(NamedTuple):
    """A parameter, the tensor that goes into it, and what is added."""

    place: torch.Tensor
    source: HostTensor
    plus: LowRank | None


def plan(model: torch.nn.Module, policy: Policy) -> list[Step]:
    """Which parameter takes which tensor. Raises EngineError, having changed nothing, where they do not fit."""
    places = model.state_dict()
    tied: dict[tuple[Any, ...], list[str]] = {}
    for name, place in places.items():
        key = (place.data_ptr(), place.shape, place.stride()) if place.numel() else (name,)
        tied.setdefault(key, []).append(name)
    problems: list[str] = []
    if policy.adapter is None:
        given, low_rank = policy.tensors, {}
    else:
        given, low_rank = policy.adapter.tensors, _low_rank(model, policy.adapter, policy.tensors, places, problems)
    problems.extend(f"{name} is unknown to this model" for name in given if name not in places)
    steps: list[Step] = []
    for names in tied.values():
        present = [name for name in names if name in given]
        if not present:
            problems.append(f"{' or '.join(names)} is missing")
            continue
        place, source = places[present[0]], given[present[0]]
        problems.extend(problem for name in present if (problem := _misfit(name, place, given[name])) is not None)
        if any(not np.array_equal(_bytes(given[name]), _bytes(source)) for name in present[1:]):
            problems.append(f"{' and '.join(present)} differ, but this model ties them")
        adapted = [low_rank[name] for name in names if name in low_rank]
        steps.append(Step(place, source, adapted[0] if adapted else None))
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise EngineError(
            f"policy {policy.version} does not fit this model: {'; '.join(problems[:5])}{more};"
            " the trainer and this producer must name the same model"
        )
    return steps


def apply(steps: list[Step]) -> None:
    """Copy everything. Raises RuntimeError where the device fails: the model is then a mixture."""
    for place, source, plus in steps:
        if plus is None:
            place.copy_(to_torch(source))
            continue
        # In float32, as the trainer merges: the weight's own precision would lose most of a small change.
        a, b = (to_torch(one).to(place.device, torch.float32) for one in (plus.a, plus.b))
        product = (b @ a) * plus.scale
        place.copy_(to_torch(source).to(place.device, torch.float32) + (product.T if plus.is_turned else product))


def to_torch(source: HostTensor) -> torch.Tensor:
    """A copy, since torch wants to own writable memory."""
    tensor = torch.empty(source.shape, dtype=_DTYPES[source.dtype])
    tensor.view(-1).view(torch.uint8).numpy()[:] = _bytes(source)
    return tensor


def _low_rank(
    model: torch.nn.Module,
    adapter: Adapter,
    tensors: Mapping[str, HostTensor],
    places: Mapping[str, torch.Tensor],
    problems: list[str],
) -> dict[str, LowRank]:
    """By the names of the weights that they are added to."""
    rank, alpha = adapter.config.get("r"), adapter.config.get("lora_alpha")
    if adapter.config.get("peft_type") != "LORA" or not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        problems.append(f"adapters are LoRA's with r and lora_alpha, not {dict(adapter.config)}")
        return {}
    unused = [name for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if adapter.config.get(name)]
    problems.extend(f"adapters with {name} are not known here" for name in unused)
    found: dict[str, LowRank] = {}
    for name, b in tensors.items():
        module, _, kind = name.removeprefix(_PEFT).rpartition(".lora_")
        a = tensors.get(name.replace(".lora_B.", ".lora_A."))
        if kind == "A.weight" and name.replace(".lora_A.", ".lora_B.") in tensors:
            continue
        place = places.get(f"{module}.weight")
        if kind != "B.weight" or not name.startswith(_PEFT) or a is None or place is None:
            problems.append(f"{name} is no half of an adapter of this model")
            continue
        is_turned = isinstance(model.get_submodule(module), Conv1D)
        outputs, inputs = (place.shape[1], place.shape[0]) if is_turned else (place.shape[0], place.shape[1])
        if (a.shape, b.shape) != ((rank, inputs), (outputs, rank)):
            problems.append(f"{name} and its half have shapes {b.shape} and {a.shape} for a weight of {tuple(place.shape)}")
            continue
        found[f"{module}.weight"] = LowRank(a, b, alpha / rank, is_turned)
    return found


def _misfit(name: str, place: torch.Tensor, source: HostTensor) -> str | None:
    """Why a tensor can't go into its place, None where it can."""
    if tuple(source.shape) != tuple(place.shape):
        return f"{name} has shape {tuple(source.shape)}, this model's has {tuple(place.shape)}"
    dtype = _DTYPES.get(source.dtype)
    if dtype is None or (dtype != place.dtype and not (dtype.is_floating_point and place.dtype.is_floating_point)):
        return f"{name} has dtype {source.dtype}, this model's has {str(place.dtype).removeprefix('torch.')}"
    if source.data.nbytes != place.numel() * dtype.itemsize:
        return f"{name} has {source.data.nbytes} bytes, its shape and dtype need {place.numel() * dtype.itemsize}"
    return None


def _bytes(source: HostTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(source.data, dtype=np.uint8)
