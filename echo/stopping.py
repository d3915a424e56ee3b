"""The planned stop of a process, from its first line on: SIGINT and SIGTERM set an event, and the loop drains.

A command catches them before it imports what takes long (`catch_early`); what it makes of a stop it decides once it can. Before
the interpreter has come to a command's first line nothing of ours can catch a signal.

Refuses to decide what a stop means for a loop, and to import anything that takes time.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class StopSignal:
    """SIGINT and SIGTERM ask for a planned stop; a second one stops the process at once with status 130 or 143."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    def install(self) -> "StopSignal":
        """Catch the signals from now on. A stop that `catch_early` caught counts."""
        global _early
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)
        if _early is not None and _early.is_set():
            self.event.set()
        _early = None
        return self

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Also call this, from the signal handler, when a stop is asked for; at once if it was."""
        self._callbacks.append(callback)
        if self.is_set():
            callback()

    def request(self) -> None:
        self.event.set()

    def is_set(self) -> bool:
        return self.event.is_set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.event.is_set():
            os._exit(128 + number)
        self.event.set()
        for callback in self._callbacks:
            callback()


_early: StopSignal | None = None


def catch_early() -> None:
    """The first thing that a command does: a stop that is asked for from here on is not lost, and ends nothing half-way."""
    global _early
    _early = StopSignal().install()


def let_go() -> None:
    """For what does not run until it is stopped: signals end it at once again, and one that was caught early does so now."""
    global _early
    if _early is None:
        return
    early, _early = _early, None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if early.is_set():
        signal.raise_signal(signal.SIGTERM)
