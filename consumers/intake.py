"""From records to batches: header decision, decoding, group assembly, a byte-bounded buffer, the batch cut. No I/O.

Refuses to read Kafka or write to it: `offer` takes a record and says what must be dead-lettered, `cut` gives a batch. One
lock, so that a polling thread offers while the trainer cuts.

Staleness is judged when a record is consumed and again, for all that waits here, whenever a newer version is announced:
nothing stale is left to be cut. A group is one decision: what befalls one member befalls all, also those that arrive later,
and after a restart.

A group is stale by its oldest token (`on_stale` drop), or by the member whose newest token is the oldest (mask): then its
other tokens are trained, and those that are too old are masked when the batch is cut.
"""

import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from consumers.groups import Assembler, Group, Member, mask_older
from consumers.ledger import Ledger, Reason, Resolved
from echo import codec
from echo.config import OnStale
from echo.errors import CorruptRecordError, EchoError, RecordError, SchemaError
from echo.journal import Interval
from echo.log import LogRecord
from echo.staleness import is_stale, staleness
from echo.trajectory import Trajectory, incarnation_of

# Decided groups that are remembered, so that a late member gets its group's decision. 100,000 ids take about 25 MB.
_REMEMBERED_GROUPS = 100_000
# Of these, so many go into a checkpoint: the newest that lack members. A group's members share a partition (two, if the
# topic got more of them meanwhile) and are written one soon after the other, so few are ever between two of them; what lacks
# one for good (it was unreadable, its producer died) must not pile up. At most 1 MB.
_CHECKPOINTED_GROUPS = 10_000


class DeadLetter(NamedTuple):
    """A record to be written to the dead-letter topic; it is resolved once the broker has acknowledged that."""

    record: LogRecord
    reason: Reason
    detail: str


class IntakeStats(NamedTuple):
    """Numbers for people and metrics; counts are records unless they say groups."""

    read: int
    pending: int
    resolved: dict[Reason, int]
    groups_ready: int
    groups_incomplete: int
    members_incomplete: int
    nbytes: int
    newest_version: int
    worst_staleness: int
    masked_tokens: int


class Judged(NamedTuple):
    """A record that was decoded before it was resolved: how, its task, its completion's length in tokens, its reward."""

    reason: Reason
    task: str
    completion: int
    reward: float


class Settlement(NamedTuple):
    """What was resolved: offsets, the decoded records, dropped groups per producer incarnation; the ledger's state if asked."""

    resolved: Resolved
    judged: list[Judged]
    dropped_groups: dict[str, int]
    state: dict[str, Any] | None


class _Decision:
    """What befalls members that come after their group was decided. missing: how many of them are still to come.

    held: members wait here to be trained, so a restart reads them again and decides anew.
    """

    __slots__ = ("held", "missing", "reason")

    def __init__(self, reason: Reason, missing: int, *, held: bool = False) -> None:
        self.reason = reason
        self.missing = missing
        self.held = held


class Standing(NamedTuple):
    """Requested groups that wait here to be cut, and those that were dropped and will never come, with the reason."""

    ready: frozenset[str]
    dropped: dict[str, Reason]


class BufferTooSmallError(EchoError):
    """One batch does not fit into the buffer: no progress is possible."""


class Intake:
    """See the module. `vocabulary` is the learner's size of it.

    state: what `settle` gave for the checkpoint that `ledger` comes from.
    max_tokens: prompt and completion tokens that the learner can take at most; a longer record's group is dropped.
    """

    def __init__(
        self,
        *,
        run_id: str,
        max_staleness: int,
        on_stale: OnStale = "drop",
        groups_per_step: int,
        buffer_bytes: int,
        group_deadline_s: float,
        min_group_size: int | None = None,
        ledger: Ledger,
        state: Mapping[str, Any] | None = None,
        newest_version: int,
        vocabulary: int,
        max_tokens: int | None = None,
    ) -> None:
        self._run_id = run_id
        self._max_staleness = max_staleness
        self._masks = on_stale == "mask"
        self._groups_per_step = groups_per_step
        self._buffer_bytes = buffer_bytes
        self._min_group_size = min_group_size
        self._ledger = ledger
        self._newest = self._possible = newest_version
        self._vocabulary = vocabulary
        self._max_tokens = max_tokens
        # The deadline runs while records can come: members that wait in the log unread are not late.
        self._reading_s = 0.0
        self._assembler = Assembler(deadline_s=group_deadline_s)
        # Oldest policy first, equals in order of completion; beside each group its deciding version, which is not cheap to ask.
        self._ready: list[Group] = []
        self._ready_versions: list[int] = []
        self._ready_bytes = 0
        # By the group's key, since that is what a record is known by before its headers are read.
        self._decided: OrderedDict[bytes, _Decision] = OrderedDict(
            (name.encode(), _Decision(Reason(reason), missing))
            for name, (reason, missing) in (state or {}).get("decided", {}).items()
        )
        # By place: dead letters without acknowledgement, and those of the checkpoint that were not read again yet. What was
        # decided about their groups since must not befall them.
        self._letters: dict[tuple[int, int], tuple[Reason, str]] = {}
        self._letters_before = {
            (partition, offset): (Reason(reason), detail)
            for partition, offset, reason, detail in (state or {}).get("letters", ())
        }
        self._judged: list[Judged] = []
        self._dropped_groups: Counter[str] = Counter()
        self._worst_staleness = 0
        self._masked_tokens = 0
        # Sequential mode: the only groups that are taken. None takes every group of the run.
        self._requested: frozenset[str] | None = None
        self._changed = threading.Condition()

    # The polling thread's side.

    def offer(self, records: Iterable[LogRecord]) -> list[DeadLetter]:
        """Take records in log order. What can't be read comes back: write it to the dead letters, then `dead_lettered`."""
        dead: list[DeadLetter] = []
        kept: list[tuple[LogRecord, codec.RecordHeader]] = []
        with self._changed:
            letters_before = self._letters_before
            for record in records:
                if record.unreadable:
                    dead.extend(self._unreadable(record))
                    continue
                if letters_before and (record.partition, record.offset) in letters_before:
                    dead.append(self._letter_again(record))
                    continue
                # Most of what is dropped. To look at the headers would cost more than all else about it.
                decided = None if record.key is None else self._decided.get(record.key)
                if decided is not None:
                    if self._ledger.pass_over(record.partition, record.offset, decided.reason):
                        decided.missing -= 1
                    continue
                if not self._ledger.begin(record.partition, record.offset):
                    continue
                try:
                    header = codec.decode_headers(record.headers)
                except RecordError as error:
                    dead.append(DeadLetter(record, _reason(error), str(error)))
                    continue
                reason = self._judge(header)
                if reason is not None:
                    self._ledger.resolve(record.partition, record.offset, reason)
                elif header.max_policy_version > self._possible:
                    dead.append(self._impossible(record, header))
                else:
                    kept.append((record, header))
            # Together, which is cheaper.
            values = codec.decode_many([record.value for record, _ in kept])
            for (record, header), decoded in zip(kept, values, strict=True):
                letter = self._join(record, header, decoded)
                if letter is not None:
                    dead.append(letter)
            self._letters.update({(record.partition, record.offset): (reason, detail) for record, reason, detail in dead})
            self._tell()
        return dead

    def grow(self, partitions: int) -> None:
        """The topic has so many partitions from now on. Members of one group may stand in an old and in a new one."""
        with self._changed:
            self._ledger.grow(partitions)

    def dead_lettered(self, letter: DeadLetter) -> None:
        """The broker has acknowledged the dead letter."""
        with self._changed:
            self._ledger.resolve(letter.record.partition, letter.record.offset, letter.reason)
            del self._letters[letter.record.partition, letter.record.offset]

    def expire(self, read_s: float) -> None:
        """Decide groups whose deadline has passed: trainable with `min_group_size` members, else dropped.

        read_s: seconds for which the log was read since the last call.
        """
        with self._changed:
            self._reading_s += read_s
            for group_id in self._assembler.overdue(self._reading_s):
                members = self._assembler.remove(group_id)
                if self._min_group_size is not None and len(members) >= self._min_group_size:
                    ordered = sorted(members, key=lambda member: member.trajectory.group_index)
                    self._make_ready(Group(group_id, tuple(ordered)), Reason.DEADLINE)
                else:
                    self._drop(group_id, members, Reason.DEADLINE)
            self._tell()

    def full(self) -> bool:
        """Whether the buffer is full: stop reading. Makes room first where that is the only way on.

        Raises BufferTooSmallError where not even one batch fits.
        """
        with self._changed:
            while self._nbytes >= self._buffer_bytes and len(self._ready) < self._groups_per_step:
                oldest = self._assembler.oldest()
                if oldest is None:
                    raise BufferTooSmallError(
                        f"batch.buffer_bytes = {self._buffer_bytes} holds only {len(self._ready)} of batch.groups_per_step = "
                        f"{self._groups_per_step} groups: raise it to at least "
                        f"{self._groups_per_step * self._nbytes // max(1, len(self._ready))}"
                    )
                self._drop(oldest, self._assembler.remove(oldest), Reason.BUFFER_FULL)
            return self._nbytes >= self._buffer_bytes

    # The trainer's side.

    def begin_at(self, firsts: Mapping[int, int]) -> None:
        """Before reading: where each partition begins. A partition that was never read is read from there."""
        with self._changed:
            self._ledger.begin_at(firsts)

    def lose(self, firsts: Mapping[int, int]) -> dict[int, list[Interval]]:
        """Before reading: the log holds nothing below these offsets. Gives what is lost by that, per partition.

        Groups that lack a lost member are decided as any others that lack one: at their deadline.
        """
        with self._changed:
            lost = {partition: self._ledger.lose(partition, first) for partition, first in firsts.items()}
            self._letters_before = {
                place: letter for place, letter in self._letters_before.items() if place[1] >= firsts.get(place[0], 0)
            }
            return lost

    def held_groups(self) -> dict[str, int]:
        """Groups that wait here, complete or not, per producer incarnation."""
        with self._changed:
            names = [group.group_id for group in self._ready] + self._assembler.ids()
            return dict(Counter(incarnation_of(name) for name in names))

    def request(self, group_ids: Iterable[str]) -> None:
        """From now on take these groups alone: what else is read of the run is dropped."""
        with self._changed:
            self._requested = frozenset(group_ids)

    def standing(self, group_ids: Iterable[str]) -> Standing:
        """What has become of groups that the last `request` named; of those in neither set, members are missing."""
        with self._changed:
            ready = {group.group_id for group in self._ready}
            wanted = frozenset(group_ids)
            decided = {name: self._decided.get(name.encode()) for name in wanted - ready}
            return Standing(wanted & ready, {name: found.reason for name, found in decided.items() if found is not None})

    def cut(self, timeout_s: float) -> list[Group] | None:
        """A batch of `groups_per_step` groups, the oldest policy first, then in order of completion; None after the timeout.

        The batch stays pending until `trained`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._ready) >= self._groups_per_step, timeout_s):
                return None
            # Oldest policy first: partitions are read in no common order, and what is oldest is next to become stale.
            batch = self._ready[: self._groups_per_step]
            del self._ready[: self._groups_per_step], self._ready_versions[: self._groups_per_step]
            self._ready_bytes -= sum(group.nbytes for group in batch)
            if self._masks:
                before = sum(_trained_tokens(group) for group in batch)
                batch = [mask_older(group, self._newest - self._max_staleness) for group in batch]
                self._masked_tokens += before - sum(_trained_tokens(group) for group in batch)
            # `announced` has thrown out what became stale: no stale token may pass this line, whatever happened before.
            oldest = min(self._oldest_trained(member.trajectory) for group in batch for member in group.members)
            assert not self._is_stale(oldest), f"a token of version {oldest} at version {self._newest}"
            return batch

    def trained(self, batch: Iterable[Group], reason: Reason = Reason.TRAINED) -> None:
        """The batch has gone through an optimiser step (or was left out of it for `reason`)."""
        with self._changed:
            for group in batch:
                self._resolve_members(group.members, reason)
                decided = self._decided.get(group.group_id.encode())
                if decided is not None:
                    decided.held = False

    def announcing(self, version: int) -> None:
        """A newer policy version is about to be announced: records of it may be read before `announced` is called."""
        with self._changed:
            self._possible = max(self._possible, version)

    def announced(self, version: int) -> None:
        """A newer policy version has been announced: what waits here is judged against it, now."""
        with self._changed:
            assert version >= self._newest
            self._newest = version
            self._possible = max(self._possible, version)
            self._drop_stale()
            self._changed.notify_all()

    def wake(self) -> None:
        """Have a waiting `cut` look again."""
        with self._changed:
            self._changed.notify_all()

    def settle(self, *, with_state: bool) -> "Settlement":
        """What was resolved since the last call and, for a checkpoint, the state at this very moment, as plain data: the
        ledger's, and what is decided about records that are still to be read."""
        with self._changed:
            judged, self._judged = self._judged, []
            groups, self._dropped_groups = dict(self._dropped_groups), Counter()
            return Settlement(self._ledger.take_resolved(), judged, groups, self._state() if with_state else None)

    def stats(self) -> IntakeStats:
        with self._changed:
            return IntakeStats(
                read=self._ledger.read,
                pending=self._ledger.pending,
                resolved=dict(self._ledger.resolved),
                groups_ready=len(self._ready),
                groups_incomplete=len(self._assembler),
                members_incomplete=self._assembler.members,
                nbytes=self._nbytes,
                newest_version=self._newest,
                worst_staleness=self._worst_staleness,
                masked_tokens=self._masked_tokens,
            )

    def frontiers(self) -> dict[int, int]:
        """Per partition, the lowest offset not resolved; those of which nothing was read are not named."""
        with self._changed:
            return self._ledger.frontiers()

    def unresolved_span(self) -> dict[int, int]:
        """Per partition, offsets between the frontier and the next one to read."""
        with self._changed:
            return self._ledger.unresolved_span()

    # Inside the lock.

    def _tell(self) -> None:
        """Wake a waiting `cut` where it gets a batch: to wake it for every read would cost more than to drop what was read."""
        if len(self._ready) >= self._groups_per_step:
            self._changed.notify_all()

    def _state(self) -> dict[str, Any]:
        decided = [(key, found) for key, found in self._decided.items() if found.missing > 0 and not found.held]
        letters = self._letters_before | self._letters
        return {
            **self._ledger.state(),
            "decided": {key.decode(): [found.reason.value, found.missing] for key, found in decided[-_CHECKPOINTED_GROUPS:]},
            "letters": [[*place, reason.value, detail] for place, (reason, detail) in letters.items()],
        }

    def _unreadable(self, record: LogRecord) -> list[DeadLetter]:
        """Offsets that can't be read, whatever befell them before a restart: a letter for those that are not resolved."""
        for place in [place for place in self._letters_before if place[0] == record.partition]:
            if record.offset <= place[1] < record.end:
                del self._letters_before[place]
        return [
            DeadLetter(record._replace(offset=first, span=end - first), Reason.UNREADABLE, record.unreadable)
            for first, end in self._ledger.begin_run(record.partition, record.offset, record.end)
        ]

    def _letter_again(self, record: LogRecord) -> DeadLetter:
        """It could not be read before the restart, and the broker had not acknowledged its dead letter."""
        fresh = self._ledger.begin(record.partition, record.offset)
        assert fresh, f"{record.where} was resolved, and its dead letter was not"
        return DeadLetter(record, *self._letters_before.pop((record.partition, record.offset)))

    @property
    def _nbytes(self) -> int:
        return self._assembler.nbytes + self._ready_bytes

    def _judge(self, header: codec.RecordHeader) -> Reason | None:
        """Why a record is dropped from its headers, and with it its group where that is of this run; None: it is not."""
        if header.run_id != self._run_id:
            return Reason.FOREIGN_RUN
        decided = self._decided.get(header.group_id.encode())
        if decided is not None:
            decided.missing -= 1
            return decided.reason
        reason = None
        if self._is_stale(header.max_policy_version if self._masks else header.min_policy_version):
            reason = Reason.STALE
        elif self._max_tokens is not None and header.token_count > self._max_tokens:
            reason = Reason.TOO_LARGE
        elif self._requested is not None and header.group_id not in self._requested:
            # Nothing of the group was ever taken, and it may be requested later.
            return Reason.UNREQUESTED
        if reason is not None:
            self._drop_with(header, reason)
        return reason

    def _impossible(self, record: LogRecord, header: codec.RecordHeader) -> DeadLetter:
        """A record of a version that nobody can have sampled from: trained, it would pass for fresh until that version."""
        self._drop_with(header, Reason.INCOMPLETE_GROUP)
        return DeadLetter(
            record,
            Reason.CORRUPT,
            f"policy version {header.max_policy_version} is above {self._possible}, the newest of this run: no producer can "
            "have sampled from it",
        )

    def _join(self, record: LogRecord, header: codec.RecordHeader, decoded: codec.Decoded | RecordError) -> DeadLetter | None:
        """Have a record join its group, unless one that was read with it has decided that."""
        where = (record.partition, record.offset)
        decided = self._decided.get(header.group_id.encode())
        if decided is not None:
            decided.missing -= 1
            self._ledger.resolve(*where, decided.reason)
            return None
        if self._assembler.holds(header.group_id, header.group_index):
            self._ledger.resolve(*where, Reason.DUPLICATE)
            return None
        if not isinstance(decoded, RecordError):
            decoded = self._misfit(decoded, header) or decoded
        if isinstance(decoded, RecordError):
            self._drop_with(header, Reason.INCOMPLETE_GROUP)
            return DeadLetter(record, _reason(decoded), str(decoded))
        group = self._assembler.add(Member(*where, decoded.trajectory), self._reading_s)
        if group is not None:
            self._make_ready(group, Reason.DUPLICATE)
        return None

    def _misfit(self, decoded: codec.Decoded, header: codec.RecordHeader) -> CorruptRecordError | None:
        """Why a sound value can't join its group."""
        if codec.header_of(decoded.trajectory) != header:
            return CorruptRecordError("headers and value disagree")
        if decoded.highest_id >= self._vocabulary:
            return CorruptRecordError(
                f"token id {decoded.highest_id} is outside the learner's vocabulary of {self._vocabulary}"
            )
        size = self._assembler.size_of(header.group_id)
        if size is not None and size != header.group_size:
            return CorruptRecordError(f"group_size is {header.group_size}, but {size} in its siblings")
        return None

    def _make_ready(self, group: Group, later: Reason) -> None:
        """The group may be trained as it is. `later` is what becomes of a member that comes after this."""
        version = self._deciding_version(group.members)
        at = bisect_right(self._ready_versions, version)
        self._ready.insert(at, group)
        self._ready_versions.insert(at, version)
        self._ready_bytes += group.nbytes
        lacking = group.members[0].trajectory.group_size - len(group.members)
        self._remember(group.group_id, _Decision(later, lacking, held=True))

    def _deciding_version(self, members: Iterable[Member]) -> int:
        """The version by which these are stale or not."""
        if self._masks:
            return min(member.trajectory.max_policy_version for member in members)
        return min(member.trajectory.min_policy_version for member in members)

    def _oldest_trained(self, trajectory: Trajectory) -> int:
        return trajectory.oldest_trained_version if self._masks else trajectory.min_policy_version

    def _is_stale(self, version: int) -> bool:
        self._worst_staleness = max(self._worst_staleness, staleness(self._newest, version))
        return is_stale(self._newest, version, self._max_staleness)

    def _drop_stale(self) -> None:
        stale = sum(self._is_stale(version) for version in self._ready_versions)
        for group in self._ready[:stale]:
            self._ready_bytes -= group.nbytes
            self._drop(group.group_id, group.members, Reason.STALE)
        del self._ready[:stale], self._ready_versions[:stale]
        for group_id, members in self._assembler.open_groups():
            if self._is_stale(self._deciding_version(members)):
                self._drop(group_id, self._assembler.remove(group_id), Reason.STALE)

    def _drop(self, group_id: str, members: Sequence[Member], reason: Reason) -> None:
        """Drop a group: its members here now, and those still to come."""
        self._remember(group_id, _Decision(reason, members[0].trajectory.group_size - len(members)))
        self._resolve_dropped(group_id, members, reason)

    def _drop_with(self, header: codec.RecordHeader, reason: Reason) -> None:
        """Drop the group of a record that has not joined it, and that the caller sees to."""
        members = self._assembler.remove(header.group_id)
        self._remember(header.group_id, _Decision(reason, header.group_size - len(members) - 1))
        self._resolve_dropped(header.group_id, members, reason)

    def _remember(self, group_id: str, decision: _Decision) -> None:
        key = group_id.encode()
        before = self._decided.pop(key, None)
        if before is not None:
            # Some may have come since.
            decision.missing = before.missing
        self._decided[key] = decision
        if len(self._decided) > _REMEMBERED_GROUPS:
            self._decided.popitem(last=False)

    def _resolve_dropped(self, group_id: str, members: Iterable[Member], reason: Reason) -> None:
        self._dropped_groups[incarnation_of(group_id)] += 1
        self._resolve_members(members, reason)

    def _resolve_members(self, members: Iterable[Member], reason: Reason) -> None:
        for partition, offset, trajectory in members:
            self._ledger.resolve(partition, offset, reason)
            self._judged.append(Judged(reason, trajectory.task, len(trajectory.completion_ids), trajectory.reward))


def _trained_tokens(group: Group) -> int:
    return sum(int(member.trajectory.loss_mask.sum()) for member in group.members)


def _reason(error: RecordError) -> Reason:
    return Reason.SCHEMA if isinstance(error, SchemaError) else Reason.CORRUPT
