"""The task of the kill tests: count on. Light, because a scoring worker imports it at every start of a producer."""

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

from producers.tasks.base import Prompt


class CountOn:
    """Prompt "n+", reference {"n": n}."""

    name = "count_on"
    scorer = "tests.chaos.task:score"
    scorer_params: Mapping[str, Any] = {}

    def prompts(self, seed: int) -> Iterator[Prompt]:
        return (self.prompt(seed, index) for index in itertools.count())

    def prompt(self, seed: int, index: int) -> Prompt:
        number = random.Random(seed).randrange(10**6) + index
        return Prompt(f"count-{number}", f"{number}+", {"n": number})


def score(completion: str, reference: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """1 for every other text, so that members of a group differ."""
    return float((sum(map(ord, completion)) + reference["n"]) % 2), {}
