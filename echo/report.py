"""What a run did, counted from the log itself: every record of the run is found again and its fate looked up in the journal.

Refuses to take a process's word for a number that the log holds. Pure but for `read_topic`; plots with matplotlib.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echo import codec, control, dead_letter
from echo.control import Announcement, Heartbeat
from echo.errors import BrokerError, CheckpointError, ControlError, RecordError
from echo.journal import covers
from echo.log import BEGINNING, LogReader, LogRecord
from echo.waiting import Watch

# Steps whose mean reward stands for the beginning and for the end of a run.
_EDGE_STEPS = 5
_LOST, _FOREIGN = "lost", "foreign_run"
_DEAD = ("schema", "corrupt", "unreadable")


class Fate(NamedTuple):
    """How a step's journal line resolved a record."""

    reason: str
    step: int
    newest_version: int | None
    masked_below: int | None = None
    """Tokens of older versions were masked."""


class Counts(NamedTuple):
    """Records of one run in the trajectories topic, by what became of them. produced = all the others together.

    Offsets that the trainer counted as lost are among `dropped`: of which run they were is not known any more.
    """

    produced: int
    trained: int
    dropped: dict[str, int]
    dead_lettered: int
    pending: int
    staleness_max: int


def read_topic(
    reader: LogReader, topic: str, partitions: int, *, deadline_s: float, waiting_s: float = 30.0
) -> Iterator[LogRecord]:
    """Every record of a topic, up to the end that the reader finds. Raises BrokerError where that takes too long."""
    reader.assign({(topic, number): BEGINNING for number in range(partitions)})
    seen = 0
    began = time.monotonic()
    watch = Watch(f"the end of topic {topic}", lambda: f"{seen} records so far", limit_s=waiting_s)
    while not reader.at_end():
        records = reader.read(100, 0.2)
        if records:
            seen += len(records)
            watch.progress()
        yield from records
        watch.check()
        if time.monotonic() - began > deadline_s:
            raise BrokerError(
                f"topic {topic} was not read to its end within {deadline_s:g} s ({seen} records): is the broker up?"
            )


def fates(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], Fate]:
    """(partition, offset) -> fate, from a journal's lines. Raises CheckpointError where a record is resolved twice.

    What was resolved before the topic was made anew is left out: those offsets are of records that no log holds.
    """
    found: dict[tuple[int, int], Fate] = {}
    for line in lines:
        if "topic_anew" in line:
            found.clear()
        for reason, partitions in line["resolved"].items():
            for partition, spans in partitions.items():
                for offset in covers(spans):
                    where = (int(partition), offset)
                    if where in found:
                        raise CheckpointError(
                            f"the journal resolves partition {partition} offset {offset} twice: as {found[where].reason} at "
                            f"step {found[where].step}, as {reason} at step {line['step']}"
                        )
                    found[where] = Fate(reason, line["step"], line.get("version"), line.get("masked_below"))
    return found


def count(
    run_id: str, trajectories: Iterable[LogRecord], dead_letters: Iterable[LogRecord], resolved: Mapping[tuple[int, int], Fate]
) -> Counts:
    """Hold the journal against the log.

    Records of other runs are left out. A partition that lost records was cut: of what stood below, the journal alone knows.
    Raises CheckpointError where the journal resolved any other record that the log does not hold, or dead-lettered one that the
    dead-letter topic lacks.
    """
    dead_origins = {origin for letter in map(_unwrap, dead_letters) if letter is not None for origin in letter.origins()}
    produced = trained = dead = pending = staleness_max = 0
    dropped: Counter[str] = Counter()
    missing = set(resolved)
    for record in _each_offset(trajectories):
        where = (record.partition, record.offset)
        missing.discard(where)
        fate = resolved.get(where)
        if _run_of(record) != run_id and (fate is None or fate.reason not in _DEAD):
            continue
        produced += 1
        if fate is None:
            pending += 1
        elif fate.reason == "trained":
            trained += 1
            if fate.newest_version is not None:
                staleness_max = max(staleness_max, fate.newest_version - _oldest_trained(record, fate.masked_below))
        elif fate.reason in _DEAD:
            dead += 1
            if record.where not in dead_origins:
                raise CheckpointError(
                    f"{record.where} was resolved as {fate.reason}, but the dead-letter topic does not hold it"
                )
        else:
            dropped[fate.reason] += 1
    cut_at: dict[int, int] = {}
    for (partition, offset), fate in resolved.items():
        if fate.reason == _LOST:
            cut_at[partition] = max(offset + 1, cut_at.get(partition, 0))
    for where in [where for where in missing if where[1] < cut_at.get(where[0], 0)]:
        missing.discard(where)
        reason = resolved[where].reason
        produced += reason != _FOREIGN
        trained += reason == "trained"
        dead += reason in _DEAD
        if reason not in ("trained", _FOREIGN, *_DEAD):
            dropped[reason] += 1
    if missing:
        partition, offset = min(missing)
        raise CheckpointError(
            f"the journal resolved {len(missing)} records that the log does not hold, the first at partition {partition} "
            f"offset {offset}"
        )
    return Counts(produced, trained, dict(dropped), dead, pending, staleness_max)


def _each_offset(records: Iterable[LogRecord]) -> Iterator[LogRecord]:
    """The records; of offsets that can't be read, one for each."""
    for record in records:
        if record.unreadable:
            yield from (record._replace(offset=offset, span=1) for offset in range(record.offset, record.end))
        else:
            yield record


class DropBias:
    """Trained against dropped trajectories: number, mean completion length and mean reward per task, decoded from the log.

    What is dropped is not a fair sample: staleness drops long answers first. `resolved` as in `count`.
    """

    def __init__(self, run_id: str, resolved: Mapping[tuple[int, int], Fate]) -> None:
        self._run_id = run_id
        self._resolved = resolved
        self._sums: dict[tuple[str, str], _Sum] = {}
        self._unreadable = 0

    def watch(self, trajectories: Iterable[LogRecord]) -> Iterator[LogRecord]:
        """The same records, each taken into account as it passes."""
        for record in trajectories:
            fate = self._resolved.get((record.partition, record.offset))
            if fate is not None and fate.reason not in _DEAD and _run_of(record) == self._run_id:
                self._add("trained" if fate.reason == "trained" else "dropped", record)
            yield record

    def _add(self, outcome: str, record: LogRecord) -> None:
        try:
            trajectory = codec.decode(record.value)
        except RecordError:
            # Dropped from its headers, without anybody looking at the value.
            self._unreadable += 1
            return
        key = (outcome, trajectory.task)
        number, tokens, reward = self._sums.get(key, _Sum(0, 0, 0.0))
        self._sums[key] = _Sum(number + 1, tokens + len(trajectory.completion_ids), reward + trajectory.reward)

    def result(self) -> dict[str, Any]:
        """What `bias.json` holds: "drop_bias" maps outcome -> task -> {number, completion_tokens_mean, reward_mean}.

        unreadable: dropped records whose values can't be decoded; they are in no mean.
        """
        found: dict[str, dict[str, Any]] = {"trained": {}, "dropped": {}}
        for (outcome, task), (number, tokens, reward) in sorted(self._sums.items()):
            found[outcome][task] = {
                "number": number,
                "completion_tokens_mean": round(tokens / number, 2),
                "reward_mean": round(reward / number, 4),
            }
        return {"drop_bias": found, "unreadable": self._unreadable}


class _Sum(NamedTuple):
    number: int
    tokens: int
    reward: float


def count_announcements(run_id: str, records: Iterable[LogRecord]) -> int:
    """Policy versions announced for the run."""
    versions = set()
    for record in records:
        try:
            message = control.decode_control(record.value, record.where)
        except ControlError:
            continue
        if isinstance(message, Announcement) and message.run_id == run_id:
            versions.add(message.version)
    return len(versions)


def last_heartbeats(run_id: str, records: Iterable[LogRecord]) -> dict[str, Heartbeat]:
    """The last heartbeat of every producer incarnation of the run."""
    found: dict[str, Heartbeat] = {}
    for record in records:
        try:
            heartbeat = control.decode_heartbeat(record.value, record.where)
        except ControlError:
            continue
        if heartbeat.run_id == run_id:
            found[heartbeat.incarnation] = heartbeat
    return found


def summary(
    *,
    lines: Sequence[Mapping[str, Any]],
    counts: Counts,
    staleness_bound: int,
    policy_versions: int,
    pulls: int,
    seconds: float,
) -> dict[str, Any]:
    """What `summary.json` holds. Rewards are means over the first and the last five steps."""
    rewards = [line["reward_mean"] for line in lines if "reward_mean" in line]

    def mean(values: Sequence[float]) -> float | None:
        return round(sum(values) / len(values), 4) if values else None

    return {
        "reward_first": mean(rewards[:_EDGE_STEPS]),
        "reward_last": mean(rewards[-_EDGE_STEPS:]),
        "steps": len(rewards),
        "trajectories_produced": counts.produced,
        "trained": counts.trained,
        "dropped": counts.dropped,
        "dead_lettered": counts.dead_lettered,
        "pending": counts.pending,
        "staleness_max": counts.staleness_max,
        "staleness_bound": staleness_bound,
        "policy_versions": policy_versions,
        "pulls": pulls,
        "seconds": round(seconds, 1),
    }


def plot(lines: Sequence[Mapping[str, Any]], *, staleness_bound: int, title: str, path: Path) -> None:
    """Reward and staleness over steps, as a PNG."""
    from matplotlib.figure import Figure

    steps = [line for line in lines if "reward_mean" in line]
    x = [line["step"] for line in steps]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    above.plot(x, [line["reward_mean"] for line in steps], color="#1f60c4", linewidth=1.8)
    above.set(ylabel="mean reward", ylim=(-0.02, 1.02), title=title)
    above.grid(alpha=0.3)
    means, worst = [], []
    for line in steps:
        ages = {int(age): number for age, number in line["staleness"].items()}
        means.append(sum(age * number for age, number in ages.items()) / sum(ages.values()))
        worst.append(max(ages))
    below.plot(x, worst, color="#8ab8ff", linewidth=1.2, drawstyle="steps-mid", label="largest")
    below.plot(x, means, color="#1f60c4", linewidth=1.8, label="mean")
    below.axhline(staleness_bound, color="#c4162a", linewidth=1.0, linestyle="--", label=f"bound S = {staleness_bound}")
    below.set(xlabel="optimiser step", ylabel="staleness (versions)", ylim=(-0.2, staleness_bound + 0.6))
    below.legend(loc="upper left", ncols=3, frameon=False)
    below.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _oldest_trained(record: LogRecord, masked_below: int | None) -> int:
    """The oldest version of a trained record's tokens that were left to be trained; its newest where none was."""
    oldest = codec.decode_headers(record.headers).min_policy_version
    if masked_below is None or oldest >= masked_below:
        return oldest
    return codec.decode(record.value).masked_below(masked_below).oldest_trained_version


def _run_of(record: LogRecord) -> str | None:
    try:
        return codec.decode_headers(record.headers).run_id
    except RecordError:
        return None


def _unwrap(record: LogRecord) -> dead_letter.DeadLetter | None:
    try:
        return dead_letter.unwrap(record)
    except RecordError:
        return None
