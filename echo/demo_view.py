"""The demo's live table: what an operator would look at, taken from where an operator would take it.

Reads the journal and the processes' own /metrics, refuses to ask the processes anything else.
"""

import time
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table
from rich.text import Text

from echo import journal

_RECENT_STEPS = 10
_BARS = " ▁▂▃▄▅▆▇█"


class Sample(NamedTuple):
    """One exposed value."""

    name: str
    labels: dict[str, str]
    value: float


def scrape(client: httpx.Client, url: str) -> list[Sample]:
    """Everything that a /metrics page exposes; empty where nobody answers (yet)."""
    try:
        text = client.get(url, timeout=1.0).text
    except httpx.HTTPError:
        return []
    return [
        Sample(sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


class View:
    """Collects the numbers of one run and draws them. `urls` are /metrics pages: the trainer's first."""

    def __init__(self, *, journal_path: Path, steps: int, staleness_bound: int, urls: list[str]) -> None:
        self._journal_path = journal_path
        self._steps = steps
        self._bound = staleness_bound
        self._urls = urls
        self._client = httpx.Client()
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT_STEPS)
        self._rewards: list[float] = []
        self._at = 0
        self._samples: list[Sample] = []
        self._rates: dict[str, tuple[float, float]] = {}
        self._began = time.monotonic()

    def refresh(self) -> None:
        """Look again."""
        if self._journal_path.exists():
            with self._journal_path.open("rb") as file:
                file.seek(self._at)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._at += len(line)
                    self._take(journal.parse(line))
        self._samples = [sample for url in self._urls for sample in scrape(self._client, url)]

    def close(self) -> None:
        self._client.close()

    def _take(self, line: dict[str, Any]) -> None:
        if "reward_mean" in line:
            self._recent.append(line)
            self._rewards.append(line["reward_mean"])

    def _sum(self, name: str) -> float | None:
        found = [sample.value for sample in self._samples if sample.name == name]
        return sum(found) if found else None

    def _rate(self, name: str) -> str:
        """Per second since the first look at it."""
        value = self._sum(name)
        if value is None:
            return "-"
        now = time.monotonic()
        first, since = self._rates.setdefault(name, (value, now))
        return f"{(value - first) / (now - since):,.0f}/s" if now - since > 1 else "-"

    def line(self) -> str:
        """The numbers in one line, where there is no terminal to draw on."""
        if not self._rewards:
            return f"{time.monotonic() - self._began:4.0f} s  waiting for the first batch; {self._versions()}"
        step = f"step {len(self._rewards)}/{self._steps}"
        return (
            f"{time.monotonic() - self._began:4.0f} s  {step}  reward {self._rewards[-1]:.3f}  "
            f"staleness {self._staleness()}  lag {self._lag()} records  {self._versions()}  sampled "
            f"{self._rate('echo_produce_tokens_total')} trained {self._rate('echo_train_tokens_total')} tokens"
        )

    def table(self) -> Table:
        """The numbers as a table."""
        table = Table.grid(padding=(0, 3))
        table.add_column(style="dim", justify="right", min_width=18)
        table.add_column()
        table.add_row("step", f"{len(self._rewards)} of {self._steps}")
        reward = Text(f"{self._rewards[-1]:.3f}  " if self._rewards else "-")
        reward.append(_sparkline(self._rewards), style="blue")
        table.add_row("mean reward", reward)
        table.add_row("staleness (versions)", f"{self._staleness()}   bound {self._bound}")
        table.add_row("lag (records)", self._lag())
        table.add_row("versions", self._versions())
        table.add_row("tokens sampled", self._rate("echo_produce_tokens_total"))
        table.add_row("tokens trained", self._rate("echo_train_tokens_total"))
        return table

    def _staleness(self) -> str:
        ages: Counter[int] = Counter()
        for line in self._recent:
            ages.update({int(age): number for age, number in line["staleness"].items()})
        total = sum(ages.values())
        return " ".join(f"{age}:{100 * number // total}%" for age, number in sorted(ages.items())) if total else "-"

    def _lag(self) -> str:
        lag = self._sum("echo_train_lag_records")
        return f"{lag:.0f}" if lag is not None else "-"

    def _versions(self) -> str:
        newest = self._sum("echo_train_policy_version")
        serving = sorted(
            (sample.labels["producer"], sample.value)
            for sample in self._samples
            if sample.name == "echo_produce_serving_version"
        )
        parts = [f"{name} serves {version:.0f}" for name, version in serving]
        return f"newest {'-' if newest is None else f'{newest:.0f}'}, " + (", ".join(parts) or "no producer yet")


def bias_table(bias: Mapping[str, Any]) -> Table:
    """Trained against dropped trajectories, from what `bias.json` holds."""
    table = Table(title="drop bias", title_justify="left")
    table.add_column("task")
    table.add_column("outcome")
    for name in ("number", "mean completion tokens", "mean reward"):
        table.add_column(name, justify="right")
    for outcome, tasks in bias["drop_bias"].items():
        for task, found in tasks.items():
            mean_tokens, mean_reward = f"{found['completion_tokens_mean']:.1f}", f"{found['reward_mean']:.3f}"
            table.add_row(task, outcome, str(found["number"]), mean_tokens, mean_reward)
    return table


def _sparkline(values: list[float], width: int = 40) -> str:
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size)]
    top = max(1.0, *means)
    return "".join(_BARS[round(max(0.0, mean) / top * (len(_BARS) - 1))] for mean in means)
