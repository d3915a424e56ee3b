"""The transformers engine: batched sampling with a KV cache, on a CPU or one GPU, with any causal language model of attention.

Refuses to sample before the first `load`: the model folder gives architecture and end tokens, weights come from policies
only. Every logprob is of the very distribution that drew the token, computed in float32.

Its safe point is every token boundary. A policy taken there replaces the weights, the KV cache is computed anew under
them, and so each later token is drawn from exactly what the new policy says about the whole prefix.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog
import torch
import transformers
from pydantic import Field
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig

from echo.config import RunConfig
from echo.errors import EngineError
from echo.model_path import check_model_path, unloadable
from echo.trajectory import Sampling
from echo.weights import canary
from producers.engines import loading
from producers.engines.base import Completion, Limits, Policy, TakePolicy, unfit
from producers.params import Params, validate

log = structlog.get_logger("engine")

# Rows that have ended cost time until they leave the batch; making the batch smaller copies its KV cache, about the
# memory traffic of one more token. From a quarter of ended rows on, the copy pays within a few tokens.
_SHRINK_FROM = 0.25


class TransformersParams(Params):
    """`producer.engine_params` of the transformers engine."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto is the first GPU where there is one, else the CPU."""
    attention: str | None = None
    """Attention implementation of transformers ("sdpa", "eager", ...); None leaves the model's own choice."""


def from_run(run: RunConfig) -> "TransformersEngine":
    """Build it from a run file. Raises ConfigError for its params, EngineError where the model can't be built."""
    params = validate(TransformersParams, run.producer.engine_params, "producer.engine_params")
    if run.producer.threads:
        torch.set_num_threads(run.producer.threads)
    return TransformersEngine(run.model.path, dtype=run.weights.dtype, device=params.device, attention=params.attention)


class TransformersEngine:
    """An `Engine` over one transformers model.

    model: a Hugging Face folder or hub id; its config, and its generation config's end tokens, are used.
    dtype: "float32", "bfloat16" or "float16", what it computes in.
    """

    def __init__(self, model: str, *, dtype: str, device: str = "auto", attention: str | None = None) -> None:
        self.identity = f"transformers {transformers.__version__}"
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        options = {} if attention is None else {"attn_implementation": attention}
        check_model_path(model)
        try:
            config = AutoConfig.from_pretrained(model)
        except (OSError, ValueError, ImportError) as error:
            raise EngineError(unloadable(model, "can't be loaded", error)) from error
        try:
            with self._device:
                self._model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **options)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise EngineError(f"model {model}: can't be built on {device}: {error}") from error
        self._model.requires_grad_(False)
        self._model.eval()
        self._cache_name = _cache_name(model, self._model, self._device)
        self._end_ids = torch.tensor(_end_ids(model, config), dtype=torch.long, device=self._device)
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        self.limits = Limits(getattr(config.get_text_config(), "max_position_embeddings", None), self._vocabulary)
        self._dtype = dtype
        self._version = -1
        # Its host tensors, to go back to where the next one is refused.
        self._policy: Policy | None = None

    @property
    def policy_version(self) -> int:
        """The version that it really samples from; -1 before the first `load`, or after one that broke half-way."""
        return self._version

    def load(self, policy: Policy) -> None:
        """Swap the weights in, all or nothing. See `Engine.load`; tied tensors may be given under any of their names.

        A floating-point tensor of another precision is converted. A version that is not above the present one is refused.
        """
        if policy.version <= self._version:
            raise EngineError(
                f"policy {policy.version} does not come after policy {self._version}, which is being sampled from"
            )
        steps = loading.plan(self._model, policy)
        former = self._policy
        # Whatever breaks from here on (memory, the device) must not leave a mixture that passes for a policy.
        self._version, self._policy = -1, None
        try:
            loading.apply(steps)
            problem = self._ask_canary(policy)
            if problem is not None and former is not None:
                loading.apply(loading.plan(self._model, former))
        except RuntimeError as error:
            raise EngineError(f"policy {policy.version} broke off half-way, nothing can be sampled now: {error}") from error
        served = policy if problem is None else former
        if served is not None:
            self._version, self._policy = served.version, served
        if problem is not None:
            raise EngineError(f"policy {policy.version} is refused: {problem}")
        log.debug("policy loaded", version=policy.version, tensors=len(steps))

    @torch.inference_mode()
    def _ask_canary(self, policy: Policy) -> str | None:
        """Why what was just loaded can't be what the trainer published; None where it may be, or nobody said."""
        if policy.canary is None:
            return None
        token_ids = policy.canary.token_ids
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocabulary:
            return f"its canary has token ids outside this model's vocabulary of {self._vocabulary}"
        ids = torch.tensor([token_ids], device=self._device)
        logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = logits.float().log_softmax(dim=-1).gather(-1, ids[:, 1:, None]).flatten().tolist()
        return canary.problem(policy.canary, logprobs, self._dtype)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, take_policy: TakePolicy | None = None
    ) -> list[Completion]:
        """See `Engine.generate`. Asks `take_policy` before every token. A policy that can't be loaded ends the call with
        EngineError; the old one still serves the next."""
        self._check(prompts, sampling)
        if not prompts:
            return []
        try:
            return self._generate(prompts, sampling, take_policy)
        except RuntimeError as error:
            raise EngineError(f"sampling {len(prompts)} completions from policy {self._version} failed: {error}") from error

    def close(self) -> None:
        """Give the model's memory back. The engine can't be used afterwards."""
        self._version, self._policy = -1, None
        del self._model

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, take_policy: TakePolicy | None
    ) -> list[Completion]:
        generator = torch.Generator(self._device)
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        batch = _Batch(prompts, self._device)
        rows = [_Row() for _ in prompts]
        for index in range(sampling.max_tokens):
            policy = take_policy() if take_policy is not None else None
            if policy is not None:
                self.load(policy)
                batch.cache = None
            if self._version < 0:
                raise EngineError("no policy is loaded: load one, or wait for the first announcement, before sampling")
            logits = self._forward(batch)
            tokens, logprobs = draw(logits, sampling, generator)
            ended = torch.isin(tokens, self._end_ids)
            self._record(index, rows, batch, tokens, logprobs, ended)
            if not batch.advance(tokens, ended):
                break
        return [row.completion() for row in rows]

    def _forward(self, batch: "_Batch") -> torch.Tensor:
        """Logits (rows, V), float32, of each row's next token; fills or extends the batch's KV cache."""
        if batch.cache is None:
            batch.drop_ended()
            fresh = batch.ids
            held = {}
        else:
            fresh = batch.ids[:, -1:]
            held = {self._cache_name: batch.cache}
        positions = batch.mask.cumsum(dim=1)[:, -fresh.shape[1] :].sub_(1).clamp_(min=0)
        output = self._model(
            input_ids=fresh,
            attention_mask=batch.mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **held,
        )
        batch.cache = output[self._cache_name]
        return output.logits[:, -1].float()

    def _record(
        self,
        index: int,
        rows: list["_Row"],
        batch: "_Batch",
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
        ended: torch.Tensor,
    ) -> None:
        values = zip(batch.owners, batch.alive, tokens.tolist(), logprobs.tolist(), ended.tolist(), strict=True)
        for owner, alive, token, logprob, end in values:
            if not alive:
                continue
            if not math.isfinite(logprob):
                raise EngineError(f"policy {self._version} gives logprob {logprob} at token {index}: its weights are not sound")
            rows[owner].append(token, logprob, self._version, end)

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        if not sampling.temperature > 0:
            raise EngineError(f"temperature is {sampling.temperature}: it must be above 0 (top_k=1 is greedy)")
        if not 0 < sampling.top_p <= 1 or sampling.top_k < 0 or sampling.max_tokens < 1:
            raise EngineError(f"sampling can't be done: {sampling}")
        if sampling.logprob_mode != "processed":
            raise EngineError(f"logprob_mode {sampling.logprob_mode!r}: this engine records processed logprobs")
        for index, prompt in enumerate(prompts):
            problem = unfit(prompt, sampling.max_tokens, self.limits)
            if problem is not None:
                raise EngineError(f"prompt {index} {problem.why}")


class _Row:
    """What was sampled for one prompt so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[tuple[int, int]] = []
        self.ended = False

    def append(self, token: int, logprob: float, version: int, end: bool) -> None:
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((len(self.token_ids), version))
        self.token_ids.append(token)
        # Rounding may leave a logprob a hair above 0.
        self.logprobs.append(min(logprob, 0.0))
        self.ended = end

    def completion(self) -> Completion:
        return Completion(self.token_ids, self.logprobs, tuple(self.spans), "stop" if self.ended else "length")


class _Batch:
    """The rows that are being decoded, left-padded so that all of them end at the same column.

    ids, mask: int64 (rows, T). owners: the prompt that each row belongs to. alive: False once it has ended.
    cache: the KV cache of all columns but the last, None where it has to be computed.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        width = max(len(prompt) for prompt in prompts)
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        mask = np.zeros((len(prompts), width), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        self.ids = torch.from_numpy(ids).to(device)
        self.mask = torch.from_numpy(mask).to(device)
        self.owners = list(range(len(prompts)))
        self.alive = [True] * len(prompts)
        self.cache: DynamicCache | None = None

    def advance(self, tokens: torch.Tensor, ended: torch.Tensor) -> bool:
        """Append one token to every row and let ended rows go where that is worthwhile. False when none is alive."""
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self.alive = [alive and not end for alive, end in zip(self.alive, ended.tolist(), strict=True)]
        left = sum(self.alive)
        if left and len(self.alive) - left >= _SHRINK_FROM * len(self.alive):
            self.drop_ended()
        return left > 0

    def drop_ended(self) -> None:
        """Keep the rows that are alive."""
        if all(self.alive):
            return
        keep = [row for row, alive in enumerate(self.alive) if alive]
        index: Any = torch.tensor(keep, device=self.ids.device)
        self.ids, self.mask = self.ids[index], self.mask[index]
        self.owners = [self.owners[row] for row in keep]
        self.alive = [True] * len(keep)
        if self.cache is not None:
            self.cache.reorder_cache(index)


def draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row: temperature, then top-k, then top-p of what is left.

    logits: float32 (rows, V). Returns int64 (rows,) tokens and float32 (rows,) natural logs of the probabilities with
    which they were drawn.
    """
    logprobs = processed_logprobs(logits, sampling)
    # argmax(p / Exp(1) noise) draws from p, in one pass and without a host round trip.
    noise = torch.empty_like(logprobs).exponential_(generator=generator)
    tokens = (logprobs.exp() / noise).argmax(dim=-1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def processed_logprobs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The sampling distribution's natural logs, float32 (rows, V), -inf for tokens that top-k or top-p exclude."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(dim=-1)
        # The token that crosses top_p is kept, so that at least one is.
        beyond = probabilities.cumsum(dim=-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    return logits.log_softmax(dim=-1)


@torch.inference_mode()
def _cache_name(path: str, model: Any, device: torch.device) -> str:
    """The argument that hands a model the key-value cache of the tokens before, which is also that cache's name in its output.

    Asked of the model itself, by two tokens: releases of transformers and kinds of models name it differently, and some take
    the argument and keep a state of their own. A `DynamicCache` of both tokens has keys and values: padding can be masked, and
    rows can be left out. A recurrent state (Mamba, RWKV, ...) takes padding for tokens. Raises EngineError if there is none.
    """
    ids = torch.zeros((1, 2), dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    kind = type(model).__name__
    try:
        output = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=True, logits_to_keep=1
        )
    except (RuntimeError, TypeError, ValueError) as error:
        raise EngineError(f"model {path}: {kind} can't be sampled from token by token: {error}") from error
    for name, value in output.items():
        if type(value) is DynamicCache and _tokens(value) == ids.shape[1]:
            return str(name)
    raise EngineError(
        f"model {path}: {kind} gives no key-value cache of all its tokens, and this engine samples with one:"
        " take a model with attention layers"
    )


def _tokens(cache: DynamicCache) -> int:
    """How many tokens a cache has keys and values of."""
    try:
        return int(cache.get_seq_length())
    except ValueError:  # It has no layer of attention.
        return 0


def _end_ids(model: str, config: Any) -> list[int]:
    """The tokens that end a completion: of the generation config, else of the model config; there may be none."""
    try:
        end = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        end = None
    if end is None:
        end = config.get_text_config().eos_token_id
    if end is None:
        return []
    return list(end) if isinstance(end, list | tuple) else [int(end)]
