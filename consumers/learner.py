"""The learner: groups in, one optimiser step, weights out. One process, or several ranks (see `parallel.py`) that act as one.

Refuses to know Kafka, HTTP or files other than the model's own; when to step, publish and save is `train.py`'s business.

Numbers. Master weights, gradients and moments are float32. `model.dtype` is what the forward and backward passes compute in
(autocast; float16 adds loss scaling and needs a GPU). `weights.dtype` is what is published. Dropout is off: the policy that
is trained is the one that samples.

Logprobs are of softmax(logits / temperature), the temperature of each trajectory, so that they are comparable with the
behaviour logprobs in the record. Records sampled with top-p < 1 or top-k > 0 carry logprobs renormalised over the tokens that
were kept, which the learner can't rebuild: its own are lower by -log(kept mass), so importance weights are too small by that
factor, and mismatch_kl shows it. Prefer full sampling where the correction matters.

On a CPU with a fixed number of threads, equal seeds and inputs give equal bits, also across `state` and `load_state`.

Ranks share out a batch's micro-batches; what is summed over them is divided by what the whole batch holds, so that the gradient
is that of one process, up to rounding, however many ranks there are.
"""

import copy
import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from accelerate.utils import set_seed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from consumers import batching
from consumers.batching import MicroBatch
from consumers.groups import Group
from consumers.handover import pack, unpack
from consumers.model import Policy, host_tensor
from consumers.objectives import BatchSize, Settings, TokenLoss, policy_loss, token_logprobs
from consumers.parallel import Command, Team, whole
from consumers.step import Clock, StepStats, Sums, marking_last, schedule
from echo.config import RunConfig
from echo.errors import CheckpointError, ConfigError, RecordError
from echo.weights import canary as canaries
from echo.weights.manifest import Canary, HostTensor

log = structlog.get_logger("learner")

_TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Learner:
    """Model and optimiser of one run. Every rank has one; those that don't lead live in `follow`.

    team: the ranks, found from the environment by default. identity: the model's name, for records and manifests. positions:
    tokens that a row may have, None without a bound.
    Raises ConfigError where the model can't be loaded or the settings don't fit this host.
    """

    def __init__(self, run: RunConfig, team: Team | None = None) -> None:
        if run.sampling.group_size < 2 and run.learner.steps:
            # Every advantage and every preference would be 0: steps that look well and change nothing.
            raise ConfigError(
                "sampling.group_size is 1: a reward counts against others of its group, so nothing is learned: take 2 or more"
            )
        self._run = run
        self._settings = Settings.of(run.learner, fixed_length=run.sampling.max_tokens)
        if run.learner.threads:
            torch.set_num_threads(run.learner.threads)
        set_seed(run.seed)
        self._team = team or team_of(run)
        self._accelerator, self._device = self._team.accelerator, self._team.device
        self.identity = Path(run.model.path).name if Path(run.model.path).is_dir() else run.model.path
        with self._team.together(Command.BUILD, lambda: _agreed(run)):
            self._policy = Policy(run.model.path, lora=run.learner.lora, recompute=run.learner.gradient_checkpointing)
            self.vocabulary, self.positions = self._policy.vocabulary, self._policy.positions
            if self.positions is not None and (run.batch.max_tokens or 0) > self.positions:
                raise ConfigError(f"batch.max_tokens is {run.batch.max_tokens}, {self.identity} has {self.positions} positions")
            self._module = self._policy.module
            self._team.level(self._module)
            self._reference = self._make_reference()
            self._model = self._team.wrap(self._module)
        self._parameters = self._policy.trained
        self._adam = torch.optim.AdamW(
            self._parameters.values(),
            lr=run.learner.lr,
            betas=run.learner.betas,
            weight_decay=run.learner.weight_decay,
        )
        self._optimizer = self._accelerator.prepare(self._adam)
        self._schedule = schedule(run.learner)
        self._steps = 0
        if run.sampling.top_p < 1 or run.sampling.top_k > 0:
            log.warning(
                "top_p or top_k cuts the sampling distribution; importance weights are too small by the mass that was kept",
                top_p=run.sampling.top_p,
                top_k=run.sampling.top_k,
            )

    @property
    def ranks(self) -> int:
        return self._team.size

    def check_ranks(self) -> None:
        """Raise RankError where another rank is gone. To be asked while there is nothing to step on."""
        self._team.check()

    def follow(self) -> None:
        """What every rank but the first does: its part in each command, until the run ends. Raises RankError."""
        while True:
            command, payload = self._team.listen()
            if command is Command.STEP:
                self.step(*unpack(payload))
            elif command is Command.PUBLISH:
                for _ in self.host_tensors():
                    pass
            elif command is Command.ADAPTERS:
                for _ in self.adapter_tensors():
                    pass
            elif command is Command.BASE:
                for _ in self.base_tensors():
                    pass
            elif command is Command.CANARY:
                self.canary()
            elif command is Command.STATE:
                self.state()
            elif command is Command.LOAD:
                self._receive_state(payload)
            else:
                assert command is Command.END, command
                return

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
        started = self._now()
        with self._team.together(Command.STEP, lambda: pack(groups, newest_version)):
            return self._step(groups, newest_version, started)

    def _step(self, groups: Sequence[Group], newest_version: int, started: float) -> StepStats:
        rows = batching.make_rows(groups, newest_version, self._run.learner.judgement)
        loss_tokens = sum(int(row.trajectory.loss_mask.sum()) for row in rows)
        for group in self._adam.param_groups:
            group["lr"] = self._run.learner.lr * self._schedule(self._steps)
        sums = Sums(self._device)
        budget = self._run.learner.tokens_per_microbatch
        parts = batching.micro_batches(rows, budget, ranks=self._team.size, rank=self._team.rank)
        clock = Clock(self._now, started)
        for part, last in marking_last(parts):
            batch = part.to(self._device)
            clock.lap("unpack")
            with self._accumulating(last=last):
                found = self._loss(batch, BatchSize(len(rows), loss_tokens))
                sums.add(found, batch)
                clock.lap("forward")
                # Ranks average their gradients; what is wanted is the sum.
                self._accelerator.backward(found.loss * self._team.size if self._team.size > 1 else found.loss)
                clock.lap("backward")
        norm = whole(self._accelerator.clip_grad_norm_(list(self._parameters.values()), self._run.learner.grad_clip))
        total = sums.read(norm, self._team)
        skipped = loss_tokens == 0 or not (np.isfinite(total["loss"]) and np.isfinite(total["grad_norm"]))
        if not skipped:
            self._optimizer.step()
        elif self._accelerator.scaler is not None:
            self._accelerator.scaler.update()  # An overflow lowers the scale: the next step may fit.
        self._optimizer.zero_grad()
        self._steps += 1
        clock.lap("backward")
        if skipped and self._team.leads:
            log.warning("step skipped", loss=total["loss"], grad_norm=total["grad_norm"], loss_tokens=loss_tokens)
        rewards = [member.trajectory.reward for group in groups for member in group.members]
        with np.errstate(over="ignore", invalid="ignore"):  # Of absurd rewards, whose step was left out.
            reward_mean, reward_std = float(np.mean(rewards)), float(np.std(rewards))
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
            ess_ratio=total["weight"] ** 2 / (tokens * total["weight squared"]) if total["weight squared"] else 0.0,
            reference_kl=total["reference"] / tokens,
            learning_rate=float(self._adam.param_groups[0]["lr"]),
            tokens=sum(row.trajectory.token_count for row in rows),
            loss_tokens=loss_tokens,
            reward_mean=reward_mean,
            reward_std=reward_std,
            staleness=[row.staleness for row in rows],
            seconds=clock.seconds,
            skipped=skipped,
        )

    def host_tensors(self) -> Iterator[HostTensor]:
        """The policy in `weights.dtype`, tensor by tensor, by HF state-dict name, adapters merged; of tied weights the source.

        Each tensor's bytes are a copy of their own. Iterate to the end before the next step.
        """
        with self._gathering(Command.PUBLISH):
            for name, value in self._policy.weights():
                yield host_tensor(name, value, _TORCH_DTYPE[self._run.weights.dtype])

    def adapter_tensors(self) -> Iterator[HostTensor]:
        """The adapters alone, in float32 as they are trained, by the names of peft's files; nothing without learner.lora.

        To be iterated as `host_tensors` is.
        """
        if not self._policy.lora:
            return
        with self._gathering(Command.ADAPTERS):
            for name, value in self._policy.adapters():
                yield host_tensor(name, value, torch.float32)

    def base_tensors(self) -> Iterator[HostTensor]:
        """What the adapters are put on, as `host_tensors` gives it: the same bytes at any step."""
        with self._gathering(Command.BASE):
            for name, value in self._policy.weights(merged=False):
                yield host_tensor(name, value, _TORCH_DTYPE[self._run.weights.dtype])

    def canary(self) -> Canary | None:
        """What the policy says about a fixed text, for producers to compare with; None where it says nothing sound."""
        token_ids = canaries.token_ids(self.vocabulary, self.positions)
        ids = torch.tensor([token_ids], device=self._device)
        with self._gathering(Command.CANARY), torch.no_grad(), self._accelerator.autocast():
            logits = self._module(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = logits.float().log_softmax(dim=-1).gather(-1, ids[:, 1:, None]).flatten().tolist()
        if not np.isfinite(logprobs).all():
            log.error("the policy is not sound: it gives logprobs that are not finite", model=self.identity)
            return None
        return Canary(token_ids=token_ids, logprobs=tuple(logprobs))

    @property
    def adapter_config(self) -> dict[str, Any]:
        """How to put the adapters on the base, see `Policy.adapter_config`."""
        return self._policy.adapter_config

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next step depends on: named tensors, whole whatever the ranks, and a JSON-able rest.

        Tensors are the live ones where they are on the CPU already: save them before the next step. Hyperparameters are not
        part of it, they are the run file's; nor is the frozen base of adapters, which is `model.path`'s.
        """
        with self._gathering(Command.STATE):
            tensors = {f"model.{name}": whole(value).cpu() for name, value in self._policy.held().items()}
            for name, parameter in self._parameters.items():
                for moment, value in self._adam.state.get(parameter, {}).items():
                    tensors[f"optimizer.{moment}.{name}"] = whole(value.detach()).cpu()
        tensors["rng.torch"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self._device)
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        meta: dict[str, Any] = {
            "identity": self.identity,
            "base": self._policy.base_digest,
            "steps": self._steps,
            "rng": {
                "python": [version, list(words), gauss],
                "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
            },
        }
        if self._accelerator.scaler is not None:
            meta["scaler"] = self._accelerator.scaler.state_dict()
        return tensors, meta

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Become what `state` described, also where that had another number of ranks: with one process, and the same number of
        threads, the steps that follow are the same, bit for bit.

        Raises CheckpointError, with nothing changed, where tensors are missing or of another model.
        """
        held = self._policy.held()
        moments = [name for name in self._parameters if f"optimizer.step.{name}" in tensors]
        shapes = {f"model.{name}": value.shape for name, value in held.items()}
        for name in moments:
            shapes |= {f"optimizer.{moment}.{name}": self._parameters[name].shape for moment in ("exp_avg", "exp_avg_sq")}
        shapes["rng.torch"] = torch.get_rng_state().shape
        wrong = [name for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape]
        wrong += sorted(tensors.keys() - {*shapes, *(f"optimizer.step.{name}" for name in moments), "rng.cuda"})
        if wrong:
            raise CheckpointError(
                f"the checkpoint is not of model {self.identity!r}: {len(wrong)} tensors are missing, unknown or of another "
                f"shape ({', '.join(wrong[:3])}): set model.path and learner.lora as they were when it was made"
            )
        if meta.get("base", "") != self._policy.base_digest:
            raise CheckpointError(
                f"the checkpoint's adapters are of another base than model.path {self._run.model.path!r}: set the one they had"
            )
        kinds = {name: (str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in tensors.items()}
        with self._team.together(Command.LOAD, lambda: json.dumps({"tensors": kinds, "meta": dict(meta)}).encode()):
            self._become(((name, self._team.from_leader(tensors[name].contiguous())) for name in kinds), meta)

    def _receive_state(self, payload: bytes) -> None:
        """A follower's `load_state`: the tensors come from rank 0, one at a time."""
        told = json.loads(payload)
        empty = ((name, torch.empty(shape, dtype=getattr(torch, dtype))) for name, (dtype, shape) in told["tensors"].items())
        with self._team.together(Command.LOAD):
            self._become(((name, self._team.from_leader(value)) for name, value in empty), told["meta"])

    def _become(self, tensors: Iterable[tuple[str, Tensor]], meta: Mapping[str, Any]) -> None:
        held = self._policy.held()
        self._adam.state.clear()
        for name, value in tensors:
            kind, _, rest = name.partition(".")
            if kind == "model":
                with torch.no_grad():
                    held[rest].copy_(self._team.local(value, held[rest]))
            elif kind == "optimizer":
                moment, _, place = rest.partition(".")
                parameter = self._parameters[place]
                # AdamW keeps its step counts on the host.
                part = value.clone() if moment == "step" else self._team.local(value, parameter.detach()).clone()
                self._adam.state[parameter][moment] = part
            elif name == "rng.torch":
                torch.set_rng_state(value)
            elif self._device.type == "cuda":
                torch.cuda.set_rng_state(value, self._device)
        self._steps = int(meta.get("steps", 0))
        version, words, gauss = meta["rng"]["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, position, has_gauss, cached = meta["rng"]["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        if self._accelerator.scaler is not None and "scaler" in meta:
            self._accelerator.scaler.load_state_dict(dict(meta["scaler"]))

    def _gathering(self, command: Command) -> AbstractContextManager[None]:
        """Sharded tensors are gathered by all ranks together; whole ones need nobody else."""
        return nullcontext() if self._team.sharding == "none" else self._team.together(command)

    def _accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Whole gradients are averaged over ranks once, after the last micro-batch; sharded ones each time: they must fit."""
        if last or not isinstance(self._model, DistributedDataParallel):
            return nullcontext()
        return self._model.no_sync()

    def _make_reference(self) -> Any:
        """The initial policy, frozen, where the objective asks for one: a second model, or the base without its adapters."""
        if not self._run.learner.needs_reference or self._policy.lora:
            return None
        return self._team.shard(copy.deepcopy(self._module).requires_grad_(False))

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if not self._run.learner.needs_reference:
            return None
        bare = self._module.disable_adapter() if self._policy.lora else nullcontext()
        with torch.no_grad(), bare:
            return self._logprobs(self._reference if self._reference is not None else self._module, batch)[0]

    def _logprobs(self, model: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Logprobs of the tokens from position `first` on, and entropies, (N, T - first) each; only there logits are made."""
        keep = batch.input_ids.shape[1] - batch.first + 1
        with self._accelerator.autocast():
            output = model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                use_cache=False,
                **({"logits_to_keep": keep} if self._policy.keeps_logits else {}),
            )
        # The logits at position t are about the token at t + 1.
        return token_logprobs(
            output.logits[:, -keep:-1],
            batch.input_ids[:, batch.first :],
            batch.temperatures,
            entropy_gradient=self._settings.entropy_coefficient > 0,
        )

    def _loss(self, batch: MicroBatch, size: BatchSize) -> TokenLoss:
        """Forward pass and objective of one micro-batch."""
        first, settings = batch.first, self._settings
        reference = self._reference_logprobs(batch)
        logprobs, entropy = self._logprobs(self._model, batch)
        return policy_loss(
            logprobs,
            proximal=logprobs.detach(),  # One step per batch: the policy at its beginning is the one in hand.
            behaviour=batch.behaviour[:, first:],
            advantages=batch.advantages,
            mask=batch.loss_mask[:, first:],
            entropy=entropy,
            size=size,
            settings=settings,
            reference=reference,
        )

    def _now(self) -> float:
        """The clock, once the device has done what it was asked to."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def team_of(run: RunConfig) -> Team:
    """The ranks of this run's trainer. Raises ConfigError, RankError."""
    return Team(precision=run.model.dtype, timeout_s=run.learner.rank_timeout_s, sharding=run.learner.sharding)


def follow(run: RunConfig) -> None:
    """A rank other than the first, from its start to the end of the run. Raises ConfigError, RankError."""
    with team_of(run) as team:
        log.info("rank follows", rank=team.rank, ranks=team.size)
        command, payload = team.listen()
        if command is Command.BUILD:
            if payload != _agreed(run):
                raise ConfigError(f"rank {team.rank} has another run file than rank 0: model, learner or sampling differ")
            Learner(run, team).follow()


def _agreed(run: RunConfig) -> bytes:
    """What ranks must have in common, beside the model's weights, which rank 0 gives to all."""
    part = run.model_dump_json(
        include={"seed": True, "model": {"dtype"}, "learner": True, "sampling": True, "weights": {"dtype"}}
    )
    return part.encode()
