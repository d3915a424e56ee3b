"""How often, and after which pauses, something that dies is started again: at once first, ever later, and not for ever.

Refuses to start or to wait itself.
"""

import time
from collections import deque
from collections.abc import Callable


class Restarts:
    """Allows `limit` restarts within `within_s` seconds, the first after `first_s`, each next one after twice as long."""

    def __init__(
        self,
        *,
        limit: int = 5,
        within_s: float = 60.0,
        first_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self.within_s = within_s
        self._first_s = first_s
        self._clock = clock
        self._deaths: deque[float] = deque()

    def died(self) -> float | None:
        """Count a death. Returns the seconds to wait before the next start; None where it died too often."""
        now = self._clock()
        while self._deaths and self._deaths[0] <= now - self.within_s:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > self.limit:
            return None
        return float(self._first_s * 2 ** (len(self._deaths) - 1))
