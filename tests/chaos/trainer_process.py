"""`echo-train` that may kill itself at a named point; everything else is the real command.

    python -m tests.chaos.trainer_process [--die-at before-announced:3] run.yaml [KEY=VALUE ...]

A point is a side, a step of the loop, and which passing of it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import consumers.cli
from consumers import wiring
from consumers.train import Trainer
from echo import control
from tests.chaos.dying import die_around

STEPS = ("cut", "optimised", "stored", "announced", "checkpointed", "ended")
POINTS = tuple(f"{side}-{step}" for step in STEPS for side in ("before", "after"))

_DIE_AT = "--die-at"


def arm(trainer: Trainer, where: str) -> None:
    """Have the trainer die at `where`, e.g. "after-stored:2"."""
    point, _, passing = where.partition(":")
    side, _, step = point.partition("-")
    intake, learner, publisher = trainer._intake, trainer._learner, trainer._publisher
    options: dict[str, Any]
    owner, name, options = {
        "cut": (intake, "cut", {"done": lambda batch: batch is not None}),
        "optimised": (learner, "step", {}),
        "stored": (publisher._store, "publish", {}),
        "announced": (publisher._writer._sender, "send", {"concerns": _sends(control.Announcement)}),
        "checkpointed": (trainer._checkpoints, "save", {}),
        "ended": (publisher._writer._sender, "send", {"concerns": _sends(control.EndOfRun)}),
    }[step]
    die_around(owner, name, where, before=side == "before", passing=int(passing or 1), **options)


def _sends(kind: type) -> Any:
    def concerns(topic: str, messages: list[tuple[bytes, bytes]]) -> bool:
        # Requests are sent through the same producer.
        return topic.endswith("control") and any(
            isinstance(control.decode_control(value, topic), kind) for _, value in messages
        )

    return concerns


def main() -> None:
    if _DIE_AT in sys.argv:
        place = sys.argv.index(_DIE_AT)
        where = sys.argv[place + 1]
        del sys.argv[place : place + 2]
        real = wiring.trainer_of

        @contextmanager
        def dying(*args: Any, **kwargs: Any) -> Iterator[Trainer]:
            with real(*args, **kwargs) as trainer:
                arm(trainer, where)
                yield trainer

        wiring.trainer_of = dying
    consumers.cli.main()


if __name__ == "__main__":
    main()
