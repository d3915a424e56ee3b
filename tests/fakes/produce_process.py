"""`echo-produce` with the fake engine and task under the names "fake": everything else is the real command.

    python -m tests.fakes.produce_process run.yaml --id p0

With KILLED_THREAD=NAME in its environment, the thread of that name dies of a mistake once a policy serves. With BROKEN_TASK=1
each item of the task raises.
"""

import os
import threading

from producers.cli import main
from producers.engines.registry import ENGINES
from producers.tasks.base import Prompt
from producers.tasks.registry import TASKS
from tests.fakes.engine import FakeEngine, FakeTask


class FatalEngine(FakeEngine):
    """Its version can't be asked for from one thread."""

    @property
    def policy_version(self) -> int:
        if self._version >= 0 and threading.current_thread().name == os.environ.get("KILLED_THREAD"):
            raise ZeroDivisionError("injected")
        return self._version


class BrokenTask(FakeTask):
    """As a data set whose files are gone."""

    def prompt(self, seed: int, index: int) -> Prompt:
        raise FileNotFoundError(2, "No such file or directory", f"shard-{index}.jsonl")


if __name__ == "__main__":
    ENGINES["fake"] = lambda run: FatalEngine(tokens=16)
    TASKS["fake"] = lambda config: BrokenTask() if os.environ.get("BROKEN_TASK") else FakeTask()
    main()
