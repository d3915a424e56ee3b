"""The producers as the trainer sees them: who lives, what each serves, how fast each is, what each may have outstanding.

Refuses I/O and clocks of other machines: liveness is when a heartbeat was received here, on the caller's clock.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from echo.control import Grant, Heartbeat
from echo.staleness import grant_windows

# A rate is taken over at least so much busy time; a shorter interval holds one batch or none and says little.
_RATE_OVER_S = 2.0
# Records that were acknowledged so long ago are read by now, if the reader does nothing but wait.
_SETTLED_S = 5.0
# Weight of the newest interval in the throughput estimate: half of an old rate is forgotten after about two intervals.
_SMOOTHING = 0.3


class ProducerStatus(NamedTuple):
    """A live producer. throughput: groups per second of busy time, smoothed; 0 while unknown. outstanding: groups.

    heartbeat: the number of its last one. requests_held: as that one said.
    """

    producer_id: str
    incarnation: str
    serving: int
    state: str
    throughput: float
    outstanding: int
    last_pull_error: str
    heartbeat: int = 0
    requests_held: int = 0


class GivenUp(NamedTuple):
    """A producer's word that it will not answer a request. producer: its incarnation."""

    producer: str
    why: str


class _Seen:
    def __init__(self, heartbeat: Heartbeat, now: float) -> None:
        self.heartbeat = heartbeat
        self.at = now
        self.throughput = 0.0
        self.rate_from = heartbeat
        # Since when it reports as many published groups as now.
        self.published_at = now
        # Limits that we granted, by control message, and do not know to be in force or replaced yet.
        self.sent: dict[int, int] = {}

    def may_reach(self) -> int:
        """How many groups the incarnation can have begun by now, whatever is still under way to it or from it."""
        heard = self.heartbeat
        return max(heard.groups_started, heard.granted_limit, *self.sent.values())

    def replace(self, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.groups_published != self.heartbeat.groups_published:
            self.published_at = now
        self.heartbeat = heartbeat
        self.at = now
        # Of what was sent before the message in force nothing counts any more: the heartbeat tells what came of it.
        self.sent = {sequence: limit for sequence, limit in self.sent.items() if sequence > heartbeat.control_sequence}


class Fleet:
    """Not thread safe: its owner holds a lock.

    total_window: groups outstanding over all producers (`staleness.total_window`); None grants nothing, because producers are
    asked for each group (sequential mode). resolved: groups resolved per producer
    incarnation, from a checkpoint.
    """

    def __init__(
        self,
        *,
        run_id: str,
        total_window: int | None,
        dead_after_s: float,
        clock: Callable[[], float],
        resolved: Mapping[str, int] | None = None,
    ) -> None:
        self.run_id = run_id
        self._total_window = total_window
        self._dead_after_s = dead_after_s
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        # Former incarnations of those that came back under the same id.
        self._replaced: dict[str, _Seen] = {}
        self._resolved: Counter[str] = Counter(resolved or {})
        # Groups that will never be read, since their records are gone: see `write_off`.
        self._written_off: Counter[str] = Counter()
        self._given_up: dict[str, GivenUp] = {}

    def hear(self, heartbeat: Heartbeat) -> None:
        """A heartbeat was received now. Those of other runs and out-of-date ones are ignored."""
        if heartbeat.run_id != self.run_id:
            return
        # Also the last words of who leaves.
        self._given_up.update({request: GivenUp(heartbeat.incarnation, why) for request, why in heartbeat.given_up.items()})
        now = self._clock()
        if heartbeat.leaving:
            self._seen.pop(heartbeat.incarnation, None)
            self._replaced.pop(heartbeat.incarnation, None)
            return
        seen = self._seen.get(heartbeat.incarnation) or self._replaced.get(heartbeat.incarnation)
        if seen is None:
            # A process that came back under the same id replaces its former incarnation at once.
            for other, known in list(self._seen.items()):
                if known.heartbeat.producer_id == heartbeat.producer_id and known.heartbeat.created <= heartbeat.created:
                    self._replaced[other] = self._seen.pop(other)
            self._seen[heartbeat.incarnation] = _Seen(heartbeat, now)
            return
        if heartbeat.sequence <= seen.heartbeat.sequence:
            return
        if self._replaced.pop(heartbeat.incarnation, None):
            # It still lives: it is drained, or two processes have one id. To replace the other in turn would make each of them
            # dead at every heartbeat of the other.
            self._seen[heartbeat.incarnation] = seen
        busy = heartbeat.busy_seconds - seen.rate_from.busy_seconds
        if busy >= _RATE_OVER_S:
            rate = max(0, heartbeat.groups_published - seen.rate_from.groups_published) / busy
            seen.throughput = rate if seen.throughput == 0 else (1 - _SMOOTHING) * seen.throughput + _SMOOTHING * rate
            seen.rate_from = heartbeat
        seen.replace(heartbeat, now)

    def group_resolved(self, incarnation: str, groups: int = 1) -> None:
        """Groups of this incarnation have been trained, dropped or dead-lettered."""
        self._resolved[incarnation] += groups

    def write_off(self, held: Mapping[str, int], idle_s: float) -> dict[str, int]:
        """Count published groups that will never be read as resolved, so that their producers are not held back for ever.

        held: groups that were read and wait to be trained, per incarnation. idle_s: for how long the whole log was read to its
        end and held nothing new. What a producer had published before that was read, or is gone: deleted before a trainer that
        started over could read it, or unreadable to its last member. Gives what was found anew.
        """
        self._bury()
        now = self._clock()
        found: dict[str, int] = {}
        for name, seen in self._seen.items():
            if min(idle_s, now - seen.published_at) < _SETTLED_S:
                continue
            gone = max(0, seen.heartbeat.groups_published - held.get(name, 0) - self._resolved[name])
            if gone > self._written_off[name]:
                found[name] = gone - self._written_off[name]
            # Also fewer than before: some of them were late, and have come.
            self._written_off[name] = gone
        return found

    def _done(self, name: str) -> int:
        """Groups of an incarnation that hold no room any more."""
        return self._resolved[name] + self._written_off[name]

    def take_given_up(self) -> dict[str, GivenUp]:
        """By request, what producers have said since the last call that they gave up; each heartbeat says it anew."""
        found, self._given_up = self._given_up, {}
        return found

    def alive(self) -> list[ProducerStatus]:
        """Producers with a recent heartbeat, by name."""
        self._bury()
        return sorted(
            ProducerStatus(
                seen.heartbeat.producer_id,
                incarnation,
                seen.heartbeat.serving,
                seen.heartbeat.state,
                seen.throughput,
                max(0, seen.heartbeat.groups_started - self._done(incarnation)),
                seen.heartbeat.last_pull_error,
                seen.heartbeat.sequence,
                seen.heartbeat.requests_held,
            )
            for incarnation, seen in self._seen.items()
        )

    def grants(self) -> dict[str, Grant]:
        """What every live producer may have outstanding, by incarnation, if it were told now.

        Never more than the total window, plus one per producer that was just heard of: room goes from one producer to another
        only when the heartbeat of the first shows that it can't be used there any more.
        """
        self._bury()
        if self._total_window is None:
            return {}
        wanted = grant_windows(self._total_window, {name: seen.throughput for name, seen in self._seen.items()})
        # Groups that each can have outstanding by now, whatever we say next.
        held = {name: max(0, seen.may_reach() - self._done(name)) for name, seen in self._seen.items()}
        free = max(0, self._total_window - sum(held.values()))
        growth = {name: window - held[name] for name, window in wanted.items() if window > held[name]}
        windows = dict(wanted)
        for name, more in sorted(growth.items()):
            share = min(more, free * more // sum(growth.values()))
            windows[name] = max(1, held[name] + share)
        return {name: Grant(window=window, resolved=self._done(name)) for name, window in windows.items()}

    def granted(self, sequence: int, grants: Mapping[str, Grant]) -> None:
        """These grants are sent now, in this control message."""
        for name, grant in grants.items():
            if name in self._seen:
                self._seen[name].sent[sequence] = grant.resolved + grant.window

    def resolved(self) -> dict[str, int]:
        """For a checkpoint: groups resolved per incarnation, with those that were written off."""
        return dict(self._resolved + self._written_off)

    def _bury(self) -> None:
        now = self._clock()
        for known in (self._seen, self._replaced):
            for name in [name for name, seen in known.items() if now - seen.at > self._dead_after_s]:
                del known[name]
