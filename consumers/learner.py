"""The learner: groups in, one optimiser step, weights out. Model, AdamW and accelerate.

Refuses to know Kafka, HTTP or files other than the model's own; when to step, publish and save is `train.py`'s business.

Numbers. Master weights, gradients and moments are float32. `model.dtype` is what the forward and backward passes compute in
(autocast; float16 adds loss scaling and needs a GPU). `weights.dtype` is what is published. Dropout is off: the policy that
is trained is the one that samples.

Logprobs are of softmax(logits / temperature), the temperature of each trajectory, so that they are comparable with the
behaviour logprobs in the record. Records sampled with top-p < 1 or top-k > 0 carry logprobs renormalised over the tokens that
were kept, which the learner can't rebuild: its own are lower by -log(kept mass), so importance weights are too small by that
factor, and mismatch_kl shows it. Prefer full sampling where the correction matters.

On a CPU with a fixed number of threads, equal seeds and inputs give equal bits, also across `state` and `load_state`.
"""

import inspect
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from consumers import batching
from consumers.batching import MicroBatch
from consumers.groups import Group
from consumers.objectives import BatchSize, Settings, TokenLoss, policy_loss, token_logprobs
from echo.config import RunConfig
from echo.errors import CheckpointError, ConfigError, RecordError
from echo.weights.manifest import HostTensor

log = structlog.get_logger("learner")

_MIXED_PRECISION = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
_TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one step did. Ratios and means are over the batch's trained tokens, before the update.

    skipped: the loss or the gradient norm was not finite, or no token was trainable; weights and optimiser are unchanged.
    loss, grad_norm (before clipping): as they were, so they may be NaN or infinite when skipped.
    clipped_ratio, truncated_ratio: shares of tokens, see `objectives.policy_loss`. entropy: nats.
    mismatch_kl: KL(behaviour || learner) in nats, by staleness of the trajectory: "0" and ">0", each only where it has
    tokens. At "0" it is the engines' difference, plus the steps taken since the last publication where publish_every > 1.
    tokens: prompt and completion tokens. loss_tokens: those that are trained. staleness: one per trajectory, in versions.
    backward_seconds includes the optimiser.
    """

    loss: float
    grad_norm: float
    entropy: float
    clipped_ratio: float
    truncated_ratio: float
    mismatch_kl: dict[str, float]
    tokens: int
    loss_tokens: int
    reward_mean: float
    staleness: list[int]
    forward_seconds: float
    backward_seconds: float
    skipped: bool


class Learner:
    """Model and optimiser of one run.

    identity: the model's name, for records and manifests. positions: tokens that a row may have, None without a bound.
    Raises ConfigError where the model can't be loaded or the settings don't fit this host.
    """

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._settings = Settings.of(run.learner, fixed_length=run.sampling.max_tokens)
        if run.learner.threads:
            torch.set_num_threads(run.learner.threads)
        set_seed(run.seed)
        try:
            self._accelerator = Accelerator(mixed_precision=_MIXED_PRECISION[run.model.dtype])
        except ValueError as error:
            raise ConfigError(f"model.dtype {run.model.dtype} can't be used here: {error}") from None
        if run.model.dtype == "float16" and self._accelerator.scaler is None:
            raise ConfigError("model.dtype float16 needs loss scaling, so a GPU: take bfloat16 or float32 on this host")
        if self._accelerator.num_processes > 1:
            raise ConfigError(
                f"echo-train was launched as {self._accelerator.num_processes} processes; it runs as one. Start it without "
                "`accelerate launch`, or with --num_processes 1"
            )
        self._device = self._accelerator.device
        self._module = _load_model(run.model.path)
        self.identity = Path(run.model.path).name if Path(run.model.path).is_dir() else run.model.path
        self.vocabulary = int(self._module.get_input_embeddings().num_embeddings)
        self.positions: int | None = getattr(self._module.config.get_text_config(), "max_position_embeddings", None)
        if self.positions is not None and (run.batch.max_tokens or 0) > self.positions:
            raise ConfigError(f"batch.max_tokens is {run.batch.max_tokens}, {self.identity} has {self.positions} positions")
        self._module.eval()  # Gradients flow all the same; dropout must not.
        self._keeps_logits = "logits_to_keep" in inspect.signature(self._module.forward).parameters
        self._parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        self._adam = torch.optim.AdamW(
            self._parameters.values(),
            lr=run.learner.lr,
            betas=run.learner.betas,
            weight_decay=run.learner.weight_decay,
        )
        self._model, self._optimizer = self._accelerator.prepare(self._module, self._adam)
        if run.sampling.top_p < 1 or run.sampling.top_k > 0:
            log.warning(
                "top_p or top_k cuts the sampling distribution; importance weights are too small by the mass that was kept",
                top_p=run.sampling.top_p,
                top_k=run.sampling.top_k,
            )

    def check(self, group: Group) -> None:
        """Raise RecordError, naming the trajectory, where this model can't be trained on the group."""
        for member in group.members:
            t = member.trajectory
            highest = max(int(t.prompt_ids.max()), int(t.completion_ids.max()))
            lowest = min(int(t.prompt_ids.min()), int(t.completion_ids.min()))
            if lowest < 0 or highest >= self.vocabulary:
                raise RecordError(
                    f"trajectory {t.trajectory_id!r} (partition {member.partition}, offset {member.offset}): token ids "
                    f"{lowest}..{highest} are outside the vocabulary of {self.identity}, 0..{self.vocabulary - 1}: "
                    "it was sampled from another model"
                )

    def step(self, groups: Sequence[Group], newest_version: int) -> StepStats:
        """One optimiser step on complete groups. newest_version: newest announced policy version.

        A loss or gradient norm that is not finite leaves weights and optimiser as they were (StepStats.skipped).
        Raises RecordError as `check` does, before anything is computed.
        """
        if not groups:
            raise ValueError("a step needs at least one group")
        for group in groups:
            self.check(group)
        rows = batching.make_rows(groups, newest_version, self._run.learner.advantage)
        loss_tokens = sum(int(row.trajectory.loss_mask.sum()) for row in rows)
        sums = _Sums(self._device)
        forward_seconds = backward_seconds = 0.0
        for cpu_batch in batching.micro_batches(rows, self._run.learner.tokens_per_microbatch):
            started = self._now()
            batch = cpu_batch.to(self._device)
            found = self._loss(batch, BatchSize(len(rows), loss_tokens))
            sums.add(found, batch)
            middle = self._now()
            self._accelerator.backward(found.loss)
            forward_seconds += middle - started
            backward_seconds += self._now() - middle
        started = self._now()
        norm = self._accelerator.clip_grad_norm_(list(self._parameters.values()), self._run.learner.grad_clip)
        total = sums.read(norm)
        skipped = loss_tokens == 0 or not (np.isfinite(total["loss"]) and np.isfinite(total["grad_norm"]))
        if not skipped:
            self._optimizer.step()
        elif self._accelerator.scaler is not None:
            self._accelerator.scaler.update()  # An overflow lowers the scale: the next step may fit.
        self._optimizer.zero_grad()
        backward_seconds += self._now() - started
        if skipped:
            log.warning("step skipped", loss=total["loss"], grad_norm=total["grad_norm"], loss_tokens=loss_tokens)
        tokens = max(1, loss_tokens)
        return StepStats(
            loss=total["loss"],
            grad_norm=total["grad_norm"],
            entropy=total["entropy"] / tokens,
            clipped_ratio=total["clipped"] / tokens,
            truncated_ratio=total["truncated"] / tokens,
            mismatch_kl={
                key: total[f"mismatch {key}"] / total[f"tokens {key}"] for key in ("0", ">0") if total[f"tokens {key}"]
            },
            tokens=sum(row.trajectory.token_count for row in rows),
            loss_tokens=loss_tokens,
            reward_mean=float(np.mean([row.trajectory.reward for row in rows])),
            staleness=[row.staleness for row in rows],
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            skipped=skipped,
        )

    def host_tensors(self) -> Iterator[HostTensor]:
        """The policy in `weights.dtype`, tensor by tensor, by HF state-dict name; tied weights once, under their source's name.

        Each tensor's bytes are a copy of their own. Finish iterating before the next step.
        """
        dtype = _TORCH_DTYPE[self._run.weights.dtype]
        for name, value in self._weights().items():
            target = dtype if value.is_floating_point() else value.dtype
            host = value.to("cpu", target, copy=True).contiguous()
            data = host.reshape(-1).view(torch.uint8).numpy().data
            yield HostTensor(name, _DTYPE_NAME[target], tuple(host.shape), data)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next step depends on: named tensors and a JSON-able rest.

        Tensors are the live ones where they are on the CPU already: save them before the next step. Hyperparameters are not
        part of it; they are the run file's.
        """
        tensors = {f"model.{name}": value.cpu() for name, value in self._weights().items()}
        for name, parameter in self._parameters.items():
            for moment, value in self._adam.state.get(parameter, {}).items():
                tensors[f"optimizer.{moment}.{name}"] = value.detach().cpu()
        tensors["rng.torch"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self._device)
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        meta: dict[str, Any] = {
            "identity": self.identity,
            "rng": {
                "python": [version, list(words), gauss],
                "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
            },
        }
        if self._accelerator.scaler is not None:
            meta["scaler"] = self._accelerator.scaler.state_dict()
        return tensors, meta

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Become what `state` described: the steps that follow are the same, bit for bit.

        Raises CheckpointError, with nothing changed, where tensors are missing or of another model.
        """
        weights = self._weights()
        moments = [name for name in self._parameters if f"optimizer.step.{name}" in tensors]
        shapes = {f"model.{name}": value.shape for name, value in weights.items()}
        for name in moments:
            shapes |= {f"optimizer.{moment}.{name}": self._parameters[name].shape for moment in ("exp_avg", "exp_avg_sq")}
        shapes["rng.torch"] = torch.get_rng_state().shape
        wrong = [name for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape]
        wrong += sorted(tensors.keys() - {*shapes, *(f"optimizer.step.{name}" for name in moments), "rng.cuda"})
        if wrong:
            raise CheckpointError(
                f"the checkpoint is not of model {self.identity!r}: {len(wrong)} tensors are missing, unknown or of another "
                f"shape ({', '.join(wrong[:3])}): set model.path to the model that it was made with"
            )
        with torch.no_grad():
            for name, value in weights.items():
                value.copy_(tensors[f"model.{name}"])
        self._adam.state.clear()
        for name in moments:
            parameter = self._parameters[name]
            for moment in _MOMENTS:
                value = tensors[f"optimizer.{moment}.{name}"]
                # AdamW keeps its step counts on the host.
                self._adam.state[parameter][moment] = value.to("cpu" if moment == "step" else parameter.device, copy=True)
        torch.set_rng_state(tensors["rng.torch"])
        if self._device.type == "cuda" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], self._device)
        version, words, gauss = meta["rng"]["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, position, has_gauss, cached = meta["rng"]["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        if self._accelerator.scaler is not None and "scaler" in meta:
            self._accelerator.scaler.load_state_dict(dict(meta["scaler"]))

    def _loss(self, batch: MicroBatch, size: BatchSize) -> TokenLoss:
        """Forward pass and objective of one micro-batch; only the positions from `first` on are looked at."""
        first, settings = batch.first, self._settings
        keep = batch.input_ids.shape[1] - first + 1
        output = self._model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
            **({"logits_to_keep": keep} if self._keeps_logits else {}),
        )
        # The logits at position t are about the token at t + 1.
        logits = output.logits[:, -keep:-1]
        logprobs, entropy = token_logprobs(
            logits,
            batch.input_ids[:, first:],
            batch.temperatures,
            entropy_gradient=settings.entropy_coefficient > 0,
        )
        return policy_loss(
            logprobs,
            proximal=logprobs.detach(),  # One step per batch: the policy at its beginning is the one in hand.
            behaviour=batch.behaviour[:, first:],
            advantages=batch.advantages,
            mask=batch.loss_mask[:, first:],
            entropy=entropy,
            size=size,
            settings=settings,
        )

    def _weights(self) -> dict[str, Tensor]:
        """The state dict, live, each storage once: of tied weights the source, as `save_pretrained` keeps it."""
        everything = self._module.state_dict()
        tied: dict[str, str] = self._module.all_tied_weights_keys
        return {
            name: value
            for name, value in everything.items()
            if not (name in tied and tied[name] in everything and everything[tied[name]].data_ptr() == value.data_ptr())
        }

    def _now(self) -> float:
        """The clock, once the device has done what it was asked to."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _Sums:
    """Sums over micro-batches, kept in float64 on the device and read once."""

    _NAMES = ("loss", "entropy", "clipped", "truncated", "mismatch 0", "mismatch >0", "tokens 0", "tokens >0", "grad_norm")

    def __init__(self, device: torch.device) -> None:
        self._values = torch.zeros(len(self._NAMES) - 1, dtype=torch.float64, device=device)

    def add(self, found: TokenLoss, batch: MicroBatch) -> None:
        fresh = batch.staleness == 0
        tokens = batch.loss_mask.sum(dim=-1)
        parts = (
            found.loss.detach(),
            found.entropy,
            found.clipped,
            found.truncated,
            found.mismatch[fresh].sum(),
            found.mismatch[~fresh].sum(),
            tokens[fresh].sum(),
            tokens[~fresh].sum(),
        )
        self._values += torch.stack([part.double() for part in parts])

    def read(self, grad_norm: Tensor) -> dict[str, float]:
        values = torch.cat([self._values, grad_norm.detach().double().reshape(1)])
        return dict(zip(self._NAMES, values.tolist(), strict=True))


def _load_model(path: str) -> Any:
    """The model in float32, whole: never unpickled, and no tensor left to a random initialisation."""
    hf_logging.disable_progress_bar()  # Standard error is for the log.
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path!r}: can't be loaded: {error}") from error
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ConfigError(
            f"model.path {path!r}: {len(missing)} tensors are missing, {', '.join(missing[:3])} among them: "
            "is the download complete, and is it a causal language model?"
        )
    return model
