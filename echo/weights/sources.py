"""Which chunk to fetch next, and from whom: the origin, or a peer by its measured speed and success. No I/O.

Every puller fetches in an order of its own. With peers about, one connection fetches from the origin what nobody has nor is
fetching; first what falls to this puller by a hash over all of them, since word of who fetches what comes late. The others
fetch what peers have, the rarest first. So each chunk leaves the origin about once, while the rest spreads among the pullers.
Whoever finds nothing waits for the others, not for ever, and then asks the origin.

Refuses to trust: who sent a wrong byte is avoided for minutes, who failed otherwise for seconds that double. Who no longer has
what it said it had went on to a newer version, as everybody does: it is left alone for half a second.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from random import Random
from typing import NamedTuple
from zlib import crc32

from blake3 import blake3

from echo.weights.plan import Want

# A peer that takes much longer than the fastest source would is given up; nothing below this is called slow.
_SLOW_S = 5.0
_SLOW_FACTOR = 8.0
_PER_PEER = 2
# Chunks that are looked at for one choice: bounds its time, and any few hundred of a shuffled queue are as good as all.
_LOOK_AT = 256
_FIRST_BAN_S, _LAST_BAN_S, _LIAR_BAN_S = 1.0, 60.0, 600.0
_LACKED_S = 0.5
_WAIT_S = 0.2
# So often the tracker is asked before a puller takes itself to be alone.
_LOOKS_ALONE = 3


class _Record:
    """What is known of one peer. bytes_per_s: of late, 0 where nothing was measured."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self.failures = 0
        self.avoid_until = 0.0


class Reputations:
    """How peers did so far; lives longer than a pull. Thread safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}

    def succeeded(self, url: str, nbytes: int, seconds: float) -> None:
        with self._lock:
            record = self._records.setdefault(url, _Record())
            speed = nbytes / max(seconds, 1e-6)
            record.bytes_per_s = speed if not record.bytes_per_s else 0.7 * record.bytes_per_s + 0.3 * speed
            record.failures = 0

    def failed(self, url: str, *, lied: bool = False) -> None:
        """lied: it sent bytes of another digest."""
        with self._lock:
            record = self._records.setdefault(url, _Record())
            record.failures += 1
            ban_s = _LIAR_BAN_S if lied else min(_FIRST_BAN_S * 2 ** (record.failures - 1), _LAST_BAN_S)
            record.avoid_until = max(record.avoid_until, self._clock() + ban_s)

    def lacked(self, url: str) -> None:
        """It no longer has what it said it had: no failure."""
        with self._lock:
            record = self._records.setdefault(url, _Record())
            record.avoid_until = max(record.avoid_until, self._clock() + _LACKED_S)

    def is_usable(self, url: str) -> bool:
        with self._lock:
            record = self._records.get(url)
            return record is None or record.avoid_until <= self._clock()

    def speed(self, url: str) -> float:
        """Bytes per second; of a peer that was never tried, that of the fastest: it is to be tried."""
        with self._lock:
            fastest = max((record.bytes_per_s for record in self._records.values()), default=0.0)
            record = self._records.get(url)
            return record.bytes_per_s if record is not None and record.bytes_per_s else fastest

    def patience_s(self, nbytes: int) -> float:
        """How long a peer may take for so many bytes."""
        with self._lock:
            fastest = max((record.bytes_per_s for record in self._records.values()), default=0.0)
            return _SLOW_S if not fastest else max(_SLOW_S, _SLOW_FACTOR * nbytes / fastest)


class PeerView(NamedTuple):
    """What one peer says: digests that it serves, and digests that are on their way to it from the origin."""

    have: frozenset[str]
    pending: frozenset[str]


class Job:
    """A wanted chunk on its way: what came so far survives a broken connection."""

    def __init__(self, want: Want) -> None:
        self.want = want
        self.room = want.room()
        self.tried: set[str] = set()
        self.restart()

    def restart(self) -> None:
        self.got = 0
        self.hasher = blake3()


class Choice(NamedTuple):
    """peer: its URL; None is the origin."""

    job: Job
    peer: str | None


class Queue:
    """The chunks that a pull still wants. Thread safe; `take` waits, everything else returns at once."""

    def __init__(
        self,
        wants: Iterable[Want],
        reputations: Reputations,
        *,
        origin_lanes: int,
        shuffle: Random | None = None,
        me: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """origin_lanes: chunks that are fetched from the origin at once by a puller alone.

        shuffle: for an order of one's own, where there may be peers; None where there are none. me: our URL, as peers know it.
        """
        self._me = me
        self._owners: dict[str, str] = {}
        self._reputations = reputations
        self._origin_lanes = origin_lanes
        self._looks = 0
        self._shuffle = shuffle
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[str, Want | Job] = {}
        self._peers: dict[str, PeerView] = {}
        self._holders: Counter[str] = Counter()
        self._claimed: set[str] = set()
        self._running = 0
        self._at_origin: set[str] = set()
        self._at_peer: Counter[str] = Counter()
        self._moved = clock()
        self._typical_s = 0.0
        self._found_nothing = False
        self._looked = clock()
        self._ended = False
        self.add(wants)

    def add(self, wants: Iterable[Want]) -> None:
        ordered = list(wants)
        if self._shuffle is not None:
            self._shuffle.shuffle(ordered)
        with self._changed:
            for want in ordered:
                self._put(want)
            self._found_nothing = False
            self._changed.notify_all()

    def end(self) -> None:
        """Wake everybody who waits in `take`, for good."""
        with self._changed:
            self._ended = True
            self._found_nothing = False
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        with self._changed:
            return self._ended

    @property
    def pending(self) -> set[str]:
        """Digests on their way from the origin."""
        with self._changed:
            return set(self._at_origin)

    @property
    def typical_s(self) -> float:
        """Seconds that a chunk takes, of late."""
        return self._typical_s

    def saw(self, peers: Mapping[str, PeerView]) -> None:
        """What the tracker tells."""
        with self._changed:
            if peers != self._peers:
                self._moved = self._clock()
            self._looks += 1
            if peers.keys() != self._peers.keys():
                self._owners.clear()
            self._peers = dict(peers)
            self._holders = Counter(digest for peer in peers.values() for digest in peer.have)
            self._claimed = {digest for peer in peers.values() for digest in peer.pending}
            self._found_nothing = False
            self._changed.notify_all()

    def take(self) -> Choice | None:
        """What to do next; None where nothing is left, or `end` was called. Report back by `finished` or `failed`."""
        with self._changed:
            while True:
                if self._ended or not (self._waiting or self._running):
                    return None
                choice = self._choose_anew()
                if choice is not None:
                    digest = choice.job.want.chunk.digest
                    del self._waiting[digest]
                    self._running += 1
                    if choice.peer is None:
                        self._at_origin.add(digest)
                    else:
                        self._at_peer[choice.peer] += 1
                    return choice
                # Also without news: a peer's time of being avoided passes, and so does patience.
                self._changed.wait(_WAIT_S)

    def finished(self, choice: Choice, seconds: float) -> None:
        with self._changed:
            self._typical_s = seconds if not self._typical_s else 0.7 * self._typical_s + 0.3 * seconds
            self._leave(choice)

    def failed(self, choice: Choice) -> None:
        """It is wanted still, and not from this peer again."""
        with self._changed:
            if choice.peer is not None:
                choice.job.tried.add(choice.peer)
            self._put(choice.job)
            self._leave(choice)

    def _put(self, item: Want | Job) -> None:
        """Of one chunk that is wanted twice, once."""
        want = item.want if isinstance(item, Job) else item
        waiting = self._waiting.setdefault(want.chunk.digest, item)
        if waiting is not item:
            (waiting.want if isinstance(waiting, Job) else waiting).fills.extend(want.fills)

    def _leave(self, choice: Choice) -> None:
        self._running -= 1
        if choice.peer is None:
            self._at_origin.discard(choice.job.want.chunk.digest)
        else:
            self._at_peer[choice.peer] -= 1
        self._moved = self._clock()
        self._found_nothing = False
        self._changed.notify_all()

    def _choose_anew(self) -> Choice | None:
        """`_choose`, but nothing where it found nothing a moment ago and there is no news: many may wait, one need look."""
        now = self._clock()
        if self._found_nothing and now - self._looked < _WAIT_S:
            return None
        self._looked = now
        choice = self._choose()
        self._found_nothing = choice is None
        return choice

    def _choose(self) -> Choice | None:
        if not self._waiting:
            return None
        usable = {url: peer for url, peer in self._peers.items() if self._reputations.is_usable(url)}
        lanes = self._origin_lanes // (1 + len(usable))
        if self._shuffle is not None and self._looks < _LOOKS_ALONE:
            # Who begins at the same time is not heard of yet: many chunks at once would each come late.
            lanes = 1
        has_lane = len(self._at_origin) < max(lanes, 1)
        if not usable:
            return self._from_origin(next(iter(self._waiting))) if has_lane else None
        fresh: str | None = None
        ours = False
        best: tuple[int, str, list[str]] | None = None
        for digest, job in islice(self._waiting.items(), _LOOK_AT):
            tried = job.tried if isinstance(job, Job) else ()
            holders = (
                [url for url in usable if digest in usable[url].have and url not in tried] if self._holders[digest] else []
            )
            if has_lane and not ours and not holders and digest not in self._claimed:
                ours = self._owner(digest) == self._me
                if ours or fresh is None:
                    fresh = digest
            free = [url for url in holders if self._at_peer[url] < _PER_PEER]
            if free and (best is None or len(holders) < best[0]):
                best = (len(holders), digest, free)
        if fresh is not None and has_lane:
            return self._from_origin(fresh)
        if best is not None:
            _, digest, free = best
            peer = max(free, key=lambda url: self._reputations.speed(url) / (1 + self._at_peer[url]))
            return Choice(self._job(digest), peer)
        # All that is left is on its way to others, or waits for a peer that is busy.
        if not self._at_origin and self._clock() - self._moved > max(1.0, 2 * self._typical_s):
            return self._from_origin(next(iter(self._waiting)))
        return None

    def _owner(self, digest: str) -> str:
        """Who of all pullers should fetch it from the origin first: everybody comes to the same answer without a word."""
        if digest not in self._owners:
            self._owners[digest] = max((self._me, *self._peers), key=lambda url: crc32(f"{url} {digest}".encode()))
        return self._owners[digest]

    def _from_origin(self, digest: str) -> Choice:
        return Choice(self._job(digest), None)

    def _job(self, digest: str) -> Job:
        found = self._waiting[digest]
        return found if isinstance(found, Job) else Job(found)
