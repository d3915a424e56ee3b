"""Any data set of reasoning-gym as a task: procedurally generated questions, and the library's own verifiers.

    task:
      name: reasoning_gym
      params: {dataset: spell_backward, dataset_params: {max_word_len: 4}, prompt: "{metadata[word]}=", threshold: 1.0}

Refuses to score in this process: some of the verifiers execute the answer. `score` runs in a scoring worker.
"""

import functools
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import reasoning_gym
from pydantic import Field
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from echo.errors import ConfigError, TaskError
from producers.params import Params, nearest, validate
from producers.tasks.base import IndexedStream, Prompt

# Some data sets prepare all of their items at once, so an endless stream is made of short sets with seeds of their own.
_ITEMS_PER_SEED = 500
# What making an item and its prompt may raise: some data sets execute code of their own, others lack a field in some items.
_ITEM_ERRORS = (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, AssertionError, RuntimeError)


class ReasoningGymParams(Params):
    """`task.params` of the reasoning_gym task."""

    dataset: str
    """A data set of reasoning-gym, like "spell_backward"."""
    dataset_params: dict[str, Any] = Field(default_factory=dict)
    """What that data set takes; its seed and size are not among them."""
    prompt: str = "{question}"
    """Python format string of the prompt, with {question} and the data set's own {metadata[...]}."""
    answer: Literal["text", "exact", "tag"] = "text"
    """What the answer is: the completion without the white space around it, the completion as it is (so that ending it at the
    right place is learned too), or its last <answer>...</answer>."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """The reward is 1 from this score on and else 0; None takes the score (0 to 1, often shaped) as it is."""


class _Part(NamedTuple):
    """A short set of a stream, and the seed that it was made of."""

    seed: int
    items: ProceduralDataset


class ReasoningGym:
    """A `Task`. Raises ConfigError naming the key of the run file that is wrong."""

    name = "reasoning_gym"
    scorer = "producers.tasks.reasoning_gym:score"

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = validate(ReasoningGymParams, params, "task.params")
        if self._params.dataset not in DATASETS:
            known = nearest(self._params.dataset, DATASETS)
            raise ConfigError(f"task.params.dataset: unknown data set {self._params.dataset!r}: {known}")
        for name in ("seed", "size"):
            if name in self._params.dataset_params:
                raise ConfigError(f"task.params.dataset_params.{name} can't be set: task.seed seeds an endless stream")
        self.scorer_params: Mapping[str, Any] = self._params.model_dump()
        # The short set that was used last: streams are walked along.
        self._at: tuple[int, int] | None = None
        self._newest: _Part | None = None
        try:
            item = _dataset(self._params, seed=0, size=1)[0]
        except _ITEM_ERRORS as error:
            raise ConfigError(f"task.params.dataset_params: {self._params.dataset} refuses them: {error}") from error
        try:
            self._prompt(item)
        except (LookupError, AttributeError, ValueError) as error:
            fields = ", ".join(sorted(map(str, item["metadata"])))
            raise ConfigError(f"task.params.prompt: {error!r}; there are {{question}} and, in metadata: {fields}") from error

    def prompts(self, seed: int) -> Iterator[Prompt]:
        """An endless stream, the same for the same seed."""
        return IndexedStream(self, seed)

    def prompt(self, seed: int, index: int) -> Prompt:
        """The prompt at an index of that stream. Raises TaskError where the data set has none there."""
        number, place = divmod(index, _ITEMS_PER_SEED)
        part = self._part(seed, number)
        prompt_id = f"{self._params.dataset}/{part.seed}/{place}"
        try:
            item = part.items[place]
            reference = {name: item[name] for name in ("question", "answer", "metadata")}
            return Prompt(prompt_id, self._prompt(item), reference)
        except _ITEM_ERRORS as error:
            raise TaskError(
                f"task reasoning_gym: item {prompt_id} gives no prompt: {type(error).__name__}: {error}; change "
                "task.params.dataset_params, or task.params.prompt where not every item has what it names"
            ) from error

    def _part(self, seed: int, number: int) -> "_Part":
        """One of the short sets that a stream is made of."""
        where = (seed, number)
        if where != self._at:
            part_seed = random.Random(f"{seed}/{number}").getrandbits(31)
            self._at, self._newest = where, _Part(part_seed, _dataset(self._params, seed=part_seed, size=_ITEMS_PER_SEED))
        assert self._newest is not None
        return self._newest

    def _prompt(self, item: Mapping[str, Any]) -> str:
        return self._params.prompt.format(question=item["question"], metadata=item["metadata"])


def score(completion: str, reference: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """The reward, and the library's own score as its component "score". Call it in a scoring worker only."""
    wanted, verifier = _verifier(json.dumps(dict(params), sort_keys=True))
    value = float(verifier.score_answer(_answer(completion, wanted.answer), entry=dict(reference)))
    reward = value if wanted.threshold is None else float(value >= wanted.threshold)
    return reward, {"score": value}


def _answer(completion: str, where: str) -> str | None:
    if where == "tag":
        return extract_answer(completion)
    return completion if where == "exact" else completion.strip()


@functools.lru_cache(maxsize=4)
def _verifier(params: str) -> tuple[ReasoningGymParams, ProceduralDataset]:
    wanted = ReasoningGymParams(**json.loads(params))
    return wanted, _dataset(wanted, seed=0, size=1)


def _dataset(params: ReasoningGymParams, *, seed: int, size: int) -> ProceduralDataset:
    return reasoning_gym.create_dataset(params.dataset, seed=seed, size=size, **params.dataset_params)
