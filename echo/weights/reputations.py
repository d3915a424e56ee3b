"""What the sources of a producer did so far: which are fast, proven, or avoided, and how long the origin is spared. No I/O.

It lives longer than a pull, so that a peer that cost one pull time costs the next one nothing. A peer is slow by comparison
with what the others gave: on a link that is narrow for all of them nobody is blamed.

Never trusts: a peer that sent a wrong byte is avoided for minutes, one that was slow for seconds that double, and so is one
that failed otherwise. A peer that lacks what it announced resumed with a newer version, as all do: it rests for half a second.
"""

import threading
import time
from collections.abc import Callable
from math import exp
from statistics import median

# A peer is slow if it gives less than this part of what others give for one request, after so many seconds to begin with.
SLOW_PART = 1 / 8
SLACK_S = 1.0
_FIRST_BAN_S, _LAST_BAN_S, _LIAR_BAN_S = 1.0, 60.0, 600.0
# Longer than between two versions, or each pull would find the same peers slow again.
_FIRST_SLOW_BAN_S, _LAST_SLOW_BAN_S = 15.0, 600.0
_LACKED_S = 0.5
# Peers that are remembered: their URLs come from others.
_RECORDS_MAX = 4096
# How long the origin is spared while peers give too little: so many seconds, and so many of the origin's times for a chunk.
_PATIENCE_S, _PATIENCE_CHUNKS, _PATIENCE_CHUNK_S_MAX = 0.4, 1.5, 10.0
_OF_LATE_S = 1.0
_MEASURED_S = 0.02


class Flow:
    """Bytes per second of late: bytes and the seconds in which they came, both fading with time."""

    def __init__(self) -> None:
        self._nbytes = 0.0
        self._seconds = 0.0

    def add(self, nbytes: float, seconds: float, lanes: int = 1) -> None:
        """nbytes came over `lanes` requests together."""
        fade = exp(-seconds / _OF_LATE_S)
        self._nbytes = self._nbytes * fade + nbytes
        self._seconds = self._seconds * fade + seconds * lanes

    @property
    def bytes_per_s(self) -> float:
        """Of one lane; 0 before enough was measured."""
        return self._nbytes / self._seconds if self._seconds >= _MEASURED_S else 0.0


class _Record:
    """What is known of one peer. bytes_per_s: of one request, of late; 0 if nothing was measured."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self.failures = 0
        self.avoid_until = 0.0


class Reputations:
    """How sources did so far. Thread safe, except for the flows, which belong to the queue of the running pull.

    lane: what one request to the origin gives. full: what all requests give together while nothing holds them back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}
        self.lane = Flow()
        self.full = Flow()

    def succeeded(self, url: str, nbytes: int, seconds: float) -> None:
        with self._lock:
            record = self._record(url)
            _measure(record, nbytes, seconds)
            record.failures = 0

    def lost(self, url: str, nbytes: int, seconds: float) -> None:
        """Another source was faster; so many bytes had come. No failure: the next choice knows its speed."""
        with self._lock:
            _measure(self._record(url), nbytes, seconds)

    def failed(self, url: str, *, lied: bool = False, slow: bool = False) -> None:
        """lied: it sent bytes of another digest. slow: it held a chunk and gave far less than others."""
        with self._lock:
            record = self._record(url)
            record.failures += 1
            first, last = (_FIRST_SLOW_BAN_S, _LAST_SLOW_BAN_S) if slow else (_FIRST_BAN_S, _LAST_BAN_S)
            ban_s = _LIAR_BAN_S if lied else min(first * 2 ** min(record.failures - 1, 16), last)
            record.avoid_until = max(record.avoid_until, self._clock() + ban_s)

    def lacked(self, url: str) -> None:
        """It no longer has what it announced: no failure."""
        with self._lock:
            record = self._record(url)
            record.avoid_until = max(record.avoid_until, self._clock() + _LACKED_S)

    def is_usable(self, url: str) -> bool:
        with self._lock:
            record = self._records.get(url)
            return record is None or record.avoid_until <= self._clock()

    def is_proven(self, url: str) -> bool:
        """The last chunk that was asked of it came, and was right."""
        with self._lock:
            record = self._records.get(url)
            return record is not None and record.bytes_per_s > 0 and not record.failures

    def speed(self, url: str) -> float:
        """Bytes per second of one request; of a peer that was never tried, that of the fastest: it is to be tried."""
        with self._lock:
            record = self._records.get(url)
            if record is not None and record.bytes_per_s:
                return record.bytes_per_s
            return max((record.bytes_per_s for record in self._records.values()), default=0.0)

    def is_slow(self, url: str, nbytes: int, seconds: float, *, slack_s: float = SLACK_S) -> bool:
        """Whether so many bytes after so long are far less than others gave: the origin, or half of the other peers."""
        with self._lock:
            others = [
                record.bytes_per_s
                for other, record in self._records.items()
                if other != url and record.bytes_per_s and not record.failures
            ]
        usual = max(self.lane.bytes_per_s, median(others) if others else 0.0)
        return seconds > slack_s and nbytes < SLOW_PART * usual * (seconds - slack_s)

    def _record(self, url: str) -> _Record:
        if url not in self._records and len(self._records) >= _RECORDS_MAX:
            # The one that may be asked again first says the least.
            del self._records[min(self._records, key=lambda known: self._records[known].avoid_until)]
        return self._records.setdefault(url, _Record())


def _measure(record: _Record, nbytes: int, seconds: float) -> None:
    speed = nbytes / max(seconds, 1e-6)
    record.bytes_per_s = speed if not record.bytes_per_s else 0.7 * record.bytes_per_s + 0.3 * speed


class Patience:
    """How long the origin has been spared while peers gave too little, less what they gave since. Not thread safe.

    Peers that give half of what the origin would cost nothing; so the time of a pull is at most twice what it would be without
    them, and the bound of this patience.
    """

    def __init__(self, reputations: Reputations, lanes: int) -> None:
        self._reputations = reputations
        self._lanes = lanes
        self._spent_s = 0.0
        self.is_over = False

    @property
    def origin_bytes_per_s(self) -> float:
        """What it would give to all requests together, 0 if nothing was measured."""
        return self._reputations.full.bytes_per_s or self._reputations.lane.bytes_per_s * self._lanes

    def chunk_s(self, nbytes: int) -> float:
        """The origin's time for a chunk."""
        speed = self._reputations.lane.bytes_per_s
        return min(nbytes / speed, _PATIENCE_CHUNK_S_MAX) if speed else 0.0

    def tick(
        self, seconds: float, *, spared: bool, from_peers: float, from_origin: float, lanes: int, left: int, chunk: int
    ) -> None:
        """from_peers, from_origin: bytes of these seconds. lanes: requests to it. left: bytes to come, chunk: of one."""
        if lanes:
            self._reputations.lane.add(from_origin, seconds, lanes)
            if lanes >= self._lanes:
                self._reputations.full.add(from_origin, seconds)
        if spared:
            self._spent_s += seconds
        if speed := self.origin_bytes_per_s:
            self._spent_s -= 2 * from_peers / speed
        elif from_peers >= left * seconds:
            # Nothing to compare with, and the rest comes within a second.
            self._spent_s -= seconds
        bound_s = _PATIENCE_S + _PATIENCE_CHUNKS * self.chunk_s(chunk)
        self._spent_s = min(max(self._spent_s, 0.0), 2 * bound_s)
        self.is_over = self._spent_s > (bound_s / 2 if self.is_over else bound_s)
