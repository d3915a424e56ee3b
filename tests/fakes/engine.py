"""A small engine without a model, and the other collaborators of the producer's loop, for tests that drive it.

The engine keeps the contract of `producers.engines.base`: it asks for a policy before every token, and its spans are right.
A test may stop it at a token (`before_token`), and may make it refuse versions or break of them.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from echo.errors import EngineError, PullCancelled, WeightsError
from echo.trajectory import Sampling
from echo.weights.clock import Difference
from echo.weights.manifest import HostTensor, Manifest
from producers.engines.base import Completion, Limits, Policy, TakePolicy
from producers.fetch import Pulled
from producers.tasks.base import IndexedStream, Prompt, Score


class FakeEngine:
    """Samples `tokens` tokens per completion. calls: (version at the start, prompts, sampling) of every `generate`."""

    identity = "fake 1.0"

    def __init__(
        self, *, tokens: int = 3, before_token: Callable[[int], None] | None = None, limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self._tokens = tokens
        self._before_token = before_token or (lambda index: None)
        self._version = -1
        self.refuses: set[int] = set()
        self.breaks: set[int] = set()
        self.loads: list[int] = []
        self.calls: list[tuple[int, int, Sampling]] = []

    @property
    def policy_version(self) -> int:
        return self._version

    def load(self, policy: Policy) -> None:
        if policy.version in self.refuses:
            raise EngineError(f"policy {policy.version} does not fit this model")
        if policy.version in self.breaks:
            self._version = -1
            raise EngineError(f"policy {policy.version} broke off half-way, nothing can be sampled now")
        self._version = policy.version
        self.loads.append(policy.version)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, take_policy: TakePolicy | None = None
    ) -> list[Completion]:
        self.calls.append((self._version, len(prompts), sampling))
        draw = random.Random(sampling.seed)
        spans: list[tuple[int, int]] = []
        for index in range(self._tokens):
            self._before_token(index)
            policy = take_policy() if take_policy is not None else None
            if policy is not None:
                self.load(policy)
            if not spans or spans[-1][1] != self._version:
                spans.append((index, self._version))
        return [
            Completion(
                [draw.randrange(3, 100) for _ in range(self._tokens)],
                [-draw.random() for _ in range(self._tokens)],
                tuple(spans),
                "stop",
            )
            for _ in prompts
        ]

    def close(self) -> None: ...


class FakeTokenizer:
    """A token is a character's code point."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids)


class FakeTask:
    """Counts: prompt "n", reference {"n": n}; its stream's first number follows from the seed."""

    name = "count"
    scorer = "tests.fakes.engine:score"
    scorer_params: Mapping[str, Any] = {}

    def prompts(self, seed: int) -> Iterator[Prompt]:
        return IndexedStream(self, seed)

    def prompt(self, seed: int, index: int) -> Prompt:
        number = random.Random(seed).randrange(10**6) + index
        return Prompt(f"count-{number}", str(number), {"n": number})


def score(completion: str, reference: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """The same in a real scoring worker: 1 where the completion has an odd number of characters."""
    return float(len(completion) % 2), {}


class FakeScorer:
    """Scores in this process: rewards a completion with its first token's code point modulo 2; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def score(self, items: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Score]:
        self.asked.extend(items)
        rewards = [float(ord(text[0]) % 2) for text, _ in items]
        return [Score(reward, {"odd": reward}, "ok") for reward in rewards]

    def close(self) -> None: ...


class FakePulled(NamedTuple):
    tensors: Mapping[str, HostTensor]
    manifest: Manifest
    manifest_digest: str = ""
    received_bytes: int = 4
    peer_bytes: int = 1
    seconds: float = 0.01
    retries: int = 0
    patched: int = 0


class FakeWeights:
    """A weight client whose pulls end when the test allows: at once, unless `hold` names the version.

    fails: versions whose pull raises, as long as they are in it. asked, pulled, cancelled: versions, in order. had: for each
    that was pulled, the version that was held.
    """

    def __init__(self) -> None:
        self.fails: set[int] = set()
        self.clocks: Difference | None = None
        self.asked: list[int] = []
        self.pulled: list[int] = []
        self.cancelled: list[int] = []
        self.had: list[int | None] = []
        self._held: set[int] = set()
        self._changed = threading.Condition()

    def hold(self, version: int) -> None:
        with self._changed:
            self._held.add(version)

    def release(self, version: int) -> None:
        with self._changed:
            self._held.discard(version)
            self._changed.notify_all()

    def pull(
        self,
        manifest_urls: Sequence[str],
        *,
        run_id: str,
        version: int,
        manifest_digest: str,
        deadline_s: float,
        cancelled: Callable[[], bool],
        have: Pulled | None,
        progress: Callable[[int, int], None] | None,
    ) -> FakePulled:
        with self._changed:
            self.asked.append(version)
            while version in self._held:
                if cancelled():
                    self.cancelled.append(version)
                    raise PullCancelled(f"pull of version {version} was cancelled")
                self._changed.wait(0.01)
        if version in self.fails:
            raise WeightsError(f"{manifest_urls[0]}: no answer", retriable=True)
        data = memoryview(version.to_bytes(4, "little"))
        self.pulled.append(version)
        manifest = Manifest(schema="2.0", run_id=run_id, version=version, step=version, created=0.0, tensors=())
        self.had.append(have.manifest.version if have is not None else None)
        return FakePulled({"w": HostTensor("w", "I32", (1,), data)}, manifest)

    def clock_difference(self) -> Difference | None:
        return self.clocks

    def check(self) -> None: ...
