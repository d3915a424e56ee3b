"""Topics as promised by topics.yaml against topics as they are: a plan, a list of checks, the preflight of a start. Pure.

Its promises: a topic is never deleted, never shrunk, its replicas are never moved; nothing is changed that a plan did not
show before; settings that topics.yaml does not name are shown and left alone. What can't be done is shown as "not done,
because". Where a broker does not report a setting, it is said to be unknown, never assumed to be right or wrong.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from echo.config import LimitsConfig
from echo.dead_letter import OVERHEAD_BYTES
from echo.topic_spec import AUTO, Spec, TopicSpec, canonical, policy_problem

# A trainer that is away for longer than a topic's retention loses records that nobody read.
SHORT_RETENTION_MS = 3_600_000


class Reported(NamedTuple):
    """A setting as the broker reports it. own: set on the topic itself, rather than the broker's default."""

    value: str | None
    own: bool


@dataclass(frozen=True)
class ActualTopic:
    """A topic as it is. replication: distinct brokers of the partition that has fewest. silence: why settings are missing."""

    partitions: int
    replication: int
    settings: Mapping[str, Reported]
    silence: str = "the broker does not report them"


@dataclass(frozen=True)
class Actual:
    """The cluster as it is: how many brokers it has, and those of the asked topics that exist, by name."""

    cluster_id: str
    brokers: int
    topics: Mapping[str, ActualTopic]


@dataclass(frozen=True)
class Create:
    topic: str
    partitions: int
    replication_factor: int
    config: dict[str, str]


@dataclass(frozen=True)
class PartitionIncrease:
    topic: str
    before: int
    after: int


@dataclass(frozen=True)
class SettingChange:
    topic: str
    key: str
    before: str
    after: str


@dataclass(frozen=True)
class NotDone:
    """A difference that is left as it is. subject: "partitions", "replication_factor" or the topic setting."""

    topic: str
    subject: str
    actual: str
    wanted: str
    because: str


@dataclass(frozen=True)
class Left:
    """A setting of a topic that topics.yaml does not name."""

    topic: str
    key: str
    value: str


@dataclass(frozen=True)
class Unknown:
    """Settings of topics.yaml that can't be compared."""

    topic: str
    keys: tuple[str, ...]
    because: str


@dataclass(frozen=True)
class Plan:
    """What `apply` would do (the first three), what it would not, and what it leaves alone."""

    creates: tuple[Create, ...] = ()
    partition_increases: tuple[PartitionIncrease, ...] = ()
    setting_changes: tuple[SettingChange, ...] = ()
    not_done: tuple[NotDone, ...] = ()
    left: tuple[Left, ...] = ()
    unknown: tuple[Unknown, ...] = ()

    @property
    def changes(self) -> int:
        """How many things `apply` would do."""
        return len(self.creates) + len(self.partition_increases) + len(self.setting_changes)

    @property
    def changed(self) -> set[str]:
        """The topics that `apply` would touch."""
        return {
            *(item.topic for item in self.creates),
            *(item.topic for item in self.partition_increases),
            *(item.topic for item in self.setting_changes),
        }


class Finding(NamedTuple):
    """One check of one topic. check: "exists", "partitions", "replication_factor", or a topic setting's name."""

    topic: str
    check: str
    level: Literal["ok", "warning", "error"]
    message: str


def plan(spec: Spec, actual: Actual) -> Plan:
    """What separates the cluster from `spec`, and what can be done about it without deleting, shrinking or moving."""
    creates: list[Create] = []
    increases: list[PartitionIncrease] = []
    changes: list[SettingChange] = []
    not_done: list[NotDone] = []
    left: list[Left] = []
    unknown: list[Unknown] = []
    for _, name, topic in spec.topics():
        found = actual.topics.get(name)
        if found is None:
            create = Create(
                name, topic.partitions, topic.replication(actual.brokers), topic.settings(topic.replication(actual.brokers))
            )
            because = _uncreatable(create, actual.brokers)
            if because:
                not_done.append(NotDone(name, "topic", "missing", f"{create.partitions} partitions", because))
            else:
                creates.append(create)
            continue
        if found.partitions < topic.partitions:
            increases.append(PartitionIncrease(name, found.partitions, topic.partitions))
        elif found.partitions > topic.partitions:
            because = "Kafka can't take partitions away; raise it in topics.yaml, or use another prefix"
            not_done.append(NotDone(name, "partitions", str(found.partitions), str(topic.partitions), because))
        moved = _replication_difference(name, topic, found, actual.brokers)
        if moved is not None:
            not_done.append(moved)
        silent: list[str] = []
        for key, value in topic.settings(found.replication).items():
            reported = found.settings.get(key)
            if reported is None or reported.value is None:
                silent.append(key)
            elif key == "min.insync.replicas" and int(value) > found.replication:
                because = f"with replication factor {found.replication} nothing could be written"
                not_done.append(NotDone(name, key, reported.value, value, because))
            elif not _same(key, reported.value, value):
                changes.append(SettingChange(name, key, reported.value, value))
        if silent:
            unknown.append(Unknown(name, tuple(silent), found.silence))
        left.extend(
            Left(name, key, "(not shown)" if reported.value is None else reported.value)
            for key, reported in sorted(found.settings.items())
            if reported.own and key not in topic.config
        )
    return Plan(tuple(creates), tuple(increases), tuple(changes), tuple(not_done), tuple(left), tuple(unknown))


def _uncreatable(create: Create, brokers: int) -> str:
    if create.replication_factor > brokers:
        return f"replication_factor {create.replication_factor} needs as many brokers, the cluster has {brokers}"
    needed = create.config.get("min.insync.replicas", "1")
    if int(needed) > create.replication_factor:
        return f"min.insync.replicas {needed} is above replication factor {create.replication_factor}: nothing could be written"
    return ""


def _replication_difference(name: str, topic: TopicSpec, found: ActualTopic, brokers: int) -> NotDone | None:
    wanted = topic.replication(brokers)
    # auto asks for enough replicas: a broker that is down for a moment doesn't make the others too many.
    enough = found.replication >= wanted if topic.replication_factor == AUTO else found.replication == wanted
    if enough:
        return None
    because = "it means moving replicas between brokers: use kafka-reassign-partitions"
    return NotDone(name, "replication_factor", str(found.replication), str(wanted), because)


def _same(key: str, reported: str, wanted: str) -> bool:
    try:
        return canonical(key, reported) == wanted
    except ValueError:
        return False


def check(spec: Spec, actual: Actual) -> list[Finding]:
    """Every promise of `spec`, kept or not, in the order of the file. An error wherever `plan` finds a difference."""
    difference = plan(spec, actual)
    wrong = {(c.topic, "exists"): "no; `echo-topics apply` creates it" for c in difference.creates}
    wrong |= {(i.topic, "partitions"): f"{i.before}, promised {i.after}" for i in difference.partition_increases}
    wrong |= {(c.topic, c.key): f"{c.before}, promised {c.after}" for c in difference.setting_changes}
    for refusal in difference.not_done:
        subject = "exists" if refusal.subject == "topic" else refusal.subject
        wrong[refusal.topic, subject] = f"{refusal.actual}, promised {refusal.wanted}; can't be changed: {refusal.because}"
    unknown = {(item.topic, key): f"not compared: {item.because}" for item in difference.unknown for key in item.keys}
    findings: list[Finding] = []
    for _, name, topic in spec.topics():
        found = actual.topics.get(name)
        kept = {"exists": "yes"}
        if found is not None:
            kept |= {"partitions": str(found.partitions), "replication_factor": str(found.replication)}
            kept |= topic.settings(found.replication)
        for subject, value in kept.items():
            if (name, subject) in wrong:
                findings.append(Finding(name, subject, "error", wrong[name, subject]))
            elif (name, subject) in unknown:
                findings.append(Finding(name, subject, "warning", unknown[name, subject]))
            else:
                findings.append(Finding(name, subject, "ok", value))
    return findings


def preflight(spec: Spec, actual: Actual, limits: LimitsConfig) -> list[Finding]:
    """What would stop or harm a run on these topics: errors and warnings only, less strict than `check`."""
    findings: list[Finding] = []
    for role, name, topic in spec.topics():
        found = actual.topics.get(name)
        if found is None:
            findings.append(Finding(name, "exists", "error", "does not exist"))
            continue
        if role == "control" and found.partitions != 1:
            message = (
                f"has {found.partitions} partitions instead of 1, and readers would see no one order; partitions can't be "
                "taken away: delete this topic yourself when nothing uses it, or take another topics.prefix"
            )
            findings.append(Finding(name, "partitions", "error", message))
        policy = policy_problem(role, _reported(found, "cleanup.policy"))
        if policy:
            findings.append(Finding(name, "cleanup.policy", "error", policy))
        needed = {"trajectories": limits.record_bytes, "dead_letter": limits.record_bytes + OVERHEAD_BYTES}.get(role, 0)
        taken = _reported(found, "max.message.bytes")
        if taken is not None and int(taken) < needed:
            message = f"max.message.bytes is {taken}, and limits.record_bytes {limits.record_bytes} needs {needed}: "
            promised = int(topic.config.get("max.message.bytes", "0"))
            if promised >= needed:
                message += f"{spec.source} has {promised}, and `echo-topics apply` sets it"
            else:
                message += f"raise it in {spec.source} for `echo-topics apply`, or lower the other in the run file"
            findings.append(Finding(name, "max.message.bytes", "error", message))
        packed, wanted = _reported(found, "compression.type"), topic.config.get("compression.type")
        if packed is not None and wanted is not None and packed not in (wanted, "uncompressed"):
            message = (
                f"compression.type is {packed}, promised {wanted}: batches of strangers are kept as they come, and one that "
                "unpacks to gigabytes takes as much memory of each reader; `echo-topics apply` sets it"
            )
            findings.append(Finding(name, "compression.type", "warning", message))
        insync = _reported(found, "min.insync.replicas")
        if insync is not None and int(insync) > found.replication:
            message = (
                f"min.insync.replicas {insync} is above the replication factor {found.replication}: nothing can be written"
            )
            findings.append(Finding(name, "min.insync.replicas", "error", message))
        kept_ms = _reported(found, "retention.ms")
        if role in ("trajectories", "requests") and kept_ms is not None and 0 <= int(kept_ms) < SHORT_RETENTION_MS:
            message = f"retention.ms is {kept_ms}: what nobody has read after {int(kept_ms) / 1000:g} s is lost"
            findings.append(Finding(name, "retention.ms", "warning", message))
    return findings


def mended(difference: Plan, findings: Iterable[Finding]) -> int:
    """How many of the errors are about something that `apply` would do."""
    done = {(item.topic, "exists") for item in difference.creates}
    done |= {(item.topic, "partitions") for item in difference.partition_increases}
    done |= {(item.topic, item.key) for item in difference.setting_changes}
    return sum(item.level == "error" and (item.topic, item.check) in done for item in findings)


def _reported(found: ActualTopic, key: str) -> str | None:
    """A setting in canonical form; None where the broker does not report one that we can read."""
    reported = found.settings.get(key)
    if reported is None or reported.value is None:
        return None
    try:
        return canonical(key, reported.value)
    except ValueError:
        return None


def undone(difference: Plan, actual: Actual) -> list[str]:
    """What a plan wanted to change and `actual` does not show. A setting that isn't reported can't be waited for."""
    waiting = []
    counts = [(c.topic, c.partitions) for c in difference.creates] + [
        (i.topic, i.after) for i in difference.partition_increases
    ]
    for name, wanted in counts:
        partitions = actual.topics[name].partitions if name in actual.topics else 0
        if partitions != wanted:
            waiting.append(f"{name} with {wanted} partitions (has {partitions})")
    for change in difference.setting_changes:
        found = actual.topics.get(change.topic)
        reported = None if found is None else found.settings.get(change.key)
        if reported is not None and reported.value is not None and not _same(change.key, reported.value, change.after):
            waiting.append(f"{change.topic} {change.key} = {change.after} (is {reported.value})")
    return waiting


def format_plan(difference: Plan) -> str:
    """A plan for people, one line per item and its count at the end."""
    lines: list[str] = []
    for create in difference.creates:
        lines.append(f"+ {create.topic}: create, partitions {create.partitions}, replication {create.replication_factor}")
        lines.extend(f"    {key} = {value}" for key, value in create.config.items())
    for increase in difference.partition_increases:
        lines.append(
            f"~ {increase.topic}: partitions {increase.before} -> {increase.after} (keys move to other partitions; runs "
            "that use it notice within seconds, and read the new ones)"
        )
    lines.extend(f"~ {c.topic}: {c.key} {c.before} -> {c.after}" for c in difference.setting_changes)
    lines.extend(
        f"! {item.topic}: {item.subject} {item.actual} -> {item.wanted} not done, because {item.because}"
        for item in difference.not_done
    )
    lines.extend(
        f"= {item.topic}: {item.key} = {item.value} is not in the topics file, left as it is" for item in difference.left
    )
    lines.extend(f"? {item.topic}: {', '.join(item.keys)} not compared: {item.because}" for item in difference.unknown)
    summary = f"{difference.changes} to change" if difference.changes else "Nothing to change"
    lines.append(summary + (f", {len(difference.not_done)} not done." if difference.not_done else "."))
    return "\n".join(lines)


def plan_json(difference: Plan) -> dict[str, Any]:
    """A plan as JSON: the fields of `Plan`, each a list of objects, and `changes`, the number of things to do."""
    return {"changes": difference.changes, **asdict(difference)}
