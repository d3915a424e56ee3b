"""The reasoning_gym task's scorer for a data set that the reference names, so that one worker serves all of them."""

from collections.abc import Mapping
from typing import Any

from producers.tasks import reasoning_gym


def score(completion: str, reference: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    return reasoning_gym.score(completion, reference["item"], {"dataset": reference["dataset"], **params})
