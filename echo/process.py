"""What every Echo process does the same way: log lines, stop signals (`stopping`), and children that end with their parent."""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO, cast

import structlog

from echo.errors import ConfigError
from echo.stopping import StopSignal as StopSignal

_PR_SET_PDEATHSIG = 1


class _CurrentStandardError:
    """Standard error as it is when a line is written: it may have been replaced since logging was configured.

    A line that can't be written (it goes to a file on a full disk) ends nothing; the next that can be says how many were lost.
    """

    def __init__(self) -> None:
        self._lost = 0

    def write(self, text: str) -> int:
        note = f"{self._lost} log lines could not be written here\n" if self._lost else ""
        try:
            _write_through(sys.stderr, note + text)
        except OSError:
            # A line comes in two parts, its text and its end.
            self._lost += text.count("\n")
        else:
            self._lost = 0
        return len(text)

    def flush(self) -> None:
        """`write` has done it."""


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
        logger_factory=structlog.PrintLoggerFactory(file=cast("TextIO", _CurrentStandardError())),
    )


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, the process that started it, ends in any way (Linux only).

    Call first thing in the child. Not a planned stop: the kernel may send the signal once for each thread of the parent that
    goes, which would read as a second request, and who would have waited for the stop is gone.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # The parent was gone before the request took effect.
        os._exit(1)


PARENT_VARIABLE = "ECHO_PARENT_PID"


def end_with_asking_parent() -> None:
    """In a process that `Child` started: end when the starter ends in any way."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent.isdigit():
        die_with_parent(int(parent))


def _write_through(stream: TextIO, text: str) -> None:
    """Past the stream's buffer, which would keep what can't be written, and fail once more when the process ends."""
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(text)
        stream.flush()
        return
    stream.flush()
    left = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
    raw = getattr(buffer, "raw", buffer)
    while left:
        written = raw.write(left)
        if written is None:
            raise BlockingIOError("standard error is a pipe that is full and does not block")
        left = left[written:]


def is_readable(descriptor: int, timeout_s: float) -> bool:
    """Whether something, or the end, can be read within the time. Not `select`, which fails for descriptors from 1024 on."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


class Child:
    """A child process in a session of its own, so that a Ctrl-C in the terminal reaches only the parent, which stops its
    children in order. Its output goes to `log_path`; append: behind what is there, that of an earlier life.
    Raises ConfigError if that can't be written.

    Start it from a thread that lives as long as the process: the kernel counts the thread as the parent.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        append: bool = False,
    ) -> None:
        self.name = name
        self.log_path = log_path
        try:
            out = log_path.open("ab" if append else "wb")
        except OSError as error:
            raise ConfigError(
                f"the log of {name}, {log_path}, can't be written: {error.strerror}: free space there, or choose another folder"
            ) from None
        with out:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**env, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
                pass_fds=pass_fds,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status (negative: the signal that ended it); None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit status; None where it still runs after the timeout. Without one, it waits for as long as it takes."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask for a planned stop."""
        if self.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it and all that it started."""
        if self.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def log_tail(self, lines: int = 15) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


def stop_children(children: Sequence[Child], *, timeout_s: float) -> list[Child]:
    """Ask all for a planned stop, wait, and kill those that did not make it: they are returned."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + timeout_s
    late = [child for child in children if child.wait(max(0.0, deadline - time.monotonic())) is None]
    for child in late:
        child.kill()
    return late
