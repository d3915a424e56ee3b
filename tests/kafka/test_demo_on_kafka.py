"""The same demo on real Apache Kafka, and on three nodes of it whose leader is killed in mid-run."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

from echo.broker import ApacheBroker, BrokerPlan, RunningBroker, start_broker
from echo.run_file import load
from tests.e2e.demo import Demo, check_summary

pytestmark = [pytest.mark.kafka, pytest.mark.e2e, pytest.mark.timeout(900)]


def kcat(*arguments: str) -> str:
    """Debian's kcat: an ordinary Kafka tool that knows nothing of Echo."""
    return subprocess.run(["kcat", *arguments], check=True, capture_output=True, text=True, timeout=60).stdout


def frontier_of(demo: Demo, topic: str) -> dict[tuple[str, int], int]:
    """The lowest offset not resolved, per partition, in the newest checkpoint."""
    newest = max((demo.out / "checkpoints").glob("step-*"))
    frontier = json.loads((newest / "meta.json").read_text())["reader"]["ledger"]["frontier"]
    return {(topic, int(number)): offset for number, offset in frontier.items()}


def test_the_same_run_on_apache_kafka_is_readable_by_kcat(
    apache: RunningBroker, tmp_path: Path, topic_prefix: str, warm_policy: Path, started: list[Demo]
) -> None:
    """Only bootstrap.servers differs from the demo on the embedded broker (and a prefix, since tests share this Kafka)."""
    servers = apache.bootstrap_servers
    where = (f"broker.settings.bootstrap.servers={servers}", f"topics.prefix={topic_prefix}")
    demo = Demo(tmp_path / "out", "--seed", "1", *where, f"model.path={warm_policy}", "learner.steps=70")
    started.append(demo)
    assert demo.wait() == 0, demo.log
    assert "bootstrap.servers of the run file" in demo.log
    summary = demo.summary()
    check_summary(summary, learned=False)
    assert summary["reward_last"] >= summary["reward_first"] + 0.3, "two thirds of the steps show that it learns"

    group = f"echo-{load(demo.out / 'run.yaml').run_id}"
    admin = AdminClient({"bootstrap.servers": servers})
    offsets = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)], request_timeout=20.0)
    shown = {(at.topic, at.partition): at.offset for at in offsets[group].result(20.0).topic_partitions}
    assert shown == frontier_of(demo, f"{topic_prefix}trajectories"), "lag tools see what the last checkpoint holds"

    if shutil.which("kcat") is None:
        pytest.skip("kcat is not installed (Debian: apt-get install kcat); the demo itself ran well")
    topics = {topic["topic"] for topic in json.loads(kcat("-b", servers, "-L", "-J"))["topics"]}
    assert {f"{topic_prefix}{name}" for name in ("trajectories", "control", "requests", "heartbeats", "dead_letter")} <= topics
    listing = kcat("-b", servers, "-C", "-e", "-q", "-t", f"{topic_prefix}trajectories", "-f", "%k|%h|%S\n")
    records = listing.splitlines()
    assert len(records) == summary["trajectories_produced"]
    key, headers, size = records[0].split("|")
    assert f"group={key}" in headers
    assert "schema=1.0" in headers
    assert int(size) > 0
    announcements = kcat("-b", servers, "-C", "-e", "-q", "-t", f"{topic_prefix}control").splitlines()
    assert any(json.loads(line)["type"] == "announcement" for line in announcements)


def test_a_leader_killed_in_mid_run_costs_nothing(
    apache_plan: BrokerPlan, tmp_path: Path, warm_policy: Path, started: list[Demo]
) -> None:
    """Three nodes, replication 3, min.insync.replicas 2; kill -9 of a node that leads trajectories partitions."""
    with start_broker(apache_plan, data_dir=tmp_path / "kafka", nodes=3, heap_mib=384) as broker:
        assert isinstance(broker, ApacheBroker)
        # Three brokers slow it down: a short run, most of it without the node that led at its start.
        servers = f"broker.settings.bootstrap.servers={broker.bootstrap_servers}"
        demo = Demo(tmp_path / "out", "--seed", "2", servers, f"model.path={warm_policy}", "learner.steps=20")
        started.append(demo)
        demo.until_step(3)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        partitions = admin.list_topics(timeout=20).topics["trajectories"].partitions
        assert {len(partition.replicas) for partition in partitions.values()} == {3}
        victim = partitions[0].leader
        broker.kill_node(victim)
        before = len(demo.steps())
        assert demo.wait() == 0, demo.log
        assert len(demo.steps()) > before
        check_summary(demo.summary(), learned=False)
