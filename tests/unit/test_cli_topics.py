"""echo-topics against real brokers: what it says, what it changes, what it never does, and its exit status."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

from echo.cli import topics as cli
from echo.config import LimitsConfig
from echo.errors import TopicError
from echo.kafka import KafkaLogAdmin
from echo.topics import Reported, load, read_actual, require
from tests.eventually import eventually
from tests.unit.test_topics import write

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(params=["tansu", pytest.param("apache", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest) -> str:
    """bootstrap.servers of a real broker."""
    servers: str = request.getfixturevalue(request.param).bootstrap_servers
    return servers


@pytest.fixture
def admin(broker: str) -> KafkaLogAdmin:
    return KafkaLogAdmin({"bootstrap.servers": broker}, client_id="test")


@pytest.fixture
def run(broker: str, topic_prefix: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs echo-topics on the broker: (exit status, standard output, standard error)."""

    def run_it(command: str, *options: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--bootstrap-servers", broker, "--prefix", topic_prefix, *map(str, options)])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run_it


def named(admin: KafkaLogAdmin, topic_prefix: str) -> dict[str, int]:
    """The topics of a prefix and how many partitions each has."""
    found = admin.metadata(10).topics
    return {name: len(topic.partitions) for name, topic in found.items() if name.startswith(topic_prefix)}


def create(admin: KafkaLogAdmin, name: str, partitions: int) -> None:
    for answer in admin.client.create_topics([NewTopic(name, partitions, 1)], request_timeout=10).values():
        answer.result(10)
    eventually(lambda: name in read_actual(admin, [name]).topics, f"{name} is shown")


def set_on_topic(admin: KafkaLogAdmin, name: str, key: str, value: str) -> None:
    entry = ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=[entry])
    for answer in admin.client.incremental_alter_configs([resource], request_timeout=10).values():
        answer.result(10)
    # A broker answers before it shows what it did.
    shown = Reported(value, own=True)
    eventually(lambda: read_actual(admin, [name]).topics[name].settings.get(key) == shown, f"{name} shows {key}")


def test_plan_then_apply_then_nothing_left(run: Run, admin: KafkaLogAdmin, topic_prefix: str) -> None:
    status, out, _ = run("plan")
    assert status == 2
    assert f"+ {topic_prefix}trajectories: create, partitions 8, replication 1" in out
    status, out, _ = run("check")
    assert status == 1
    assert "trajectories: exists: no; `echo-topics apply` creates it" in out
    assert out.endswith("5 checks, 5 failed. `echo-topics apply` mends them.\n")
    assert named(admin, topic_prefix) == {}, "looking created nothing"

    status, out, _ = run("apply", "--yes", "--json")
    assert (status, json.loads(out)["applied"], json.loads(out)["changes"]) == (0, True, 5)
    assert named(admin, topic_prefix) == {
        topic_prefix + name: count
        for name, count in (("trajectories", 8), ("control", 1), ("requests", 4), ("heartbeats", 1), ("dead_letter", 1))
    }
    status, out, _ = run("plan", "--json")
    assert (status, json.loads(out)["changes"]) == (0, 0)
    status, out, _ = run("apply", "--yes", "--json")
    assert (status, json.loads(out)["applied"]) == (0, False)
    status, out, _ = run("check", "--json")
    assert (status, json.loads(out)["ok"]) == (0, True)
    spec = load(prefix=topic_prefix)
    require(spec, read_actual(admin, spec.names), LimitsConfig())


def test_a_setting_is_changed_and_those_not_in_the_file_stay(
    run: Run, admin: KafkaLogAdmin, topic_prefix: str, tmp_path: Path
) -> None:
    run("apply", "--yes")
    set_on_topic(admin, topic_prefix + "requests", "segment.ms", "123456")
    changed = write(tmp_path, requests={"config": {"cleanup.policy": "delete", "retention.ms": 7200000}})
    status, out, _ = run("plan", "--file", changed)
    assert status == 2
    assert f"~ {topic_prefix}requests: retention.ms 86400000 -> 7200000" in out
    assert f"= {topic_prefix}requests: segment.ms = 123456 is not in the topics file" in out
    assert run("apply", "--yes", "--file", changed)[0] == 0
    assert run("plan", "--file", changed)[0] == 0
    _, out, _ = run("describe", "--json")
    requests = next(topic for topic in json.loads(out)["topics"] if topic["role"] == "requests")
    assert requests["settings"]["retention.ms"] == {"value": "7200000", "own": True}
    assert requests["settings"]["segment.ms"] == {"value": "123456", "own": True}
    assert "segment.ms = 123456   (not in the topics file)" in run("describe")[1]


def test_a_shrink_is_refused_and_the_topic_stays(run: Run, admin: KafkaLogAdmin, topic_prefix: str, tmp_path: Path) -> None:
    run("apply", "--yes")
    smaller = write(tmp_path, trajectories={"partitions": 2})
    status, out, _ = run("plan", "--json", "--file", smaller)
    assert status == 1
    refused = json.loads(out)["not_done"]
    assert [(item["topic"], item["subject"], item["actual"], item["wanted"]) for item in refused] == [
        (topic_prefix + "trajectories", "partitions", "8", "2")
    ]
    status, out, _ = run("apply", "--yes", "--file", smaller)
    assert status == 1
    assert "not done, because" in out
    assert named(admin, topic_prefix)[topic_prefix + "trajectories"] == 8


def test_partitions_are_raised_where_the_broker_can_and_else_it_says_so(
    run: Run, admin: KafkaLogAdmin, topic_prefix: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run("apply", "--yes")
    larger = write(tmp_path, trajectories={"partitions": 11})
    assert run("plan", "--file", larger)[0] == 2
    status, _, err = run("apply", "--yes", "--file", larger)
    if "apache" in request.node.name:
        assert (status, named(admin, topic_prefix)[topic_prefix + "trajectories"]) == (0, 11)
        assert run("plan", "--file", larger)[0] == 0
    else:
        assert (status, named(admin, topic_prefix)[topic_prefix + "trajectories"]) == (1, 8)
        assert f"adding partitions to {topic_prefix}trajectories" in err
        assert "this broker can't" in err


def test_a_control_topic_with_more_partitions_stops_a_start(run: Run, admin: KafkaLogAdmin, topic_prefix: str) -> None:
    create(admin, topic_prefix + "control", 4)
    status, out, _ = run("apply", "--yes")
    assert status == 1
    assert f"! {topic_prefix}control: partitions 4 -> 1 not done" in out
    assert named(admin, topic_prefix)[topic_prefix + "control"] == 4
    spec = load(prefix=topic_prefix)
    with pytest.raises(TopicError, match="has 4 partitions instead of 1"):
        require(spec, read_actual(admin, spec.names), LimitsConfig())


def test_a_topic_made_by_others_is_held_to_what_the_broker_reports(run: Run, admin: KafkaLogAdmin, topic_prefix: str) -> None:
    """Kafka reports its defaults, which can be compared; the embedded broker reports nothing, which is said."""
    create(admin, topic_prefix + "requests", 4)
    _, out, _ = run("plan", "--json")
    difference = json.loads(out)
    changed = {item["key"] for item in difference["setting_changes"]}
    unknown = {key for item in difference["unknown"] for key in item["keys"]}
    assert changed | unknown == (
        {"compression.type", "message.timestamp.type", "retention.ms"}
        if changed
        else {"cleanup.policy", "compression.type", "message.timestamp.type", "retention.ms"}
    )
    assert run("apply", "--yes")[0] == 0
    assert run("plan")[0] == 0


def test_more_replicas_than_brokers_are_refused_before_anything_is_sent(
    run: Run, admin: KafkaLogAdmin, topic_prefix: str, tmp_path: Path
) -> None:
    three = write(tmp_path, requests={"replication_factor": 3})
    status, out, _ = run("apply", "--yes", "--file", three)
    assert status == 1
    assert "replication_factor 3 needs as many brokers, the cluster has 1" in out
    assert topic_prefix + "requests" not in named(admin, topic_prefix)
    assert topic_prefix + "control" in named(admin, topic_prefix), "what can be done is done"


def test_apply_asks_and_without_a_terminal_wants_yes(run: Run, admin: KafkaLogAdmin, topic_prefix: str) -> None:
    status, _, err = run("apply")
    assert status == 1
    assert "pass --yes" in err
    assert named(admin, topic_prefix) == {}


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("n\n", 1)])
def test_the_answer_on_a_terminal_decides(
    broker: str, admin: KafkaLogAdmin, topic_prefix: str, answer: str, status: int
) -> None:
    ours, theirs = os.openpty()
    os.write(ours, answer.encode())
    command = [sys.executable, "-m", "echo.cli.topics", "apply", "-b", broker, "--prefix", topic_prefix]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=60, check=False)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == status, done.stderr
    assert len(named(admin, topic_prefix)) == (5 if status == 0 else 0)


def test_a_run_file_gives_broker_prefix_and_topics_and_options_win(
    broker: str, topic_prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, trajectories={"partitions": 3})
    run_file = tmp_path / "run.yaml"
    settings = {"bootstrap.servers": broker, "sasl.password": "hunter2"}
    topics = {"file": "topics.yaml", "prefix": topic_prefix}
    run_file.write_text(
        yaml.safe_dump({"run_id": "r", "model": {"path": "m"}, "broker": {"settings": settings}, "topics": topics})
    )
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", str(run_file), "--json"])
    said = capsys.readouterr()
    first = json.loads(said.out)["creates"][0]
    assert (first["topic"], first["partitions"]) == (topic_prefix + "trajectories", 3)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", str(run_file), "--prefix", "else."])
    assert "+ else.trajectories: create, partitions 3" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        cli.main(["plan", str(run_file), "--set", "sasl.pasword=hunter3", "--set", "sasl.mechanism=hunter4"])
    refused = capsys.readouterr()
    assert 'No such configuration property: "sasl.pasword"' in refused.err
    assert "hunter" not in said.out + said.err + refused.out + refused.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "no broker is named"),
        (["plan", "--nonsense"], "No such option"),
        (["plan", "-b", "127.0.0.1:1", "--timeout", "0.3"], "no answer from 127.0.0.1:1"),
        (["plan", "absent.yaml"], "absent.yaml: No such file"),
        (["plan", "-b", "127.0.0.1:1", "--set", "sasl.password"], "--set 'sasl.password' is not KEY=VALUE"),
        (["plan", "-b", "127.0.0.1:1", "--prefix", "a b"], "topics.prefix"),
        ([], "Missing command"),
    ],
)
def test_an_error_is_one_line_and_status_1(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage too: 2 is an answer of `plan`."""
    with pytest.raises(SystemExit, match="1"):
        cli.main(arguments)
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_help_needs_none_of_the_heavy_parts() -> None:
    heavy = "{'confluent_kafka', 'pydantic', 'numpy'}"
    code = f"import sys, echo.cli.topics, echo.cli.tail; sys.exit(len({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
