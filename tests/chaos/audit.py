"""After a run: every id compared, from the log itself, the journal, the last checkpoint, and what producers were told.

Refuses to believe a process: what was lost or trained twice is counted from what lies on disk and in the topics.
"""

import itertools
from collections import Counter
from typing import NamedTuple

from consumers.checkpoint import CheckpointStore
from echo import codec, control, journal, report
from echo.control import Announcement
from echo.errors import CheckpointError, RecordError
from echo.log import LogRecord
from tests.chaos.swarm import GROUP, GROUPS_PER_STEP, STALENESS, Swarm

# Twice what is outstanding in a run that nothing happens to: no partition is left unread.
_MOST_WAITING = 2 * (STALENESS + 1) * GROUPS_PER_STEP * GROUP


class Verdict(NamedTuple):
    """lost: acknowledged records that the log lacks, or that the trainer passed over without resolving them. trained_twice:
    records and trajectory ids trained more than once in the lineage. wrong: everything else, in words."""

    acknowledged: int
    steps: int
    lost: int
    trained_twice: int
    wrong: tuple[str, ...]
    counts: report.Counts | None


def audit(swarm: Swarm) -> Verdict:
    """Compare. The run is over."""
    run, names = swarm.run, swarm.spec.names
    records = swarm.records(names.trajectories)
    by_place = {(record.partition, record.offset): record for record in records}
    ids = {place: name for place, record in by_place.items() if (name := _name_of(record)) is not None}
    lines = swarm.journal()
    wrong: list[str] = []

    known = set(ids.values())
    acknowledged = swarm.acknowledged()
    gone = [name for name, *_ in acknowledged if name not in known]
    wrong += [
        f"{name} was acknowledged at {where}, where the log has {ids.get(where)}" for name, where in _elsewhere(swarm, ids)
    ]

    resolved, twice = _resolved(lines)
    trained = [place for place, reasons in resolved.items() if "trained" in reasons]
    trained_ids = Counter(ids[place] for place in trained if place in ids)
    twice_ids = [name for name, times in trained_ids.items() if times > 1]

    checkpoint = CheckpointStore(run.checkpoint.dir, run.run_id, run.checkpoint.keep).newest()
    if checkpoint is None:
        raise CheckpointError(f"{run.checkpoint.dir}: no checkpoint at the end of the run")
    ledger = checkpoint.reader["ledger"]
    passed_over = [place for place in by_place if place not in resolved and not _is_pending(ledger, place)]
    waiting = [place for place in ids if place not in resolved]
    if len(waiting) > _MOST_WAITING:
        wrong.append(f"{len(waiting)} records wait at the end, by partition {dict(Counter(part for part, _ in waiting))}")
    both = [place for place in resolved if _is_pending(ledger, place)]
    wrong += [f"{place} is resolved in the journal and pending in the checkpoint" for place in both]
    counted = Counter(reason for reasons in resolved.values() for reason in reasons)
    if dict(counted) != ledger["resolved"]:
        wrong.append(f"the journal resolves {dict(counted)}, the checkpoint {ledger['resolved']}")

    wrong += _batches(lines, by_place, resolved)
    wrong += _versions(swarm)
    counts = None
    try:
        counts = report.count(run.run_id, records, swarm.records(names.dead_letter), report.fates(lines))
    except CheckpointError as error:
        wrong.append(str(error))
    else:
        if counts.produced != counts.trained + sum(counts.dropped.values()) + counts.dead_lettered + counts.pending:
            wrong.append(f"the count does not hold: {counts}")
        if counts.staleness_max > run.staleness_bound:
            wrong.append(f"staleness {counts.staleness_max} was trained, the bound is {run.staleness_bound}")
    return Verdict(
        acknowledged=len(acknowledged),
        steps=checkpoint.step,
        lost=len(gone) + len(passed_over),
        trained_twice=len(twice) + len(twice_ids),
        wrong=tuple(wrong),
        counts=counts,
    )


def _name_of(record: LogRecord) -> str | None:
    """Its trajectory id; None if it is a stranger's that has none."""
    try:
        return codec.decode_headers(record.headers).trajectory_id
    except RecordError:
        return None


def _elsewhere(swarm: Swarm, ids: dict[tuple[int, int], str]) -> list[tuple[str, tuple[int, int]]]:
    """Acknowledged records that do not stand where the broker said."""
    return [(name, (part, offset)) for name, part, offset in swarm.acknowledged() if ids.get((part, offset)) != name]


def _resolved(lines: list[dict]) -> tuple[dict[tuple[int, int], list[str]], list[tuple[int, int]]]:  # type: ignore[type-arg]
    """Every resolved place with its reasons, and the places trained twice."""
    found: dict[tuple[int, int], list[str]] = {}
    for line in lines:
        for reason, partitions in line["resolved"].items():
            for partition, spans in partitions.items():
                for offset in journal.covers(spans):
                    found.setdefault((int(partition), offset), []).append(reason)
    return found, [place for place, reasons in found.items() if reasons.count("trained") > 1]


def _is_pending(ledger: dict, place: tuple[int, int]) -> bool:  # type: ignore[type-arg]
    """Whether a trainer that goes on from this checkpoint takes the record up."""
    partition, offset = str(place[0]), place[1]
    if offset < ledger["frontier"].get(partition, 0):
        return False
    return not any(first <= offset < end for first, end in ledger["above"].get(partition, ()))


def _batches(
    lines: list[dict],  # type: ignore[type-arg]
    by_place: dict[tuple[int, int], LogRecord],
    resolved: dict[tuple[int, int], list[str]],
) -> list[str]:
    """A batch holds whole groups, each at most once in the lineage, and what it holds is what was resolved as trained."""
    wrong: list[str] = []
    groups: Counter[str] = Counter()
    in_batches: set[tuple[int, int]] = set()
    for line in lines:
        for group_id, *places in line.get("batch", ()):
            groups[group_id] += 1
            members = [codec.decode_headers(by_place[part, offset].headers) for part, offset in places]
            in_batches |= {(part, offset) for part, offset in places}
            if sorted(member.group_index for member in members) != list(range(GROUP)):
                wrong.append(f"step {line['step']} trained a part of group {group_id}")
            if {member.group_id for member in members} != {group_id}:
                wrong.append(f"step {line['step']}: the members of {group_id} are of other groups")
    wrong += [f"group {group_id} was trained {times} times" for group_id, times in groups.items() if times > 1]
    trained = {place for place, reasons in resolved.items() if {"trained", "nonfinite"} & set(reasons)}
    if trained != in_batches:
        wrong.append(f"{len(trained ^ in_batches)} records are in a batch and not resolved as trained, or the reverse")
    return wrong


def _versions(swarm: Swarm) -> list[str]:
    """A version is never used for two policies, and never goes back."""
    told = []
    for record in swarm.records(swarm.spec.names.control):
        message = control.decode_control(record.value, record.where)
        if isinstance(message, Announcement):
            told.append((message.version, message.manifest_digest))
    wrong = [f"version {b[0]} was announced after {a[0]}" for a, b in itertools.pairwise(told) if b[0] < a[0]]
    digests = dict(told)
    return wrong + [f"version {version} names two policies" for version, digest in told if digests[version] != digest]
