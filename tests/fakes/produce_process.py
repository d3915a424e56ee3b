"""`echo-produce` with the fake engine and task under the names "fake": everything else is the real command.

python -m tests.fakes.produce_process run.yaml --id p0
"""

from producers.cli import main
from producers.engines.registry import ENGINES
from producers.tasks.registry import TASKS
from tests.fakes.engine import FakeEngine, FakeTask

if __name__ == "__main__":
    ENGINES["fake"] = lambda run: FakeEngine(tokens=16)
    TASKS["fake"] = lambda config: FakeTask()
    main()
