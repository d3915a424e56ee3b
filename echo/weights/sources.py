"""Which chunk to fetch next, and from where: the origin, or a peer by its measured speed and success. No I/O.

Every puller fetches in an order of its own. With peers about, one connection fetches from the origin what no peer has or is
fetching; first what falls to this puller by a hash over all of them, since news of others' requests comes late. The others
fetch what peers have, the rarest first. So each chunk leaves the origin about once, while the rest spreads among the pullers.

Peers are tried beside the origin, never instead of it. The origin is spared only while peers give at least half of what it
would (`Patience`); after that its requests take any chunk until peers give that much again. A chunk that a slow source holds is
taken over by an idle worker; the first verified copy wins, and the other request ends. A peer that never gave a chunk
gets one request at a time, and none of them waits for it.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from random import Random
from typing import NamedTuple
from zlib import crc32

from echo.weights.attempts import Attempt, Job
from echo.weights.plan import Want
from echo.weights.reputations import Patience, Reputations
from echo.weights.transport import Abort

_PER_PEER = 2
# Chunks that are looked at for one choice, and pairs of chunk and peer: bounds its time, and any few of a shuffled queue are as
# good as all.
_LOOK_AT, _LOOK_AT_LEAST, _LOOK_AT_PAIRS = 256, 16, 2**14
_WAIT_S = 0.05
# So often the tracker is asked before a puller takes itself to be alone.
_LOOKS_ALONE = 3
# While the origin is not spared, strangers get chunks only if so much time is left that their failures end before it does.
_TIME_FOR_STRANGERS_S = 2.0
# A chunk is taken over after so long, if its source still needs more than twice as long as another one would.
_TAKE_OVER_S, _TAKE_OVER_UNKNOWN_S, _TAKE_OVER_FACTOR = 0.25, 2.0, 2.0
# Sources that the report of a late pull names.
_NAMED = 5


class PeerView(NamedTuple):
    """What one peer announces: digests that it serves, and digests that are on their way to it from the origin."""

    have: frozenset[str]
    pending: frozenset[str]


class Queue:
    """The chunks that a pull still wants. Thread safe; `take` waits, everything else returns at once."""

    def __init__(
        self,
        wants: Iterable[Want],
        reputations: Reputations,
        *,
        origin_lanes: int,
        abort: Abort | None = None,
        connections: int | None = None,
        shuffle: Random | None = None,
        me: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """origin_lanes: chunks that are fetched from the origin at once by a puller alone; as many may come from peers.

        connections: chunks that are fetched from the origin at once if peers give too little; so many strangers are tried at
        once. abort: of the pull, ends all attempts. shuffle: for an order of one's own, if there may be peers; None if there
        are none. me: our URL, as peers know it.
        """
        self._me = me
        self._owners: dict[str, str] = {}
        self._reputations = reputations
        self._origin_lanes = origin_lanes
        self._connections = connections or origin_lanes
        self._abort = abort or Abort()
        self._looks = 0
        self._shuffle = shuffle
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[str, Job] = {}
        self._waiting_bytes = 0
        self._peers: dict[str, PeerView] = {}
        self._holders: Counter[str] = Counter()
        self._claimed: set[str] = set()
        self._attempts: list[Attempt] = []
        self._unfinished = 0
        self._finished_bytes = 0
        self._at_origin: Counter[str] = Counter()
        self._at_peer: Counter[str] = Counter()
        self._patience = Patience(reputations, self._connections)
        self._is_spared = False
        self._from_peers = 0.0
        self._from_origin = 0.0
        self._ticked = clock()
        self._was_slow: Counter[str] = Counter()
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
                self._put(Job(want))
            self._news()

    def end(self) -> None:
        """Wake all that wait in `take`, for good."""
        with self._changed:
            self._ended = True
            self._news()

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

    @property
    def present_bytes(self) -> int:
        """Of all chunks that were wanted so far, those under way included."""
        with self._changed:
            running: dict[int, int] = {}
            for attempt in self._attempts:
                if not attempt.job.is_over:
                    running[id(attempt.job)] = max(running.get(id(attempt.job), 0), attempt.got)
            return self._finished_bytes + sum(running.values())

    def saw(self, peers: Mapping[str, PeerView]) -> None:
        """What the tracker reports."""
        with self._changed:
            self._looks += 1
            if peers.keys() != self._peers.keys():
                self._owners.clear()
            self._peers = dict(peers)
            self._holders = Counter(digest for peer in peers.values() for digest in peer.have)
            self._claimed = {digest for peer in peers.values() for digest in peer.pending}
            self._news()

    def look(self) -> list[Attempt]:
        """Count what came, and end the requests to peers that give far less than others do: these are returned."""
        with self._changed:
            self._tick()
            now = self._clock()
            slow = []
            for attempt in self._attempts:
                if attempt.peer is None or attempt.stop.is_set():
                    continue
                if self._reputations.is_slow(attempt.peer, attempt.got, now - attempt.begun):
                    self._end_slow(attempt)
                    slow.append(attempt)
            return slow

    def take(self) -> Attempt | None:
        """What to do next; None if nothing is left, or `end` was called. Report back by `finished`, or `left`."""
        with self._changed:
            while True:
                if self._ended or not (self._waiting or self._unfinished):
                    return None
                attempt = self._choose_anew()
                if attempt is not None:
                    return attempt
                # Also without news: a peer's time of being avoided passes, and so does patience.
                self._changed.wait(_WAIT_S)

    def finished(self, attempt: Attempt) -> Attempt | None:
        """A verified chunk is there. Returns the attempt whose room is to be spread now, before `done`; None if another did."""
        with self._changed:
            self._tick()
            job = attempt.job
            if not job.is_over:
                job.is_over, job.copy = True, attempt
                seconds = self._clock() - attempt.begun
                self._typical_s = seconds if not self._typical_s else 0.7 * self._typical_s + 0.3 * seconds
                for other in job.attempts:
                    if other is not attempt:
                        self._lose(other)
            return self._leave(attempt)

    def left(self, attempt: Attempt, *, failed: bool = False) -> Attempt | None:
        """Nothing came of it; the chunk is wanted still, not from this peer again if it failed. Returns as `finished` does."""
        with self._changed:
            job = attempt.job
            if attempt.peer is not None:
                # It counts for nothing: the time that it took is to be made up for.
                self._from_peers -= attempt.seen
                if failed:
                    job.tried.add(attempt.peer)
            return self._leave(attempt)

    def done(self, job: Job) -> None:
        """Its chunk is wherever it belongs, or not wanted any more."""
        with self._changed:
            self._unfinished -= 1
            self._finished_bytes += job.want.chunk.nbytes
            self._news()

    def give_up(self, attempt: Attempt) -> bool:
        """The chunk can't be had there. False if another source is at work on it; else it is wanted no more, until `done`."""
        with self._changed:
            if attempt.job.is_over or len(attempt.job.attempts) > 1:
                return False
            attempt.job.is_over = True
            self._leave(attempt)
            return True

    def report(self) -> str:
        """Which sources hold what is missing, and which were slow: for the error of a pull that is late."""
        with self._changed:
            now = self._clock()
            by_source: dict[str | None, list[Attempt]] = {}
            for attempt in self._attempts:
                if not attempt.job.is_over:
                    by_source.setdefault(attempt.peer, []).append(attempt)
            lines = [
                (
                    sum(one.got for one in attempts) / max(now - min(one.begun for one in attempts), 1e-3),
                    f"{peer or 'the origin'} holds {len(attempts)} of them ({attempts[0].digest[:12]}...) and gave "
                    f"{sum(one.got for one in attempts):,} bytes in {now - min(one.begun for one in attempts):.1f} s",
                )
                for peer, attempts in by_source.items()
            ]
            parts = [f"{len(self._waiting) + self._unfinished} chunks are missing"]
            parts += [line for _, line in sorted(lines)[:_NAMED]]
            if self._was_slow:
                named = ", ".join(url for url, _ in self._was_slow.most_common(_NAMED))
                parts.append(f"{len(self._was_slow)} peers were given up as too slow ({named})")
            return "; ".join(parts)

    def _news(self) -> None:
        self._found_nothing = False
        self._changed.notify_all()

    def _put(self, job: Job) -> None:
        """Of one chunk that is wanted twice, once."""
        waiting = self._waiting.setdefault(job.want.chunk.digest, job)
        if waiting is job:
            self._waiting_bytes += job.want.chunk.nbytes
        else:
            waiting.want.fills.extend(job.want.fills)

    def _leave(self, attempt: Attempt) -> Attempt | None:
        job = attempt.job
        self._count(attempt)
        self._abort.forget(attempt.stop)
        self._attempts.remove(attempt)
        job.attempts.remove(attempt)
        running = self._at_origin if attempt.peer is None else self._at_peer
        key = attempt.digest if attempt.peer is None else attempt.peer
        running[key] -= 1
        if not running[key]:
            del running[key]
        self._news()
        if not job.is_over:
            if not job.attempts:
                self._unfinished -= 1
                self._put(job)
            return None
        copy = job.copy
        if copy is None or (not copy.is_in_place and any(other.is_in_place for other in job.attempts)):
            # The other one still writes where the chunk belongs: its worker spreads this copy as soon as it has ended.
            return None
        job.copy = None
        return copy

    def _lose(self, attempt: Attempt) -> None:
        """Another source was first. A peer that gave far less than others by then is left alone for a while."""
        seconds = self._clock() - attempt.begun
        if attempt.peer is not None and not attempt.stop.is_set():
            if self._reputations.is_slow(attempt.peer, attempt.got, seconds, slack_s=_TAKE_OVER_S):
                self._end_slow(attempt)
            else:
                self._reputations.lost(attempt.peer, attempt.got, seconds)
        attempt.stop.set()

    def _end_slow(self, attempt: Attempt) -> None:
        assert attempt.peer is not None
        attempt.is_too_slow = True
        self._was_slow[attempt.peer] += 1
        self._reputations.failed(attempt.peer, slow=True)
        attempt.stop.set()

    def _count(self, attempt: Attempt) -> None:
        came = max(attempt.got - attempt.seen, 0)
        attempt.seen = attempt.got
        if attempt.peer is None:
            self._from_origin += came
        else:
            self._from_peers += came

    def _tick(self) -> None:
        now = self._clock()
        seconds = now - self._ticked
        if seconds <= 0:
            return
        self._ticked = now
        for attempt in self._attempts:
            self._count(attempt)
        left = self._waiting_bytes + sum(attempt.nbytes - attempt.got for attempt in self._attempts)
        self._patience.tick(
            seconds,
            spared=self._is_spared,
            from_peers=self._from_peers,
            from_origin=self._from_origin,
            lanes=sum(self._at_origin.values()),
            left=left,
            chunk=next((job.want.chunk.nbytes for job in self._waiting.values()), 0),
        )
        self._from_peers = self._from_origin = 0.0

    def _choose_anew(self) -> Attempt | None:
        """`_choose`, but nothing if it found nothing a moment ago and there is no news: many may wait, one need look."""
        now = self._clock()
        if self._found_nothing and now - self._looked < _WAIT_S:
            return None
        self._looked = now
        self._tick()
        choice = self._choose()
        self._found_nothing = choice is None
        # Also while strangers are tried, one after the other.
        self._is_spared = bool(self._waiting) and sum(self._at_origin.values()) < self._connections
        return choice

    def _choose(self) -> Attempt | None:
        usable = {url: peer for url, peer in self._peers.items() if self._reputations.is_usable(url)}
        is_impatient = self._patience.is_over
        lanes = self._lanes(len(usable), is_impatient)
        has_lane = sum(self._at_origin.values()) < lanes
        proven = {url for url in usable if self._reputations.is_proven(url)}
        open_to = self._open_peers(usable, proven, is_impatient)
        fresh: str | None = None
        ours = False
        best: tuple[int, str, list[str]] | None = None
        look_at = min(_LOOK_AT, max(_LOOK_AT_PAIRS // len(usable), _LOOK_AT_LEAST)) if usable else 1
        for digest, job in islice(self._waiting.items(), look_at):
            holders = (
                [url for url in usable if digest in usable[url].have and url not in job.tried] if self._holders[digest] else []
            )
            if has_lane and not ours and not holders and not self._is_claimed(digest, usable):
                ours = self._owner(digest) == self._me
                if ours or fresh is None:
                    fresh = digest
            free = [url for url in holders if url in open_to]
            if free and (best is None or len(holders) < best[0]):
                best = (len(holders), digest, free)
        if fresh is not None and has_lane:
            return self._begin(fresh, None)
        if best is not None:
            _, digest, free = best
            peer = max(free, key=lambda url: self._reputations.speed(url) / (1 + self._at_peer[url]))
            if peer in proven or not (is_impatient and has_lane):
                return self._begin(digest, peer)
        if is_impatient and has_lane and self._waiting:
            return self._begin(next(iter(self._waiting)), None)
        # All that is left is on its way, to us or to others, or waits for a peer that is busy.
        return None if self._waiting and not is_impatient else self._take_over(usable, proven & open_to, has_lane)

    def _lanes(self, usable: int, is_impatient: bool) -> int:
        """How many requests the origin gets at once."""
        if self._shuffle is None:
            return self._origin_lanes
        if is_impatient:
            # One is enough to learn what it gives.
            return self._connections if self._patience.origin_bytes_per_s else 1
        if not self._looks:
            return 0
        if self._looks < _LOOKS_ALONE:
            # Who begins at the same time is not heard of yet: many chunks at once would each come late.
            return 1
        return max(self._origin_lanes // (1 + usable), 1)

    def _open_peers(self, usable: Iterable[str], proven: set[str], is_impatient: bool) -> set[str]:
        """Peers that may get one more request."""
        if sum(self._at_peer.values()) >= self._origin_lanes:
            return set()
        strangers = sum(count for url, count in self._at_peer.items() if url not in proven)
        speed = self._patience.origin_bytes_per_s
        is_late = is_impatient and self._waiting_bytes < speed * _TIME_FOR_STRANGERS_S
        room = 0 if is_late else self._connections - strangers
        return {
            url for url in usable if (self._at_peer[url] < _PER_PEER if url in proven else room > 0 and not self._at_peer[url])
        }

    def _is_claimed(self, digest: str, usable: Mapping[str, PeerView]) -> bool:
        return digest in self._claimed and any(digest in peer.pending for peer in usable.values())

    def _take_over(self, usable: Mapping[str, PeerView], open_to: set[str], has_lane: bool) -> Attempt | None:
        """A second request for the chunk whose source needs much longer than another one would."""
        now = self._clock()
        lane = self._reputations.lane.bytes_per_s
        latest: tuple[float, Job, str | None] | None = None
        for job in {id(attempt.job): attempt.job for attempt in self._attempts}.values():
            if job.is_over:
                continue
            digest, nbytes = job.want.chunk.digest, job.want.chunk.nbytes
            sources = {attempt.peer for attempt in job.attempts}
            choices: list[tuple[float, str | None]] = [
                (self._reputations.speed(url), url)
                for url in open_to - sources - job.tried
                if len(sources) == 1 and digest in usable[url].have
            ]
            if None not in sources and has_lane:
                choices.append((lane, None))
            if not choices:
                continue
            speed, source = max(choices, key=lambda choice: choice[0])
            needs_s = nbytes / speed if speed else _TAKE_OVER_UNKNOWN_S / _TAKE_OVER_FACTOR
            left_s = min(attempt.left_s(now) for attempt in job.attempts)
            running_s = now - max(attempt.begun for attempt in job.attempts)
            if running_s < max(_TAKE_OVER_S, needs_s / 2) or left_s < _TAKE_OVER_FACTOR * needs_s + _TAKE_OVER_S:
                continue
            if latest is None or left_s > latest[0]:
                latest = (left_s, job, source)
        return self._request(latest[1], latest[2]) if latest is not None else None

    def _owner(self, digest: str) -> str:
        """Which of all pullers should fetch it from the origin first: all come to the same answer without a message."""
        if digest not in self._owners:
            self._owners[digest] = max((self._me, *self._peers), key=lambda url: crc32(f"{url} {digest}".encode()))
        return self._owners[digest]

    def _begin(self, digest: str, peer: str | None) -> Attempt:
        job = self._waiting.pop(digest)
        self._waiting_bytes -= job.want.chunk.nbytes
        self._unfinished += 1
        return self._request(job, peer)

    def _request(self, job: Job, peer: str | None) -> Attempt:
        attempt = Attempt(job, peer, self._abort, self._clock())
        job.attempts.append(attempt)
        self._attempts.append(attempt)
        if peer is None:
            self._at_origin[attempt.digest] += 1
        else:
            self._at_peer[peer] += 1
        return attempt
