"""Work in the background: every thread of Echo's own, so that its death is noticed by its owner and ends the process.

A thread that dies in silence leaves a process that looks well and does half of its work. So an owner calls `check` wherever it
waits or turns, and the first error of the thread is raised there, with the thread's name before its reason. An error that is
Echo's own mistake is logged with its traceback in the moment of death.

Refuses to restart anything, and to outlive the process: the threads are daemons.
"""

import threading
from collections.abc import Callable
from typing import Self

import structlog

from echo.errors import BackgroundError, EchoError

log = structlog.get_logger("background")


class Background:
    """Runs `target` in a thread called `name`, from `start` on.

    target: returns once `stopping` is set, and not before; with `one_shot` it returns when its work is done.
    wake: called when a stop is asked for and when the target died, to end the waits of both sides; from either thread, with no
    lock held.
    """

    def __init__(
        self, name: str, target: Callable[[], object], *, wake: Callable[[], object] = lambda: None, one_shot: bool = False
    ) -> None:
        self.name = name
        self.stopping = threading.Event()
        self._target = target
        self._wake = wake
        self._one_shot = one_shot
        self._failure: EchoError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def check(self) -> None:
        """Raise what ended the target. An EchoError keeps its type; any other error becomes a BackgroundError."""
        if self._failure is not None:
            raise self._failure

    @property
    def failed(self) -> bool:
        """Whether the target died."""
        return self._failure is not None

    def join(self) -> None:
        """Wait until the target has ended. Raises nothing: see `check`."""
        self._thread.join()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ask the target to end, and wait for it; whether it has ended. Harmless before `start`, and when repeated."""
        self.stopping.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._target()
            if not self._one_shot and not self.stopping.is_set():
                self._failure = BackgroundError(f"{self.name} ended, and nothing had asked it to: restart this process")
        except EchoError as error:
            error.args = (f"{self.name} ended: {error}",)
            self._failure = error
        except BaseException as error:  # Nothing may end a thread unnoticed, not even SystemExit.
            log.error("a thread died of an error in Echo itself", thread=self.name, exc_info=error)
            self._failure = BackgroundError(
                f"{self.name} died of an error in Echo itself ({type(error).__name__}: {error}): see its traceback above"
            )
        if self._failure is not None:
            self._wake()
