"""What the producer's loop works with: everything outside it, each behind the smallest protocol that it needs.

Refuses to make any of them: `wiring` makes the real ones, tests hand in fakes.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from echo.log import LogProducer, LogReader
from echo.topic_spec import TopicNames
from echo.topic_watch import Ask
from producers.engines.base import Engine
from producers.fetch import PullClient
from producers.tasks.base import Score, Task


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Scorer(Protocol):
    """Scores completions in another process (`producers.tasks.scoring.ScorerPool`)."""

    def score(self, items: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Score]: ...

    def close(self) -> None: ...


class Stop(Protocol):
    """Tells that a planned stop was asked for (`echo.process.StopSignal`, `threading.Event`)."""

    def is_set(self) -> bool: ...


class Collaborators(NamedTuple):
    """Everything outside the loop. It closes none of them, except the readers that `open_reader` makes.

    topic_states: which of the named topics exist, as they are now. model: digests of the model's files
    (`echo.agreement.model_files`).
    """

    topics: TopicNames
    topic_states: Ask
    producer: LogProducer
    open_reader: Callable[[], LogReader]
    weights: PullClient
    engine: Engine
    tokenizer: Tokenizer
    task: Task
    scorer: Scorer
    model: Mapping[str, str] = MappingProxyType({})
