"""By how much the weight server's clock differs from ours, from the answers that it gives anyway. No I/O.

Each answer carries the server's time (`TIME_HEADER`). The server looked at its clock between our request and its answer, so the
difference is known to within half of the round trip (Cristian's algorithm); of the last answers the fastest counts.
Refuses to set or correct any clock, and to guess: without an answer there is no difference.
"""

import math
import threading
from collections import deque
from typing import NamedTuple

TIME_HEADER = "X-Echo-Time"
"""Seconds since the epoch by the server's clock, as it begins to answer."""

# Clocks drift by some ten microseconds a second, so an answer says little about later hours.
_ANSWERS = 32
# Nothing that is a time has more characters, or is further away: 3,000 years.
_CHARACTERS_MAX = 32
_SECONDS_MAX = 1e11


class Difference(NamedTuple):
    """The server's clock less ours, in seconds, and by how much that may be wrong either way."""

    seconds: float
    within_s: float


def difference(sent: float, server: float, received: float) -> Difference:
    """Of one answer. sent, received: by our clock, server: by the server's; seconds since the epoch."""
    within_s = max(0.0, received - sent) / 2
    return Difference(server - sent - within_s, within_s)


class ServerClock:
    """What is known of one server's clock. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: deque[Difference] = deque(maxlen=_ANSWERS)

    def saw(self, sent: float, header: str | None, received: float) -> None:
        """An answer with this header's value came. It is ignored if that is no time, or if it came before its question."""
        if header is None or len(header) > _CHARACTERS_MAX or received < sent:
            return
        try:
            server = float(header)
        except ValueError:
            return
        if not math.isfinite(server) or not 0 < server < _SECONDS_MAX:
            return
        with self._lock:
            self._answers.append(difference(sent, server, received))

    def difference(self) -> Difference | None:
        """None before the first answer."""
        with self._lock:
            return min(self._answers, key=lambda one: one.within_s, default=None)
