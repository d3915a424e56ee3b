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
        """An endless stream, the same for the same seed.

        Where an item gives no prompt it raises, and gives the next one when it is asked again (`IndexedStream` does; a
        generator ends when it raises).
        """

    def prompt(self, seed: int, index: int) -> Prompt:
        """The prompt at an index (from 0) of that stream, without a walk through all before it; it raises where that does."""


class IndexedStream:
    """The stream of a task whose prompts are found by their index: an item that raises does not end it."""

    def __init__(self, task: Task, seed: int) -> None:
        self._task = task
        self._seed = seed
        self._next = 0

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        index, self._next = self._next, self._next + 1
        return self._task.prompt(self._seed, index)
