"""`echo-produce` with the fake engine, noting what the broker acknowledged; it may kill itself in mid-group.

    python -m tests.chaos.producer_process --notes acknowledged.jsonl [--die-at 7] run.yaml --id p0

A note is written before anybody else in the process hears of the acknowledgement: [trajectory id, partition, offset]. It
survives a kill. `--die-at N`: with N - 1 records acknowledged, dies before the N-th is sent.
"""

import json
import os
import sys
from functools import partial
from typing import Any

import producers.cli
from echo.kafka import KafkaLogProducer
from echo.log import Delivery, Headers, OnDelivery
from echo.weights.peers import PeerNode
from producers import wiring
from producers.engines.registry import ENGINES
from producers.tasks.registry import TASKS
from tests.chaos.dying import die
from tests.chaos.task import CountOn
from tests.fakes.engine import FakeEngine

_FLUSH_S = 20.0


class NotingProducer(KafkaLogProducer):
    """The real producer. `notes`: a descriptor open for appending."""

    notes = -1
    die_at = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent = 0

    def send(
        self, topic: str, *, key: bytes, value: bytes, headers: Headers = (), on_delivery: OnDelivery | None = None
    ) -> bool:
        name = dict(headers).get("trajectory")
        if name is None:
            return super().send(topic, key=key, value=value, headers=headers, on_delivery=on_delivery)
        self._sent += 1
        if self._sent == self.die_at:
            assert self.flush(_FLUSH_S) == 0
            die(f"in mid-group, before record {self._sent}")

        def report(delivery: Delivery) -> None:
            if delivery.error is None:
                os.write(self.notes, json.dumps([name.decode(), delivery.partition, delivery.offset]).encode() + b"\n")
            if on_delivery is not None:
                on_delivery(delivery)

        return super().send(topic, key=key, value=value, headers=headers, on_delivery=report)


def _take(option: str) -> str | None:
    """Remove an option of ours from the command line."""
    if option not in sys.argv:
        return None
    place = sys.argv.index(option)
    value = sys.argv[place + 1]
    del sys.argv[place : place + 2]
    return value


def main() -> None:
    notes, die_at = _take("--notes"), _take("--die-at")
    assert notes is not None
    NotingProducer.notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    NotingProducer.die_at = int(die_at or 0)
    wiring.KafkaLogProducer = NotingProducer  # type: ignore[misc]
    # The model here is smaller than what peers are asked for.
    wiring.PeerNode = partial(PeerNode, min_bytes=0)  # type: ignore[misc, assignment]
    ENGINES["fake"] = lambda run: FakeEngine(tokens=16)
    TASKS["count_on"] = lambda config: CountOn()
    producers.cli.main()


if __name__ == "__main__":
    main()
