"""topics.yaml, plan, check and preflight: pure, no broker."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml
from hypothesis import given
from hypothesis import strategies as st

from echo.config import LimitsConfig
from echo.errors import ConfigError, TopicError
from echo.topic_plan import NotDone, PartitionIncrease, SettingChange, Unknown, undone
from echo.topic_spec import SETTINGS, TopicsFile, canonical, default_file
from echo.topics import (
    Actual,
    ActualTopic,
    Plan,
    Reported,
    Spec,
    TopicNames,
    check,
    format_plan,
    load,
    mended,
    plan,
    preflight,
    require,
)


def write(folder: Path, **changes: Any) -> Path:
    """The shipped topics.yaml with some values changed: `write(tmp_path, trajectories={"partitions": 2})`."""
    data = yaml.safe_load(default_file().read_text())
    for role, change in changes.items():
        data["topics"][role] |= change
    path = folder / "topics.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def as_promised(spec: Spec, brokers: int = 1) -> Actual:
    """A cluster that was just made from a spec."""
    topics = {}
    for _, name, topic in spec.topics():
        replication = topic.replication(brokers)
        settings = {key: Reported(value, True) for key, value in topic.settings(replication).items()}
        topics[name] = ActualTopic(topic.partitions, replication, settings)
    return Actual("cluster", brokers, topics)


def with_topic(actual: Actual, name: str, **changes: Any) -> Actual:
    return replace(actual, topics={**actual.topics, name: replace(actual.topics[name], **changes)})


def with_setting(actual: Actual, name: str, key: str, value: str, *, own: bool = True) -> Actual:
    return with_topic(actual, name, settings={**actual.topics[name].settings, key: Reported(value, own)})


# --- topics.yaml ---


def test_the_shipped_file_loads_and_the_prefix_goes_before_every_name() -> None:
    spec = load(prefix="team-a.")
    assert spec.names == TopicNames(
        "team-a.trajectories", "team-a.control", "team-a.requests", "team-a.heartbeats", "team-a.dead_letter"
    )
    assert [name for _, name, _ in spec.topics()] == list(spec.names)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"control": {"partitions": 2}}, "control.partitions is 2: it must be 1"),
        ({"control": {"config": {"cleanup.policy": "delete"}}}, "late joiners need it to be compact"),
        ({"trajectories": {"config": {"cleanup.policy": "compact,delete"}}}, "which loses records"),
        ({"trajectories": {"partition": 2}}, "topics.trajectories.partition: did you mean topics.trajectories.partitions?"),
        ({"requests": {"config": {"retention.mss": 1}}}, "unknown topic setting retention.mss: did you mean retention.ms?"),
        ({"requests": {"config": {"retention.ms": "1 day"}}}, "retention.ms is '1 day', not a whole number"),
        ({"requests": {"config": {"retention.ms": True}}}, "retention.ms is 'True', not a whole number"),
        ({"requests": {"config": {"cleanup.policy": "remove"}}}, "cleanup.policy is 'remove', not delete, compact"),
        ({"requests": {"config": {"compression.type": "brotli"}}}, "compression.type is 'brotli', not one of"),
        ({"requests": {"config": {"min.cleanable.dirty.ratio": 1.5}}}, "not a number from 0 to 1"),
        ({"requests": {"replication_factor": 0}}, "topics.requests.replication_factor"),
        ({"requests": {"replication_factor": 2, "config": {"min.insync.replicas": 3}}}, "nothing could be written"),
        ({"dead_letter": {"config": {"max.message.bytes": 1000}}}, "the largest records could not be kept"),
    ],
)
def test_a_wrong_file_is_one_error_naming_file_and_key(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_misses_a_topic_or_has_another_is_refused(tmp_path: Path) -> None:
    data = yaml.safe_load(default_file().read_text())
    data["topics"]["trajectorys"] = data["topics"].pop("trajectories")
    path = tmp_path / "topics.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match=r"topics\.trajectories is missing.*did you mean topics\.trajectories\?"):
        load(path)


@pytest.mark.parametrize("text", ["topics: [", "- a", "\x00", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "topics.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"topics\.yaml"):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load(tmp_path / "absent.yaml")


@pytest.mark.parametrize("prefix", ["a b.", "a/", "ü", "x" * 240])
def test_a_prefix_that_kafka_would_refuse_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"topics\.prefix"):
        load(prefix=prefix)


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("cleanup.policy", "delete, compact", "compact,delete"),
        ("retention.ms", 1000, "1000"),
        ("preallocate", True, "true"),
        ("min.cleanable.dirty.ratio", "0.50", 0.5),
        ("confluent.tier.enable", False, "false"),
    ],
)
def test_values_are_compared_in_one_form(key: str, one: Any, other: Any) -> None:
    assert canonical(key, one) == canonical(key, other)


# --- plan and check ---


def test_an_empty_cluster_gets_every_topic_with_auto_resolved() -> None:
    spec = load()
    difference = plan(spec, Actual("c", 5, {}))
    assert [item.topic for item in difference.creates] == list(spec.names)
    trajectories = difference.creates[0]
    assert (trajectories.partitions, trajectories.replication_factor) == (8, 3)
    assert trajectories.config["min.insync.replicas"] == "2"
    assert plan(spec, Actual("c", 1, {})).creates[0].config["min.insync.replicas"] == "1"


def test_a_cluster_as_promised_needs_nothing() -> None:
    spec = load()
    assert plan(spec, as_promised(spec)) == Plan()
    assert {finding.level for finding in check(spec, as_promised(spec))} == {"ok"}


def test_a_shrink_is_not_done_and_says_why() -> None:
    spec = load()
    difference = plan(spec, with_topic(as_promised(spec), "trajectories", partitions=16))
    assert difference.changes == 0
    assert "! trajectories: partitions 16 -> 8 not done, because Kafka can't take partitions away" in format_plan(difference)


def test_a_setting_that_is_not_in_the_file_is_shown_and_left() -> None:
    spec = load()
    difference = plan(spec, with_setting(as_promised(spec), "control", "segment.ms", "1000"))
    assert difference.changes == 0
    assert "= control: segment.ms = 1000 is not in the topics file, left as it is" in format_plan(difference)
    assert plan(spec, with_setting(as_promised(spec), "control", "segment.ms", "1000", own=False)) == Plan()


def test_a_differing_setting_is_changed_and_an_unreported_one_is_unknown() -> None:
    spec = load()
    actual = with_setting(as_promised(spec), "requests", "retention.ms", "5000")
    actual = with_topic(actual, "heartbeats", settings={}, silence="the broker is silent")
    difference = plan(spec, actual)
    assert difference.setting_changes == (SettingChange("requests", "retention.ms", "5000", "86400000"),)
    assert difference.unknown == (
        Unknown(
            "heartbeats",
            ("compression.type", "message.timestamp.type", "cleanup.policy", "retention.ms"),
            "the broker is silent",
        ),
    )
    levels = {(item.topic, item.check): item.level for item in check(spec, actual)}
    assert levels["requests", "retention.ms"] == "error"
    assert levels["heartbeats", "retention.ms"] == "warning"


def test_auto_replication_asks_for_enough_and_a_number_for_exactly_that(tmp_path: Path) -> None:
    spec = load()
    three = as_promised(spec, brokers=3)
    assert plan(spec, replace(three, brokers=2)) == Plan(), "a broker that is down for a moment changes nothing"
    too_few = plan(spec, replace(as_promised(spec), brokers=3)).not_done
    assert {(item.subject, item.actual, item.wanted) for item in too_few} == {("replication_factor", "1", "3")}
    exact = load(write(tmp_path, requests={"replication_factor": 2}))
    assert [item.topic for item in plan(exact, three).not_done] == ["requests"]


def test_a_topic_that_could_not_be_made_or_written_is_not_done(tmp_path: Path) -> None:
    spec = load(write(tmp_path, requests={"replication_factor": 3}, heartbeats={"config": {"min.insync.replicas": 2}}))
    difference = plan(spec, Actual("c", 1, {}))
    assert {(item.topic, item.because.split()[0]) for item in difference.not_done} == {
        ("requests", "replication_factor"),
        ("heartbeats", "min.insync.replicas"),
    }
    exists = with_setting(as_promised(spec), "heartbeats", "min.insync.replicas", "1")
    assert (
        NotDone("heartbeats", "min.insync.replicas", "1", "2", "with replication factor 1 nothing could be written")
        in plan(spec, exists).not_done
    )


_SOME = {
    "retention.ms": st.integers(-1, 10**12),
    "segment.bytes": st.integers(14, 2**31 - 1),
    "compression.type": st.sampled_from(["lz4", "zstd", "producer"]),
    "min.insync.replicas": st.sampled_from(["auto", 1, 2, 3]),
    "preallocate": st.booleans(),
}


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    topics: dict[str, Any] = {}
    for role in TopicNames._fields:
        config = {key: draw(_SOME[key]) for key in draw(st.sets(st.sampled_from(sorted(_SOME))))}
        replication = draw(st.sampled_from(["auto", 1, 2, 3]))
        if isinstance(replication, int) and config.get("min.insync.replicas") in range(replication + 1, 4):
            del config["min.insync.replicas"]
        partitions = 1 if role == "control" else draw(st.integers(1, 12))
        topics[role] = {"partitions": partitions, "replication_factor": replication, "config": config}
    return Spec("topics.yaml", TopicNames.with_prefix("p."), TopicsFile.model_validate({"topics": topics}))


@st.composite
def clusters(draw: st.DrawFn) -> Actual:
    topics = {}
    for name in draw(st.sets(st.sampled_from(TopicNames.with_prefix("p.")))):
        keys = draw(st.sets(st.sampled_from([*_SOME, "flush.ms", "a.setting.of.tomorrow"])))
        value = st.one_of(st.none(), st.sampled_from(["1", "2", "true", "lz4", "12345", "odd"]))
        settings = {key: Reported(draw(value), draw(st.booleans())) for key in keys}
        topics[name] = ActualTopic(draw(st.integers(1, 12)), draw(st.integers(1, 3)), settings)
    return Actual("c", draw(st.integers(1, 5)), topics)


def applied(difference: Plan, actual: Actual) -> Actual:
    """What a cluster looks like after a plan: a broker in a few lines."""
    topics = dict(actual.topics)
    for create in difference.creates:
        assert create.topic not in topics
        assert create.replication_factor <= actual.brokers
        settings = {key: Reported(value, True) for key, value in create.config.items()}
        topics[create.topic] = ActualTopic(create.partitions, create.replication_factor, settings)
    for increase in difference.partition_increases:
        topics[increase.topic] = replace(topics[increase.topic], partitions=increase.after)
    for change in difference.setting_changes:
        found = topics[change.topic]
        topics[change.topic] = replace(found, settings={**found.settings, change.key: Reported(change.after, True)})
    return replace(actual, topics=topics)


def test_a_plan_that_adds_partitions_says_what_becomes_of_runs_that_use_them() -> None:
    difference = Plan(partition_increases=(PartitionIncrease("trajectories", 2, 8),))
    shown = format_plan(difference)
    assert shown.startswith("~ trajectories: partitions 2 -> 8 (")
    assert "runs that use it notice within seconds, and read the new ones" in shown


@given(specs(), clusters())
def test_a_plan_never_deletes_or_shrinks_and_touches_only_what_is_named(spec: Spec, actual: Actual) -> None:
    difference = plan(spec, actual)
    after = applied(difference, actual)
    assert after.topics.keys() >= actual.topics.keys()
    named = {name: topic.config.keys() for _, name, topic in spec.topics()}
    for name, before in actual.topics.items():
        assert after.topics[name].partitions >= before.partitions
        assert after.topics[name].replication == before.replication
        for key, reported in before.settings.items():
            if key not in named[name]:
                assert after.topics[name].settings[key] == reported
                shown = any((item.topic, item.key) == (name, key) for item in difference.left)
                assert shown == reported.own


@given(specs(), clusters())
def test_applying_a_plan_leaves_nothing_to_change_and_the_same_not_done(spec: Spec, actual: Actual) -> None:
    first = plan(spec, actual)
    second = plan(spec, applied(first, actual))
    assert len(undone(first, actual)) == first.changes
    assert undone(first, applied(first, actual)) == []
    assert second.changes == 0
    assert second.not_done == first.not_done
    assert second.unknown == first.unknown


@given(specs(), clusters())
def test_check_fails_exactly_where_a_plan_finds_a_difference(spec: Spec, actual: Actual) -> None:
    difference = plan(spec, actual)
    failed = {item.topic for item in check(spec, actual) if item.level == "error"}
    assert failed == difference.changed | {item.topic for item in difference.not_done}


@given(st.sampled_from(sorted(SETTINGS)), st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none()))
def test_a_setting_is_taken_in_a_stable_form_or_refused_by_name(key: str, value: Any) -> None:
    refused, once = "", ""
    try:
        once = canonical(key, value)
    except ValueError as error:
        refused = str(error)
    assert refused.startswith(key) if refused else canonical(key, once) == once


# --- preflight ---


def test_topics_as_promised_pass_and_more_partitions_do_no_harm() -> None:
    spec = load()
    require(spec, with_topic(as_promised(spec), "trajectories", partitions=64), LimitsConfig())


def test_every_problem_is_said_at_once_with_the_remedy() -> None:
    spec = load()
    actual = with_topic(as_promised(spec), "control", partitions=4)
    actual = with_setting(actual, "trajectories", "cleanup.policy", "compact")
    actual = with_setting(actual, "trajectories", "max.message.bytes", "1000000")
    actual = with_setting(actual, "requests", "min.insync.replicas", "2")
    actual = replace(actual, topics={name: topic for name, topic in actual.topics.items() if name != "heartbeats"})
    with pytest.raises(TopicError) as caught:
        require(spec, actual, LimitsConfig())
    said = str(caught.value)
    for part in (
        "control: has 4 partitions instead of 1",
        "trajectories: cleanup.policy is compact, which loses records",
        "trajectories: max.message.bytes is 1000000, and limits.record_bytes 16777216",
        "requests: min.insync.replicas 2 is above the replication factor 1",
        "heartbeats: does not exist",
        "`echo-topics apply` mends 3 of these 5",
    ):
        assert part in said


def test_a_dead_letter_must_fit_with_its_reason() -> None:
    spec = load()
    tight = with_setting(as_promised(spec), "dead_letter", "max.message.bytes", str(LimitsConfig().record_bytes))
    assert [(item.topic, item.check) for item in preflight(spec, tight, LimitsConfig())] == [
        ("dead_letter", "max.message.bytes")
    ]


def test_a_message_limit_that_is_too_small_names_where_it_is(tmp_path: Path) -> None:
    """On the broker, where `echo-topics apply` mends it, or in the file."""
    small = "1000000"
    [found] = preflight(load(), with_setting(as_promised(load()), "trajectories", "max.message.bytes", small), LimitsConfig())
    assert re.search(
        r"max\.message\.bytes is 1000000, .*topics\.yaml has \d{8}, and `echo-topics apply` sets it$", found.message
    )
    file = write(tmp_path)
    wide = LimitsConfig(record_bytes=100 * 2**20)
    messages = [item.message for item in preflight(load(file), as_promised(load(file)), wide)]
    assert len(messages) == 2
    assert all(f"raise it in {file} for `echo-topics apply`" in message for message in messages)


def test_only_what_apply_would_do_counts_as_mended() -> None:
    spec = load()
    actual = with_topic(as_promised(spec), "control", partitions=4)
    actual = with_setting(actual, "trajectories", "max.message.bytes", "1000000")
    actual = replace(actual, topics={name: topic for name, topic in actual.topics.items() if name != "heartbeats"})
    findings = check(spec, actual)
    assert sum(item.level == "error" for item in findings) == 3
    assert mended(plan(spec, actual), findings) == 2


def test_what_the_broker_does_not_report_is_not_held_against_it() -> None:
    spec = load()
    actual = as_promised(spec)
    for name in spec.names:
        actual = with_topic(actual, name, settings={})
    require(spec, actual, LimitsConfig())


def test_a_short_retention_is_a_warning() -> None:
    spec = load()
    actual = with_setting(as_promised(spec), "trajectories", "retention.ms", "60000")
    with structlog.testing.capture_logs() as lines:
        require(spec, actual, LimitsConfig())
    assert [(line["log_level"], line["topic"]) for line in lines] == [("warning", "trajectories")]
    assert preflight(spec, with_setting(actual, "trajectories", "retention.ms", "-1"), LimitsConfig()) == []


@pytest.mark.parametrize(("kept", "warned"), [("producer", True), ("lz4", True), ("uncompressed", False), ("zstd", False)])
def test_topics_that_keep_strangers_batches_as_they_come_are_warned_of(kept: str, warned: bool) -> None:
    found = preflight(load(), with_setting(as_promised(load()), "trajectories", "compression.type", kept), LimitsConfig())
    assert [(item.topic, item.check, item.level) for item in found] == (
        [("trajectories", "compression.type", "warning")] if warned else []
    )
