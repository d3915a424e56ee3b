"""What every Echo process does the same way: log lines, stop signals, and children that end with their parent.

Refuses to decide what a stop means for a loop: it sets an event, the loop drains.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import structlog

_PR_SET_PDEATHSIG = 1


def configure_logging(*, json: bool = False, level: str = "info") -> None:
    """Log lines on standard error: for people on a terminal, JSON on request."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    levels = {"debug": 10, "info": 20, "warning": 30, "error": 40}
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(levels[level]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


class StopSignal:
    """SIGINT and SIGTERM ask for a planned stop; a second one stops the process at once with status 130 or 143."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    def install(self) -> "StopSignal":
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)
        return self

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Also call this, from the signal handler, when a stop is asked for."""
        self._callbacks.append(callback)

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


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when `parent`, the process that started it, ends in any way (Linux only).

    Call first thing in the child. PR_SET_PDEATHSIG is not inherited and is lost on exec of a set-uid program only.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        # The parent was gone before the request took effect.
        os._exit(1)
