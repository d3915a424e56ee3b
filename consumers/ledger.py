"""Resolution accounting: every record read ends exactly once as trained, dropped or dead-lettered. Pure.

Refuses I/O and any judgement: others decide, the ledger holds them to it. It also knows, per partition, the frontier (the
lowest offset not resolved) and what is resolved above it, which is what a checkpoint needs to start reading again.

A batch that can't be read counts as its offsets, which are resolved together and kept as one run.

Offsets may have gaps (commit markers, compaction). Records of a partition are read in rising order, so an offset between
two that were read one after the other never shows up, and intervals may run across it.
"""

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any

from echo.journal import Interval, merged


class Outcome(StrEnum):
    TRAINED = "trained"
    DROPPED = "dropped"
    DEAD_LETTERED = "dead_lettered"


class Reason(StrEnum):
    """Why a record was not trained; TRAINED where it was."""

    TRAINED = "trained"
    STALE = "stale"
    DUPLICATE = "duplicate"
    FOREIGN_RUN = "foreign_run"
    UNREQUESTED = "unrequested"
    DEADLINE = "deadline"
    INCOMPLETE_GROUP = "incomplete_group"
    BUFFER_FULL = "buffer_full"
    LOST = "lost"
    TOO_LARGE = "too_large"
    NONFINITE = "nonfinite"
    SCHEMA = "schema"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"


OUTCOME_OF = {
    Reason.TRAINED: Outcome.TRAINED,
    Reason.STALE: Outcome.DROPPED,
    Reason.DUPLICATE: Outcome.DROPPED,
    Reason.FOREIGN_RUN: Outcome.DROPPED,
    Reason.UNREQUESTED: Outcome.DROPPED,
    Reason.DEADLINE: Outcome.DROPPED,
    Reason.INCOMPLETE_GROUP: Outcome.DROPPED,
    Reason.BUFFER_FULL: Outcome.DROPPED,
    Reason.LOST: Outcome.DROPPED,
    Reason.TOO_LARGE: Outcome.DROPPED,
    Reason.NONFINITE: Outcome.DROPPED,
    Reason.SCHEMA: Outcome.DEAD_LETTERED,
    Reason.CORRUPT: Outcome.DEAD_LETTERED,
    Reason.UNREADABLE: Outcome.DEAD_LETTERED,
}


class Resolved:
    """Which offsets ended how, as half-open runs: many records in a row take no more memory than one, others 16 bytes each."""

    def __init__(self) -> None:
        # Each run is two numbers, one after the other.
        self._runs: dict[tuple[Reason, int], array[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, partition: int, offset: int, reason: Reason) -> None:
        self.add_run(partition, offset, offset + 1, reason)

    def add_run(self, partition: int, first: int, end: int, reason: Reason) -> None:
        runs = self._runs.get((reason, partition))
        if runs is None:
            self._runs[reason, partition] = array("q", (first, end))
        elif runs[-1] == first:
            runs[-1] = end
        else:
            runs.extend((first, end))

    def update(self, other: "Resolved") -> None:
        """Take over what another one holds."""
        for place, runs in other._runs.items():
            mine = self._runs.setdefault(place, array("q"))
            if mine and mine[-1] == runs[0]:
                mine[-1] = runs[1]
                runs = runs[2:]
            mine.extend(runs)

    def by_reason(self) -> dict[str, dict[str, list[Interval]]]:
        """As a line of the journal has it: reason -> partition -> intervals."""
        found: dict[str, dict[str, list[Interval]]] = {}
        for (reason, partition), runs in self._runs.items():
            found.setdefault(reason.value, {})[str(partition)] = merged(zip(runs[::2], runs[1::2], strict=True))
        return found


class _PartitionLedger:
    """One partition: offsets read and not resolved, in rising order. All others below the position are resolved."""

    def __init__(self, start: int | None, resolved: Sequence[Interval]) -> None:
        self.position = start or 0
        self._started = start is not None
        # To the first offset after each. For its order: what is resolved above one that waits must take no memory.
        self.pending: dict[int, int] = {}
        # Offsets that are pending.
        self.waiting = 0
        self.carried = deque(sorted((first, end) for first, end in resolved if end > self.position))

    @property
    def begun(self) -> bool:
        """Whether anything of it was ever read: before that nobody knows where it starts."""
        return self._started or self.position > 0

    @property
    def frontier(self) -> int:
        return next(iter(self.pending), self.position)

    def was_resolved(self, offset: int) -> bool:
        while self.carried and self.carried[0][1] <= offset:
            self.carried.popleft()
        return bool(self.carried) and self.carried[0][0] <= offset

    def resolved_above(self) -> list[Interval]:
        """Resolved offsets in [frontier, position) and what a checkpoint carried above the position."""
        edges = [*self.pending.items(), (self.position, self.position)] if self.pending else []
        found = [(end, above) for (_, end), (above, _) in pairwise(edges) if end < above]
        found.extend((max(first, self.position), end) for first, end in self.carried if end > self.position)
        return found


class Ledger:
    """Counts and positions. Not thread safe: its owner holds a lock.

    state: what `state()` of an earlier ledger returned; records at or above its frontiers are expected again, those it had
    resolved are recognised by `begin` returning False.
    """

    def __init__(self, partitions: Iterable[int] = (), state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self.resolved: Counter[Reason] = Counter({Reason(name): n for name, n in state.get("resolved", {}).items()})
        positions = {int(number): int(offset) for number, offset in state.get("frontier", {}).items()}
        above = {int(number): [(a, b) for a, b in pairs] for number, pairs in state.get("above", {}).items()}
        self._partitions = {
            number: _PartitionLedger(positions.get(number), above.get(number, ()))
            for number in sorted({*partitions, *positions})
        }
        self._newly_resolved = Resolved()
        self.read = sum(self.resolved.values())
        """Records read in this lineage: those resolved before the checkpoint, and those read since. Counted for itself, so that
        `read = trained + dropped + dead_lettered + pending` can fail."""

    @property
    def pending(self) -> int:
        return sum(ledger.waiting for ledger in self._partitions.values())

    def count(self, outcome: Outcome) -> int:
        return sum(n for reason, n in self.resolved.items() if OUTCOME_OF[reason] == outcome)

    def begin(self, partition: int, offset: int) -> bool:
        """A record was read. False if it is resolved already (the checkpoint says so): leave it alone.

        Reading an offset twice, or backwards, is a broken reader: AssertionError.
        """
        ledger = self._partitions[partition]
        assert offset >= ledger.position, f"partition {partition}: offset {offset} after position {ledger.position}"
        done = bool(ledger.carried) and ledger.was_resolved(offset)
        ledger.position = offset + 1
        if not done:
            ledger.pending[offset] = offset + 1
            ledger.waiting += 1
            self.read += 1
        return not done

    def begin_run(self, partition: int, first: int, end: int) -> list[Interval]:
        """Offsets were read that can't be unpacked: those not resolved already, as runs, each to be resolved as one."""
        ledger = self._partitions[partition]
        assert first >= ledger.position, f"partition {partition}: offset {first} after position {ledger.position}"
        fresh: list[Interval] = []
        below = first
        for done, done_end in [*ledger.carried, (end, end)]:
            if below < min(done, end):
                fresh.append((below, min(done, end)))
            below = max(below, done_end)
        ledger.position = end
        for begin, stop in fresh:
            ledger.pending[begin] = stop
            ledger.waiting += stop - begin
            self.read += stop - begin
        return fresh

    def resolve(self, partition: int, offset: int, reason: Reason) -> None:
        """The record, or the run that begins there, is done with. To resolve it twice, or unread, is an AssertionError."""
        ledger = self._partitions[partition]
        assert offset in ledger.pending, f"partition {partition}: offset {offset} is not pending ({reason})"
        end = ledger.pending.pop(offset)
        ledger.waiting -= end - offset
        self.resolved[reason] += end - offset
        self._newly_resolved.add_run(partition, offset, end, reason)

    def pass_over(self, partition: int, offset: int, reason: Reason) -> bool:
        """A record was read and is resolved at once: `begin` and `resolve` in one, for where many are dropped."""
        ledger = self._partitions[partition]
        if ledger.carried:
            if fresh := self.begin(partition, offset):
                self.resolve(partition, offset, reason)
            return fresh
        assert offset >= ledger.position, f"partition {partition}: offset {offset} after position {ledger.position}"
        ledger.position = offset + 1
        self.read += 1
        self.resolved[reason] += 1
        self._newly_resolved.add(partition, offset, reason)
        return True

    def grow(self, partitions: int) -> None:
        """The topic has so many partitions now: new ones begin at offset 0."""
        for number in range(partitions):
            self._partitions.setdefault(number, _PartitionLedger(0, ()))

    def begin_at(self, firsts: Mapping[int, int]) -> None:
        """Partitions that were never read begin at these offsets, so that a later deletion is noticed."""
        for number, first in firsts.items():
            if not self._partitions[number].begun:
                self._partitions[number] = _PartitionLedger(first, ())

    def lose(self, partition: int, first: int) -> list[Interval]:
        """The log holds nothing below `first` any more, and nothing was read since the checkpoint: what is not resolved below
        it counts as read and as lost. Gives these offsets; some may never have been records (commit markers)."""
        ledger = self._partitions[partition]
        assert not ledger.pending, f"partition {partition}: {len(ledger.pending)} records were read already"
        lost: list[Interval] = []
        below = ledger.position
        for resolved_first, resolved_end in [*ledger.carried, (first, first)]:
            if below < min(resolved_first, first):
                lost.append((below, min(resolved_first, first)))
            below = max(below, resolved_end)
        for begin, end in lost:
            self.read += end - begin
            self.resolved[Reason.LOST] += end - begin
            self._newly_resolved.add_run(partition, begin, end, Reason.LOST)
        self._partitions[partition] = _PartitionLedger(max(first, ledger.position), ledger.carried)
        return lost

    def take_resolved(self) -> Resolved:
        """What was resolved since the last call."""
        taken, self._newly_resolved = self._newly_resolved, Resolved()
        return taken

    def frontiers(self) -> dict[int, int]:
        """Per partition, the offset to read from after a restart.

        A partition of which nothing is known is not named: it is read from its beginning, which need not be 0, since retention
        may have moved it, and offset 0 would then be an error.
        """
        return {number: ledger.frontier for number, ledger in self._partitions.items() if ledger.begun}

    def unresolved_span(self) -> dict[int, int]:
        """Per partition, offsets between the frontier and the next one to read."""
        return {number: ledger.position - ledger.frontier for number, ledger in self._partitions.items()}

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint: frontiers, resolved intervals above them, and the counts of what is resolved."""
        return {
            "frontier": {str(number): offset for number, offset in self.frontiers().items()},
            "above": {
                str(number): [list(interval) for interval in ledger.resolved_above()]
                for number, ledger in self._partitions.items()
            },
            "resolved": {reason.value: n for reason, n in sorted(self.resolved.items())},
        }
