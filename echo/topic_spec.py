"""topics.yaml as strict models: what Echo's five topics promise, and their names in the cluster.

Refuses what would lose records (a compacted trajectories topic, two control partitions), unknown keys, and settings that
Kafka does not know or would not take: some brokers accept anything in silence, so all of it is checked here.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from echo.config import RunConfig, Strict
from echo.errors import ConfigError
from echo.run_file import explain

AUTO = "auto"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


class TopicNames(NamedTuple):
    """The topics' names in the cluster."""

    trajectories: str
    control: str
    requests: str
    heartbeats: str
    dead_letter: str

    @classmethod
    def with_prefix(cls, prefix: str = "") -> "TopicNames":
        """The names of topics.yaml with `topics.prefix` before each. Raises ConfigError where Kafka would refuse one."""
        names = cls(*(prefix + role for role in cls._fields))
        bad = next((name for name in names if not _NAME.fullmatch(name)), None)
        if bad is not None:
            raise ConfigError(
                f"topics.prefix {prefix[:80]!r} makes the topic name {bad[:80]!r}: Kafka takes letters, digits, '.', '_' "
                "and '-', 249 characters at most"
            )
        return names


def _whole(low: int, high: int = 2**63 - 1) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        text = str(value).strip()
        if isinstance(value, bool) or not re.fullmatch(r"-?[0-9]{1,19}", text) or not low <= int(text) <= high:
            raise ValueError(f"is {text[:40]!r}, not a whole number from {low} to {high}")
        return str(int(text))

    return check


def _ratio(value: Any) -> str:
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0.0 <= number <= 1.0:
        raise ValueError(f"is {str(value)[:40]!r}, not a number from 0 to 1")
    return str(number)


def _choice(*known: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if text not in known:
            raise ValueError(f"is {text[:40]!r}, not one of {', '.join(known)}")
        return text

    return check


def _policy(value: Any) -> str:
    parts = sorted({part.strip() for part in str(value).split(",")})
    if not set(parts) <= {"compact", "delete"}:
        raise ValueError(f"is {str(value)[:40]!r}, not delete, compact or compact,delete")
    return ",".join(parts)


def _replicas(value: Any) -> str:
    return AUTO if value == AUTO else _whole(1, 2**31 - 1)(value)


_INT, _BOOL = 2**31 - 1, _choice("true", "false")

# Topic settings of Apache Kafka 3.3 to 4.3 and what each takes: a function to its canonical text, or ValueError.
SETTINGS: Mapping[str, Callable[[Any], str]] = {
    "cleanup.policy": _policy,
    "compression.gzip.level": _whole(-1, 9),
    "compression.lz4.level": _whole(1, 17),
    "compression.type": _choice("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
    "compression.zstd.level": _whole(-131072, 22),
    "delete.retention.ms": _whole(0),
    "file.delete.delay.ms": _whole(0),
    "flush.messages": _whole(1),
    "flush.ms": _whole(0),
    "follower.replication.throttled.replicas": str,
    "index.interval.bytes": _whole(0, _INT),
    "leader.replication.throttled.replicas": str,
    "local.retention.bytes": _whole(-2),
    "local.retention.ms": _whole(-2),
    "max.compaction.lag.ms": _whole(1),
    "max.message.bytes": _whole(0, _INT),
    "message.downconversion.enable": _BOOL,
    "message.timestamp.after.max.ms": _whole(0),
    "message.timestamp.before.max.ms": _whole(0),
    "message.timestamp.difference.max.ms": _whole(0),
    "message.timestamp.type": _choice("CreateTime", "LogAppendTime"),
    "min.cleanable.dirty.ratio": _ratio,
    "min.compaction.lag.ms": _whole(0),
    "min.insync.replicas": _replicas,
    "preallocate": _BOOL,
    "remote.log.copy.disable": _BOOL,
    "remote.log.delete.on.disable": _BOOL,
    "remote.storage.enable": _BOOL,
    "retention.bytes": _whole(-1),
    "retention.ms": _whole(-1),
    "segment.bytes": _whole(14, _INT),
    "segment.index.bytes": _whole(4, _INT),
    "segment.jitter.ms": _whole(0),
    "segment.ms": _whole(1),
    "unclean.leader.election.enable": _BOOL,
}
# Settings of other Kafka-protocol brokers go through as they are.
_VENDOR_PREFIXES = ("confluent.", "redpanda.")


def canonical(key: str, value: Any) -> str:
    """A setting's value in the one form that values are compared in. Raises ValueError where Kafka would not take it."""
    if key.startswith(_VENDOR_PREFIXES):
        return _BOOL(value) if isinstance(value, bool) else str(value)
    check = SETTINGS.get(key)
    if check is None:
        near = difflib.get_close_matches(key, SETTINGS, n=1, cutoff=0.4)
        raise ValueError(f"unknown topic setting {key[:80]}" + (f": did you mean {near[0]}?" if near else ""))
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{key} {error}") from None


def _canonical_config(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {str(key): canonical(str(key), item) for key, item in value.items()}


class TopicSpec(BaseModel):
    """What one topic promises."""

    model_config = Strict

    description: str = ""
    """For people."""
    partitions: int = Field(ge=1, le=10_000)
    replication_factor: Literal["auto"] | Annotated[int, Field(ge=1, le=32_767)] = "auto"
    """Replicas of each partition; auto is at least min(3, brokers)."""
    config: Annotated[dict[str, str], BeforeValidator(_canonical_config)] = {}
    """Kafka topic settings. `min.insync.replicas: auto` is max(1, replication factor - 1)."""

    @model_validator(mode="after")
    def _fits_together(self) -> "TopicSpec":
        needed = self.config.get("min.insync.replicas", AUTO)
        if isinstance(self.replication_factor, int) and needed != AUTO and int(needed) > self.replication_factor:
            raise ValueError(
                f"min.insync.replicas {needed} is above replication_factor {self.replication_factor}: nothing could be written"
            )
        return self

    def replication(self, brokers: int) -> int:
        """Replicas of each partition in a cluster of so many brokers."""
        return self.replication_factor if isinstance(self.replication_factor, int) else min(3, max(1, brokers))

    def settings(self, replication: int) -> dict[str, str]:
        """The topic settings, each with its value for partitions that have so many replicas."""
        wanted = dict(self.config)
        if wanted.get("min.insync.replicas") == AUTO:
            wanted["min.insync.replicas"] = str(max(1, replication - 1))
        return wanted


class _Topics(BaseModel):
    model_config = Strict

    trajectories: TopicSpec
    control: TopicSpec
    requests: TopicSpec
    heartbeats: TopicSpec
    dead_letter: TopicSpec

    @model_validator(mode="after")
    def _fits_together(self) -> "_Topics":
        if self.control.partitions != 1:
            raise ValueError(
                f"control.partitions is {self.control.partitions}: it must be 1, so that all readers see one order"
            )
        for role in TopicNames._fields:
            topic: TopicSpec = getattr(self, role)
            wrong = policy_problem(role, topic.config.get("cleanup.policy"))
            if wrong:
                raise ValueError(f"{role}.config: {wrong}")
        largest, kept = (t.config.get("max.message.bytes") for t in (self.trajectories, self.dead_letter))
        if largest is not None and kept is not None and int(kept) < int(largest):
            raise ValueError(
                f"dead_letter.config: max.message.bytes {kept} is below that of trajectories ({largest}): the largest "
                "records could not be kept"
            )
        return self


class TopicsFile(BaseModel):
    """topics.yaml."""

    model_config = Strict

    topics: _Topics


def policy_problem(role: str, policy: str | None) -> str | None:
    """Why a topic of this role must not have this cleanup.policy (canonical form); None where it may, or none is known."""
    if policy is None or role == "heartbeats":
        return None
    if role == "control":
        return None if policy == "compact" else f"cleanup.policy is {policy}: late joiners need it to be compact"
    # Members of a group share a key, and compaction keeps one record per key.
    return None if policy == "delete" else f"cleanup.policy is {policy}, which loses records: it must be delete"


@dataclass(frozen=True)
class Spec:
    """What the topics of one prefix promise. `source` is the file, for messages."""

    source: str
    names: TopicNames
    file: TopicsFile

    def topics(self) -> Iterator[tuple[str, str, TopicSpec]]:
        """(role, name in the cluster, what it promises) of every topic."""
        for role, name in zip(TopicNames._fields, self.names, strict=True):
            yield role, name, getattr(self.file.topics, role)


def default_file() -> Path:
    """The topics.yaml that ships with Echo: inside the installed package, or at the root of a source tree."""
    package = Path(__file__).resolve().parent
    packaged = package / "topics.yaml"
    return packaged if packaged.exists() else package.parent / "topics.yaml"


def load(file: Path | None = None, prefix: str = "") -> Spec:
    """Read a topics file; None takes the one that ships with Echo.

    Raises ConfigError naming the file, the key and, for an unknown one, the nearest known key.
    """
    path = file or default_file()
    names = TopicNames.with_prefix(prefix)
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a topics file is a mapping with the key 'topics'")
    try:
        parsed = TopicsFile.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(explain(item, TopicsFile) for item in error.errors())) from None
    return Spec(str(path), names, parsed)


def of_run(run: RunConfig) -> Spec:
    """The topics of a run file. Raises ConfigError as `load`."""
    return load(run.topics.file, run.topics.prefix)
