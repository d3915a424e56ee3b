"""Nobody waits in silence: after a while without progress a process says what it waits for, with numbers.

Refuses to wait itself: callers poll with a deadline and tell the watch whether something moved.
"""

import time
from collections.abc import Callable

import structlog

log = structlog.get_logger("waiting")


class Watch:
    """Speaks once per `limit_s` seconds without progress, and tells how long the wait took when it ends.

    describe: what is waited for, with numbers; called only when the watch speaks.
    """

    def __init__(
        self,
        what: str,
        describe: Callable[[], str],
        *,
        limit_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._what = what
        self._describe = describe
        self._limit_s = limit_s
        self._clock = clock
        self._say = say or log.warning
        self._since = clock()
        self._spoke = self._since
        self.spoken = 0

    def progress(self) -> None:
        """Something moved: the wait, if there was one, is over."""
        now = self._clock()
        if self._spoke > self._since:
            self._say(f"{self._what}: went on after {now - self._since:.0f} s")
        self._since = self._spoke = now

    def check(self) -> None:
        """Call while waiting."""
        now = self._clock()
        if now - self._spoke >= self._limit_s:
            self._spoke = now
            self.spoken += 1
            self._say(f"waiting for {self._what} for {now - self._since:.0f} s: {self._describe()}")

    @property
    def waited_s(self) -> float:
        return self._clock() - self._since
