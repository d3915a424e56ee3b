"""What a producer asks of an inference engine. One file per engine beside this one.

Refuses to know tasks, Kafka or HTTP. An engine runs in the thread that calls `generate`; it is never called from two.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from echo.trajectory import Sampling
from echo.weights.manifest import Canary, HostTensor


class Adapter(NamedTuple):
    """What a LoRA adapter is put on: the full policy's tensors, and how, as peft's LoraConfig has it (r, lora_alpha, ...)."""

    tensors: Mapping[str, HostTensor]
    config: Mapping[str, Any]


class Policy(NamedTuple):
    """Verified weights, waiting for the engine to take them at its next safe point.

    tensors: by state-dict names; with `adapter`, LoRA's matrices for it, by the names of peft's files
    (base_model.model.<module>.lora_A.weight). canary: what the trainer's model says, for the engine to compare with.
    """

    version: int
    tensors: Mapping[str, HostTensor]
    adapter: Adapter | None = None
    canary: Canary | None = None


class Completion(NamedTuple):
    """One sampled completion of C >= 1 tokens.

    logprobs: C natural logs under the distribution that drew each token (after temperature, top-k and top-p).
    spans: (start_token, policy_version) as in `echo.trajectory`. finish_reason: "stop" or "length".
    """

    token_ids: list[int]
    logprobs: list[float]
    spans: tuple[tuple[int, int], ...]
    finish_reason: str


class Limits(NamedTuple):
    """What an engine's model takes: tokens of prompt and completion together, and token ids below `vocabulary`; None: any."""

    positions: int | None = None
    vocabulary: int | None = None


class Unfit(NamedTuple):
    """Why a prompt can't be sampled from. reason: empty, unknown_token or too_long. why: goes after the prompt's name."""

    reason: str
    why: str


def unfit(token_ids: Sequence[int], max_tokens: int, limits: Limits) -> Unfit | None:
    """What is wrong with a prompt for completions of `max_tokens` tokens; None if nothing is."""
    if not token_ids:
        return Unfit("empty", "has no tokens")
    if min(token_ids) < 0 or (limits.vocabulary is not None and max(token_ids) >= limits.vocabulary):
        return Unfit("unknown_token", f"has a token outside the vocabulary of {limits.vocabulary}")
    if limits.positions is not None and len(token_ids) + max_tokens > limits.positions:
        return Unfit(
            "too_long",
            f"has {len(token_ids)} tokens; with max_tokens {max_tokens} that is beyond the model's {limits.positions} positions"
            ": lower sampling.max_tokens, or give the task shorter prompts",
        )
    return None


TakePolicy = Callable[[], Policy | None]


class Engine(Protocol):
    """An inference engine that tells, for every token, which policy version sampled it."""

    identity: str
    """Name and version, like "transformers 5.19.0"; goes into every record."""

    limits: Limits
    """Prompts beyond them are left out before they get here."""

    @property
    def policy_version(self) -> int:
        """The version that it really samples from; -1 before the first `load`."""

    def load(self, policy: Policy) -> None:
        """Swap the weights in, all or nothing.

        Raises EngineError, with the old weights still serving, where tensors are missing, unknown or of another shape, or
        the engine says something else about the canary than the trainer.
        """

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, take_policy: TakePolicy | None = None
    ) -> list[Completion]:
        """Sample one completion per prompt (repeat a prompt for a group), in order.

        take_policy: asked at the engine's safe points; what it returns is loaded in mid-generation, and the tokens after
        it carry the new version in their spans. `sampling.seed` makes the whole call reproducible.
        Raises EngineError, for a prompt that is `unfit`, too.
        """

    def close(self) -> None: ...
