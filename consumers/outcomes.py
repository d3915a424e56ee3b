"""Drop bias, live: how long and how well rewarded the dropped trajectories are, beside the trained ones.

Refuses to count records (that is the ledger's) and to guess: a record that was dropped from its headers alone, without being
decoded, has neither a completion length nor a reward here. `bias.json` of a demo has them, read from the log.
"""

from collections.abc import Iterable

from consumers.intake import Judged
from consumers.ledger import OUTCOME_OF
from echo.metrics import TrainerMetrics


class Outcomes:
    """Feeds `echo_train_completion_tokens` and `echo_train_outcome_reward_mean`."""

    def __init__(self, metrics: TrainerMetrics) -> None:
        self._metrics = metrics
        # A gauge, since a counter of rewards could not go down: rewards may be negative.
        self._rewards: dict[tuple[str, str], tuple[int, float]] = {}

    def add(self, judged: Iterable[Judged]) -> None:
        changed = set()
        for one in judged:
            outcome = OUTCOME_OF[one.reason].value
            self._metrics.completion_tokens.labels(self._metrics.run_id, outcome).observe(one.completion)
            key = (outcome, one.task)
            count, total = self._rewards.get(key, (0, 0.0))
            self._rewards[key] = (count + 1, total + one.reward)
            changed.add(key)
        for key in changed:
            count, total = self._rewards[key]
            self._metrics.outcome_reward_mean.labels(self._metrics.run_id, *key).set(total / count)
