"""The topics of a cluster: read as they are, checked at every start, changed as a plan says.

Never names a topic in a metadata request and never asks for a dry run: some brokers create the topic on either. Deletes
nothing and shrinks nothing (`topic_plan` holds the promises, `topic_spec` what topics.yaml may say). Three calls make
a cluster fit: `actual = read_actual(admin, spec.names)`, `difference = plan(spec, actual)`, `apply(difference, admin)`.
"""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ConfigSource, NewPartitions, NewTopic

from echo.config import LimitsConfig
from echo.errors import BrokerError, TopicError
from echo.kafka import KafkaLogAdmin
from echo.topic_plan import (
    Actual,
    ActualTopic,
    Finding,
    Plan,
    Reported,
    check,
    format_plan,
    mended,
    plan,
    plan_json,
    preflight,
    undone,
)
from echo.topic_spec import Spec, TopicNames, load, of_run

__all__ = [
    "Actual",
    "ActualTopic",
    "Finding",
    "Plan",
    "Reported",
    "Spec",
    "TopicNames",
    "apply",
    "check",
    "format_plan",
    "load",
    "mended",
    "of_run",
    "plan",
    "plan_json",
    "preflight",
    "read_actual",
    "require",
]

log = structlog.get_logger("topics")

# Settings that every broker has. One that leaves some of them out reports no defaults, only what was set on the topic.
_ALWAYS_SET = {"cleanup.policy", "compression.type", "flush.ms", "max.message.bytes", "retention.ms", "segment.bytes"}


def read_actual(admin: KafkaLogAdmin, names: Iterable[str], timeout_s: float = 30.0) -> Actual:
    """The cluster as it is, of the topics named. Raises BrokerError when it does not answer in time (per question)."""
    metadata = admin.metadata(timeout_s)
    existing = {name: metadata.topics[name] for name in names if name in metadata.topics}
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in existing]
    answers = admin.client.describe_configs(resources, request_timeout=timeout_s) if resources else {}
    topics: dict[str, ActualTopic] = {}
    for resource, answer in answers.items():
        partitions = existing[resource.name].partitions.values()
        settings, silence = _settings(answer, resource.name, timeout_s)
        replication = min((len(set(partition.replicas)) for partition in partitions), default=0)
        topics[resource.name] = ActualTopic(len(partitions), replication, settings, silence)
    return Actual(str(metadata.cluster_id), len(metadata.brokers), topics)


def _settings(answer: "Future[dict[str, Any]]", topic: str, timeout_s: float) -> tuple[dict[str, Reported], str]:
    silence = "the broker does not report them"
    try:
        entries = answer.result(timeout_s)
    except TimeoutError:
        raise BrokerError(f"no answer about the settings of {topic} within {timeout_s:g} s", retriable=True) from None
    except KafkaException as failure:
        error: KafkaError = failure.args[0]
        if error.code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
            raise BrokerError(f"asking for the settings of {topic}: {error.name()}: {error.str()}", retriable=True) from None
        # An old broker, or no permission to describe: the settings are unknown, and all else can still be told.
        return {}, f"{silence} ({error.name()}: {error.str()})"
    lists_defaults = entries.keys() >= _ALWAYS_SET
    own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    return {key: Reported(e.value, e.source == own or not lists_defaults) for key, e in entries.items()}, silence


def require(spec: Spec, actual: Actual, limits: LimitsConfig) -> None:
    """Stop a start whose topics don't fit, with every problem at once. Raises TopicError; what only harms is logged."""
    findings = preflight(spec, actual, limits)
    for finding in findings:
        if finding.level == "warning":
            log.warning("topic may harm the run", topic=finding.topic, problem=finding.message)
    problems = [f"{finding.topic}: {finding.message}" for finding in findings if finding.level == "error"]
    if problems:
        remedy = (
            f", `echo-topics apply` mends {n} of these {len(problems)}" if (n := mended(plan(spec, actual), findings)) else ""
        )
        raise TopicError(
            f"the topics do not fit {spec.source} and the run file: {'; '.join(problems)}. "
            f"`echo-topics plan` shows all differences{remedy}"
        )


def apply(difference: Plan, admin: KafkaLogAdmin, timeout_s: float = 30.0) -> None:
    """Do what a plan shows, and return when the broker reports it done.

    Every item is tried. Raises BrokerError naming all that failed; what succeeded stays, and a new plan shows the rest.
    """
    client, failures = admin.client, []
    if difference.creates:
        topics = [
            NewTopic(c.topic, num_partitions=c.partitions, replication_factor=c.replication_factor, config=c.config)
            for c in difference.creates
        ]
        answers = client.create_topics(topics, operation_timeout=timeout_s, request_timeout=timeout_s)
        failures += _failures("creating", answers, timeout_s)
    if difference.partition_increases:
        increases = [NewPartitions(i.topic, i.after) for i in difference.partition_increases]
        answers = client.create_partitions(increases, operation_timeout=timeout_s, request_timeout=timeout_s)
        failures += _failures("adding partitions to", answers, timeout_s)
    if difference.setting_changes:
        entries: dict[str, list[ConfigEntry]] = {}
        for change in difference.setting_changes:
            entry = ConfigEntry(change.key, change.after, incremental_operation=AlterConfigOpType.SET)
            entries.setdefault(change.topic, []).append(entry)
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=e) for name, e in entries.items()]
        altered = client.incremental_alter_configs(resources, request_timeout=timeout_s)
        failures += _failures("changing settings of", {r.name: answer for r, answer in altered.items()}, timeout_s)
    if failures:
        raise BrokerError("; ".join(failures))
    _wait_until_done(difference, admin, timeout_s)


def _failures(doing: str, answers: Mapping[str, "Future[None]"], timeout_s: float) -> list[str]:
    found = []
    for topic, answer in answers.items():
        try:
            answer.result(timeout_s)
        except TimeoutError:
            found.append(f"{doing} {topic}: no answer within {timeout_s:g} s")
        except KafkaException as failure:
            error: KafkaError = failure.args[0]
            found.append(f"{doing} {topic}: {error.name()}: {error.str()}{_remedy(error)}")
    return found


def _remedy(error: KafkaError) -> str:
    if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
        return " (it came into being after the plan was made: plan again)"
    if error.code() == KafkaError._UNSUPPORTED_FEATURE:
        return " (this broker can't: use Apache Kafka, or another prefix)"
    return ""


def _wait_until_done(difference: Plan, admin: KafkaLogAdmin, timeout_s: float) -> None:
    """Other brokers learn of a change a moment later than the one that made it."""
    deadline = time.monotonic() + timeout_s
    while True:
        waiting = undone(difference, read_actual(admin, difference.changed, timeout_s))
        if not waiting:
            return
        if time.monotonic() >= deadline:
            raise BrokerError(f"applied, but {timeout_s:g} s later the broker still does not report: {'; '.join(waiting)}")
        time.sleep(0.1)
