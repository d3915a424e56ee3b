"""Tasks by the name that `task.name` of a run file gives them.

Refuses to import a task that is not asked for: each brings its own libraries.
"""

from collections.abc import Callable

from echo.config import TaskConfig
from echo.errors import ConfigError, TaskError
from producers.params import nearest
from producers.tasks.base import Task


def _reasoning_gym(config: TaskConfig) -> Task:
    try:
        from producers.tasks.reasoning_gym import ReasoningGym
    except ImportError as error:
        raise TaskError(f"task.name: reasoning_gym can't be imported ({error}): pip install 'echo-rl[tasks]'") from error
    return ReasoningGym(config.params)


TASKS: dict[str, Callable[[TaskConfig], Task]] = {"reasoning_gym": _reasoning_gym}


def make_task(config: TaskConfig) -> Task:
    """Build the task that the run file names. Raises ConfigError for an unknown name or parameter, TaskError where it can't
    be built."""
    build = TASKS.get(config.name)
    if build is None:
        raise ConfigError(f"task.name: unknown task {config.name!r}: {nearest(config.name, TASKS)}")
    return build(config)
