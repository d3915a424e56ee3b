"""Starting brokers: ports, guards, limits, and that none outlives the process that started it. Real processes throughout."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import structlog

import echo.broker.apache
import echo.broker.tansu
from echo.broker import ApacheBroker, BrokerPlan, RunningBroker, plan_broker, start_broker
from echo.broker.process import free_ports
from echo.broker.tansu import start_tansu
from echo.config import BrokerConfig
from echo.errors import BrokerError
from echo.kafka import KafkaLogAdmin, KafkaLogProducer, KafkaLogReader
from echo.log import BEGINNING
from tests.conftest import CreateTopic

DEADLINE_S = 40.0

# A parent of its own: starts a broker, prints its process ids, and waits to be killed. `fork` leaves a child behind that
# holds copies of all its file descriptors.
PARENT = """
import os, sys, time
from pathlib import Path
from echo.broker import plan_broker, start_broker
folder, fork = Path(sys.argv[1]), sys.argv[2] == "fork"
broker = start_broker(plan_broker(environ=dict(os.environ)), data_dir=folder, heap_mib=512)
if fork and os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print(*broker.nodes.values(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def occupied() -> Iterator[int]:
    """A port on which something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, f"process {pid} still lives"
        time.sleep(0.02)


def kill_parent(folder: Path, environ: dict[str, str], mode: str = "plain") -> int:
    """Start a broker from another process, kill -9 that process, and return the broker's pid."""
    command = [sys.executable, "-c", PARENT, str(folder), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
        parent.wait()
        wait_gone(pid)
        # A forked child, if there is one, has the parent's process group.
        try:
            os.killpg(parent.pid, signal.SIGKILL)
        except ProcessLookupError:
            assert mode == "plain"
    return pid


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "KAFKA_HOME"}


def test_tansu_starts_alone_on_loopback_with_nothing_of_our_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on all interfaces, no variables, a .env file of ours is not read; stopped at once and for good."""
    monkeypatch.setenv("SCHEMA_REGISTRY", "file:///nowhere")
    with start_broker(plan_broker(environ={}), data_dir=tmp_path) as broker:
        (pid,) = broker.nodes.values()
        process = psutil.Process(pid)
        # Python itself sets LC_CTYPE where there is no locale.
        assert process.environ().keys() <= {"LC_CTYPE"}
        listening = {connection.laddr.ip for connection in process.net_connections() if connection.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        assert (Path(process.cwd()) / ".env").read_bytes() == b""
        assert (
            KafkaLogAdmin({"bootstrap.servers": broker.bootstrap_servers}, client_id="t").cluster_id(5.0) == broker.cluster_id
        )
        assert broker.bootstrap_servers in broker.describe()
        broker.check()
    assert not psutil.pid_exists(pid)
    broker.stop()
    assert broker.nodes == {}


def test_two_brokers_do_not_meet(tmp_path: Path) -> None:
    """Each has its own port and cluster id."""
    plan = plan_broker(environ={})
    with start_broker(plan, data_dir=tmp_path) as one, start_broker(plan, data_dir=tmp_path) as two:
        assert one.bootstrap_servers != two.bootstrap_servers
        assert one.cluster_id != two.cluster_id


def test_a_wanted_port_that_is_taken_is_an_error(tmp_path: Path, occupied: int) -> None:
    """It names the port."""
    with pytest.raises(BrokerError, match=f"port {occupied} .* is taken"):
        start_broker(plan_broker(environ={}), data_dir=tmp_path, port=occupied)


def test_a_port_that_was_free_a_moment_ago_is_given_up(tmp_path: Path, occupied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the choice of a port and the broker's start another program may take it: another port is tried."""
    choices = [[occupied]]
    monkeypatch.setattr(echo.broker.tansu, "free_ports", lambda count: choices.pop() if choices else free_ports(count))
    with start_broker(plan_broker(environ={}), data_dir=tmp_path) as broker:
        assert not choices
        assert broker.bootstrap_servers != f"127.0.0.1:{occupied}"


def test_three_nodes_need_apache(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="3 nodes need Apache Kafka"):
        start_broker(plan_broker(environ={}), data_dir=tmp_path, nodes=3)


def test_who_waits_for_a_data_folder_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another broker holds it: that is said soon, and is an error only when one that was killed would be gone."""
    monkeypatch.setattr(echo.broker.apache, "_STOP_S", -4.2)
    monkeypatch.setattr(echo.broker.apache, "_SILENT_S", 0.1)
    plan = BrokerPlan("apache", "--apache", home=tmp_path, java=tmp_path)
    with (tmp_path / "lock").open("w") as held, structlog.testing.capture_logs() as lines:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BrokerError, match="is in use by another broker"):
            start_broker(plan, data_dir=tmp_path)
    [said] = [line["event"] for line in lines]
    assert f"waiting for data folder {tmp_path}" in said
    assert "free within 0.8 s" in said


def test_a_broker_that_died_is_noticed(tmp_path: Path) -> None:
    """`check` says that the records are gone, and what to do."""
    with start_broker(plan_broker(environ={}), data_dir=tmp_path) as broker:
        (pid,) = broker.nodes.values()
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        deadline = time.monotonic() + DEADLINE_S
        while broker.nodes and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(BrokerError, match=r"ended with status 137, and its records with it: .*new run_id.*Apache Kafka"):
            broker.check()


def test_tansu_is_stopped_at_its_memory_limit(tmp_path: Path) -> None:
    """With the remedy in the error, before the machine runs out of memory."""
    broker = start_tansu(plan_broker(environ={}), data_dir=tmp_path, port=0, ready_s=20.0, limit_bytes=1, watch_s=0.05)
    with broker:
        (pid,) = broker.nodes.values() or (0,)
        if pid:
            wait_gone(pid)
        deadline = time.monotonic() + DEADLINE_S
        while broker.nodes and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(BrokerError, match=r"its limit is .* use Apache Kafka"):
            broker.check()


def test_a_killed_parent_takes_tansu_with_it(tmp_path: Path) -> None:
    """kill -9 of the parent: no handler of it runs, and no broker is left."""
    kill_parent(tmp_path, clean_environment())


def test_a_forked_child_does_not_keep_the_broker_alive(tmp_path: Path) -> None:
    """A worker process that inherited the parent's file descriptors lives on: the broker still ends with the parent."""
    kill_parent(tmp_path, clean_environment(), "fork")


def test_a_killed_guard_takes_the_broker_with_it(tmp_path: Path) -> None:
    """No way of killing leaves a broker that nobody guards."""
    with start_broker(plan_broker(environ={}), data_dir=tmp_path) as broker:
        (pid,) = broker.nodes.values()
        psutil.Process(pid).parent().kill()
        wait_gone(pid)
        with pytest.raises(BrokerError, match="ended with status -9"):
            broker.check()


def test_the_broker_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    """The kernel counts threads as parents; only the process counts here."""
    started = []
    plan = plan_broker(environ={})
    thread = threading.Thread(target=lambda: started.append(start_broker(plan, data_dir=tmp_path)))
    thread.start()
    thread.join()
    (broker,) = started
    with broker:
        (pid,) = broker.nodes.values()
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(pid).wait(0.5)
        broker.check()


def test_a_terminals_ctrl_c_does_not_reach_the_broker(tmp_path: Path) -> None:
    """It is in a session of its own: its clients, which get the Ctrl-C, can finish first."""
    with start_broker(plan_broker(environ={}), data_dir=tmp_path) as broker:
        (pid,) = broker.nodes.values()
        assert os.getsid(pid) != os.getsid(0)


def test_an_external_broker_is_asked_and_left_alone(tansu: RunningBroker, tmp_path: Path) -> None:
    """Its cluster id is read, no process is started, nothing is written, stopping does nothing."""
    servers = tansu.bootstrap_servers
    plan = plan_broker(BrokerConfig(settings={"bootstrap.servers": servers}))
    with start_broker(plan, data_dir=tmp_path / "unused") as broker:
        assert broker.cluster_id == tansu.cluster_id
        assert broker.nodes == {}
    assert not (tmp_path / "unused").exists()
    assert KafkaLogAdmin({"bootstrap.servers": servers}, client_id="t").cluster_id(5.0) == broker.cluster_id


def test_an_external_broker_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    """Within the run file's timeout."""
    config = BrokerConfig(settings={"bootstrap.servers": "127.0.0.1:1"}, timeout_s=0.5)
    with pytest.raises(BrokerError, match=r"no answer from 127\.0\.0\.1:1 within 0\.5 s"):
        start_broker(plan_broker(config), data_dir=tmp_path)


@pytest.mark.kafka
def test_a_killed_parent_takes_apache_with_it(apache_plan: BrokerPlan, tmp_path: Path) -> None:
    """And a start on the same folder right after it waits for the old broker's end instead of clashing with it."""
    environ = {**os.environ, "KAFKA_HOME": str(apache_plan.home)}
    pid = kill_parent(tmp_path, environ)
    with start_broker(apache_plan, data_dir=tmp_path, heap_mib=512) as broker:
        assert pid not in broker.nodes.values()


@pytest.mark.kafka
def test_apache_keeps_its_records_ports_and_id(apache_plan: BrokerPlan, tmp_path: Path, create_topic: CreateTopic) -> None:
    """Over a planned stop and over a kill -9; the folder belongs to one broker at a time, and to its number of nodes."""
    with start_broker(apache_plan, data_dir=tmp_path, heap_mib=512) as first:
        topic = create_topic(first, "kept")
        settings = {"bootstrap.servers": first.bootstrap_servers}
        producer = KafkaLogProducer(settings, client_id="t", max_record_bytes=2**20, queue_bytes=2**20)
        assert producer.send(topic, key=b"k", value=b"one")
        assert producer.flush(DEADLINE_S) == 0
    # A node that was killed is registered again when its old session has expired.
    soon = {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"}
    with start_broker(apache_plan, data_dir=tmp_path, heap_mib=512, overrides=soon) as second:
        assert (second.bootstrap_servers, second.cluster_id) == (first.bootstrap_servers, first.cluster_id)
        assert isinstance(second, ApacheBroker)
        reader = KafkaLogReader(settings, client_id="t", max_record_bytes=2**20)
        reader.assign({(topic, 0): BEGINNING})
        assert [record.value for record in reader.read(10, DEADLINE_S)] == [b"one"]
        # The clients of before go on by themselves.
        assert producer.send(topic, key=b"k", value=b"two")
        assert producer.flush(DEADLINE_S) == 0
        second.kill_node(1)
        assert second.nodes == {}
        second.check()
        assert producer.send(topic, key=b"k", value=b"three")
        second.restart_node(1)
        assert producer.flush(DEADLINE_S) == 0
        values: list[bytes | None] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(values) < 2 and time.monotonic() < deadline:
            values += [record.value for record in reader.read(10, 1.0)]
        assert values == [b"two", b"three"]
        reader.close()
        producer.close()
        with pytest.raises(BrokerError, match="running: kill it first"):
            second.restart_node(1)
        os.kill(second.nodes[1], signal.SIGKILL)
        wait_gone_from(second)
        with pytest.raises(BrokerError, match="node 1 has ended with status 137"):
            second.check()
    with pytest.raises(BrokerError, match=r"cluster of 1 node\(s\), not 3"):
        start_broker(apache_plan, data_dir=tmp_path, nodes=3)


def wait_gone_from(broker: ApacheBroker) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while broker.nodes and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.kafka
def test_a_kafka_that_can_not_start_says_why(apache_plan: BrokerPlan, tmp_path: Path) -> None:
    """The last lines of its log and where the rest is, not a timeout."""
    with pytest.raises(BrokerError, match=r"node-1 can't be formatted .*process\.roles"):
        start_broker(apache_plan, data_dir=tmp_path, overrides={"process.roles": "nonsense"})
