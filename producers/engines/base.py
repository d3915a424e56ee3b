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


TakePolicy = Callable[[], Policy | None]


class Engine(Protocol):
    """An inference engine that tells, for every token, which policy version sampled it."""

    identity: str
    """Name and version, like "transformers 5.19.0"; goes into every record."""

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
        Raises EngineError.
        """

    def close(self) -> None: ...
