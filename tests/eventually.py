"""Waiting for what another thread or process does: `eventually(condition)` looks until it holds, or fails by name.

Refuses to be a pause: it returns as soon as the condition holds.
"""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str, *, timeout_s: float = 20.0) -> T:
    """What `condition` gives once it is true. Fails, naming `what`, when it is not after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.005)
