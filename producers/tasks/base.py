"""What a producer asks of a task: prompts, and a score for each completion. One file per task beside this one.

Refuses to score in the producer's own process: a scorer may execute what a model wrote (see `scoring`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol


class Prompt(NamedTuple):
    """A prompt as text, and what its scorer needs to judge a completion (plain data: it crosses to another process)."""

    prompt_id: str
    text: str
    reference: Mapping[str, Any]


class Score(NamedTuple):
    """A reward, its named parts, and how scoring went: "ok", "timeout" or "error" (reward 0 for the latter two)."""

    reward: float
    components: dict[str, float]
    outcome: str


class Task(Protocol):
    """Prompts without end, and the name of the function that scores them."""

    name: str

    scorer: str
    """"module:function" of a `(completion_text, reference, params) -> (reward, components)`, imported where it scores."""

    scorer_params: Mapping[str, Any]

    def prompts(self, seed: int) -> Iterator[Prompt]:
        """An endless stream, the same for the same seed."""

    def prompt(self, seed: int, index: int) -> Prompt:
        """The prompt at an index (from 0) of that stream, without a walk through all before it."""
