"""Exact replay: the batch of a past optimiser step, fetched again from the log by the offsets that its journal line names.

    echo-train run.yaml --replay 12

Refuses to train, to write anything, and to hand out a batch that is not the one: records are found by partition and offset,
held to the group that the journal names, put in the same order, and compared by digest.

The log holds records for as long as its retention says; a step whose records are gone can't be replayed, and the error names
the first of them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from consumers import batching
from consumers.batching import MicroBatch
from consumers.digest import batch_digest, micro_batches_digest
from consumers.groups import Group, Member, mask_older
from echo import codec, journal
from echo.config import Judgement
from echo.errors import BrokerError, CheckpointError, RecordError
from echo.log import LogReader, LogRecord
from echo.staleness import staleness
from echo.waiting import Watch

if TYPE_CHECKING:
    from rich.table import Table

_RECORDS_PER_READ = 500
_POLL_S = 0.2


class StepLine(msgspec.Struct, frozen=True):
    """What a journal line says about a step's batch.

    version: newest announced when it was trained. batch: groups in order, each its id and then [partition, offset] per member.
    cluster: whose offsets these are. tokens_per_microbatch, ranks: how the batch was cut. judgement: how rewards counted.
    masked_below: tokens of older versions were masked (`on_stale`); None, none were.
    """

    step: int
    version: int
    batch: list[list[Any]]
    digest: str
    cluster: str
    tokens_per_microbatch: int
    ranks: int = 1
    judgement: Judgement = "grpo"
    masked_below: int | None = None

    @property
    def wanted(self) -> dict[int, list[int]]:
        """Per partition, the offsets of the batch, rising."""
        found: dict[int, list[int]] = {}
        for _, *places in self.batch:
            for partition, offset in places:
                found.setdefault(partition, []).append(offset)
        return {partition: sorted(offsets) for partition, offsets in sorted(found.items())}


class Replay(NamedTuple):
    """A step's batch and micro-batches, rebuilt. `matches`: the digest is the one that the trainer wrote."""

    line: StepLine
    groups: list[Group]
    micro_batches: list[MicroBatch]
    digest: str

    @property
    def matches(self) -> bool:
        return self.digest == self.line.digest

    def report(self) -> dict[str, Any]:
        """Plain data: what `--json` prints. Tokens count prompts and completions; staleness is versions -> trajectories."""
        trajectories = [member.trajectory for group in self.groups for member in group.members]
        ages = Counter(staleness(self.line.version, t.oldest_trained_version) for t in trajectories)
        return {
            "step": self.line.step,
            "version": self.line.version,
            "groups": [
                {
                    "group_id": group.group_id,
                    "members": [
                        {
                            "trajectory_id": member.trajectory.trajectory_id,
                            "partition": member.partition,
                            "offset": member.offset,
                            "tokens": member.trajectory.token_count,
                            "reward": member.trajectory.reward,
                        }
                        for member in group.members
                    ],
                }
                for group in self.groups
            ],
            "trajectories": len(trajectories),
            "tokens": sum(t.token_count for t in trajectories),
            "reward_mean": sum(t.reward for t in trajectories) / len(trajectories),
            "staleness": {str(age): count for age, count in sorted(ages.items())},
            "micro_batches": [list(part.input_ids.shape) for part in self.micro_batches],
            "micro_batches_digest": micro_batches_digest(self.micro_batches),
            "digest": self.digest,
            "recorded_digest": self.line.digest,
            "matches": self.matches,
        }


def table(report: Mapping[str, Any]) -> "Table":
    """A report for people."""
    from rich.table import Table

    found = Table(title=f"step {report['step']}, trained while version {report['version']} was the newest", show_header=False)
    ages = ", ".join(f"{count} at {age}" for age, count in report["staleness"].items())
    shapes = ", ".join(f"{rows} x {tokens}" for rows, tokens in report["micro_batches"])
    for name, value in (
        ("groups", f"{len(report['groups'])}, {report['trajectories']} trajectories"),
        *((f"  {g['group_id']}", _places(g["members"])) for g in report["groups"]),
        ("tokens", str(report["tokens"])),
        ("reward mean", f"{report['reward_mean']:.4f}"),
        ("staleness (versions)", ages),
        ("micro-batches", shapes),
        ("digest", report["digest"]),
        ("as trained", "yes, byte for byte" if report["matches"] else f"NO, the journal has {report['recorded_digest']}"),
    ):
        found.add_row(name, value)
    return found


def _places(members: Sequence[Mapping[str, Any]]) -> str:
    """Where a group's members stand, partition by partition."""
    offsets: dict[int, list[int]] = {}
    for member in members:
        offsets.setdefault(member["partition"], []).append(member["offset"])
    return "; ".join(f"partition {number} at {', '.join(map(str, found))}" for number, found in offsets.items())


def find_step(path: Path, step: int) -> StepLine:
    """A step's line in a journal. Raises CheckpointError where there is none, or where it lacks what a replay needs."""
    if not path.exists():
        raise CheckpointError(f"{path}: there is no journal: is checkpoint.dir the folder of a run that has trained?")
    first = last = None
    for line in journal.read(path):
        if "batch" not in line:
            continue
        if line["step"] == step:
            try:
                return msgspec.convert(line, StepLine)
            except msgspec.ValidationError as error:
                raise CheckpointError(f"{path}: the line of step {step} can't be replayed: {error}") from None
        first = line["step"] if first is None else first
        last = line["step"]
    known = "no steps" if first is None else f"steps {first} to {last}"
    raise CheckpointError(f"{path}: there is no step {step} in it, it holds {known}")


def replay(
    line: StepLine, reader: LogReader, *, topic: str, cluster_id: str, silent_s: float = 30.0, waiting_s: float = 30.0
) -> Replay:
    """Fetch and rebuild a step's batch. `silent_s`: how long the broker may give neither records nor an end.

    Raises CheckpointError where the log no longer holds one of its records, or holds another one in its place, and BrokerError
    where the broker does not answer.
    """
    if cluster_id != line.cluster:
        raise CheckpointError(
            f"step {line.step} was read from cluster {line.cluster}, this is cluster {cluster_id}: point broker.settings at "
            "the former cluster. What an embedded Tansu broker held is gone once it ended"
        )
    records: dict[tuple[int, int], LogRecord] = {}
    for partition, offsets in line.wanted.items():
        found = _fetch(reader, topic, partition, offsets, step=line.step, silent_s=silent_s, waiting_s=waiting_s)
        records |= {(partition, offset): record for offset, record in found.items()}
    groups = [_group(str(name), places, records, line.step) for name, *places in line.batch]
    if line.masked_below is not None:
        groups = [mask_older(group, line.masked_below) for group in groups]
    rows = batching.make_rows(groups, line.version, line.judgement)
    parts = list(batching.micro_batches(rows, line.tokens_per_microbatch, ranks=line.ranks))
    return Replay(line, groups, parts, batch_digest(groups))


def _fetch(
    reader: LogReader, topic: str, partition: int, offsets: Sequence[int], *, step: int, silent_s: float, waiting_s: float
) -> Mapping[int, LogRecord]:
    """The records of one partition at rising `offsets`: read from the lowest on until all are found."""
    missing = set(offsets)
    found: dict[int, LogRecord] = {}
    position = offsets[0]
    watch = Watch(
        f"records of step {step}",
        lambda: f"{len(missing)} of {len(offsets)} are missing in {topic}[{partition}], read up to {position}",
        limit_s=waiting_s,
    )
    reader.assign({(topic, partition): position})
    while missing:
        try:
            records = reader.read(_RECORDS_PER_READ, _POLL_S)
        except BrokerError as error:
            if error.retriable:
                raise
            raise _gone(step, topic, partition, min(missing), f"the broker says: {error}") from None
        for record in records:
            position = record.end
            if record.unreadable and (lost := missing & set(range(record.offset, record.end))):
                raise CheckpointError(
                    f"step {step} can't be replayed: {topic}[{partition}]@{min(lost)} was trained, and can't be read any more: "
                    f"{record.unreadable}. The log is damaged, or limits.record_bytes is smaller now"
                )
            if record.offset in missing:
                missing.remove(record.offset)
                found[record.offset] = record
        if missing and min(missing) < position:
            raise _gone(step, topic, partition, min(missing), f"the log goes on at offset {position - 1} without it")
        if missing and not records and reader.at_end():
            raise _gone(step, topic, partition, min(missing), f"the log ends before it, at offset {position}")
        if records:
            watch.progress()
        watch.check()
        if watch.waited_s > silent_s:
            raise BrokerError(f"{topic}[{partition}] gave no records within {silent_s:g} s: is the broker up?", retriable=True)
    return found


def _group(name: str, places: Sequence[Sequence[int]], records: Mapping[tuple[int, int], LogRecord], step: int) -> Group:
    members = []
    for partition, offset in places:
        record = records[partition, offset]
        try:
            trajectory = codec.decode(record.value)
        except RecordError as error:
            raise CheckpointError(
                f"step {step} can't be replayed: {record.where} was trained, and can't be read any more: {error}. The log is "
                "damaged, or this is not the topic that the run read"
            ) from None
        if trajectory.group_id != name:
            raise CheckpointError(
                f"step {step} can't be replayed: {record.where} is of group {trajectory.group_id!r}, the journal says {name!r};"
                " the topic was made anew, or checkpoint.dir is of another run"
            )
        members.append(Member(partition, offset, trajectory))
    return Group(name, tuple(members))


def _gone(step: int, topic: str, partition: int, offset: int, detail: str) -> CheckpointError:
    return CheckpointError(
        f"step {step} can't be replayed: the log does not hold partition {partition} offset {offset} of topic {topic} any more "
        f"({detail}). Retention deletes the oldest records first: replay a later step, and raise the topic's retention.ms and "
        "retention.bytes (`echo-topics apply`) where steps must stay replayable for longer"
    )
