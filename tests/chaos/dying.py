"""kill -9 by a process's own hand, at an exact point: no signal from outside can be so punctual."""

import os
import signal
from collections.abc import Callable
from typing import Any


def die(where: str) -> None:
    """End as kill -9 would, and leave a line that says where."""
    os.write(2, f"DIES {where}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def die_around(
    owner: Any,
    name: str,
    where: str,
    *,
    before: bool,
    passing: int,
    concerns: Callable[..., bool] = lambda *args, **kwargs: True,
    done: Callable[[Any], bool] = lambda result: True,
) -> None:
    """Die before or after the `passing`-th call of a method. Calls that `concerns` or `done` deny don't count."""
    real = getattr(owner, name)
    passed = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal passed
        if not concerns(*args, **kwargs):
            return real(*args, **kwargs)
        if before and passed == passing - 1:
            die(where)
        result = real(*args, **kwargs)
        passed += done(result)
        if not before and passed == passing:
            die(where)
        return result

    setattr(owner, name, wrapped)
