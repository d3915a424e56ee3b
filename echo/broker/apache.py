"""Apache Kafka on this machine: one node or three, KRaft, data on disk that a restart finds again.

Refuses to touch a folder that another broker uses, or to format one twice.

    DIR/cluster.json              cluster id, number of nodes, ports
    DIR/lock                      held while a broker uses the folder
    DIR/node-1/server.properties  written anew at each start
    DIR/node-1/data/              the log
    DIR/node-1/broker.log         what the broker says
"""

import base64
import fcntl
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec

from echo.broker.plan import BrokerPlan, java_environment
from echo.broker.process import HOST, GuardedProcess, PortTaken, free_ports, last_lines, taken, wait_ready
from echo.broker.running import RunningBroker
from echo.errors import BrokerError
from echo.waiting import Watch

# A record of 16 MiB that was dead-lettered still fits, with its headers and the reason.
MESSAGE_MAX_BYTES = 17825792

_START_TRIES = 3
_FORMAT_S = 120.0
_STOP_S = 20.0
_SILENT_S = 1.0
_LOG4J2 = """\
status = warn
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d] %p %m (%c)%n
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
"""


class _Cluster(msgspec.Struct):
    """cluster.json. ports: per node, of the broker and of its controller."""

    cluster_id: str
    nodes: int
    ports: list[tuple[int, int]]


class ApacheBroker(RunningBroker):
    """See `RunningBroker`. Nodes are numbered from 1."""

    def __init__(self, plan: BrokerPlan, folder: "_Folder", processes: dict[int, GuardedProcess], *, ready_s: float) -> None:
        super().__init__(plan, folder.servers, folder.cluster.cluster_id)
        self.data_dir = folder.path
        self._folder = folder
        self._processes = processes
        self._killed: set[int] = set()
        self._ready_s = ready_s
        self._stopped = False

    @property
    def nodes(self) -> dict[int, int]:
        return {number: process.pid for number, process in self._processes.items() if process.running()}

    def describe(self) -> str:
        count = self._folder.cluster.nodes
        return f"{super().describe()}, {count} node{'s' if count > 1 else ''}, data in {self.data_dir}"

    def check(self) -> None:
        for number, process in self._processes.items():
            if not self._stopped and number not in self._killed and not process.running():
                raise BrokerError(
                    f"{process.name} has ended with status {process.status()}; its data is in {self.data_dir} and a "
                    f"restart finds it again. Its last words: {process.last_words()}"
                )

    def kill_node(self, number: int) -> None:
        """kill -9, as a crash would; returns when it is gone."""
        self._killed.add(number)
        self._processes[number].kill()

    def restart_node(self, number: int) -> None:
        """Start a node that was killed, on its old data and ports; returns when the cluster has it back."""
        if self._processes[number].running():
            raise BrokerError(f"node {number} is running: kill it first")
        self._processes[number] = self._folder.launch(number)
        self._killed.discard(number)
        alive = [process for other, process in self._processes.items() if other not in self._killed]
        own = f"{HOST}:{self._folder.cluster.ports[number - 1][0]}"
        wait_ready(own, self.cluster_id, nodes=len(alive), processes=lambda: alive, timeout_s=self._ready_s)

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        _stop_all(self._processes)
        self._folder.unlock()


def start_apache(
    plan: BrokerPlan,
    *,
    data_dir: Path,
    nodes: int,
    port: int,
    ready_s: float,
    heap_mib: int = 768,
    overrides: Mapping[str, str] | None = None,
) -> ApacheBroker:
    """Start 1 or 3 nodes on `data_dir`, which is formatted when it is new, and wait until all are up.

    Ports are those of the last start where they are still free. port: of the first node; the others take the next ones.
    overrides: server.properties on top of ours. Raises BrokerError naming the folder, the port or the node.
    """
    if nodes not in (1, 3):
        raise BrokerError(f"Apache Kafka is started with 1 or 3 nodes, not {nodes}")
    folder = _Folder(plan, data_dir.resolve(), heap_mib=heap_mib, overrides=overrides or {})
    try:
        folder.load(nodes)
        for attempt in range(1, _START_TRIES + 1):
            folder.choose_ports(port)
            folder.prepare()
            processes: dict[int, GuardedProcess] = {}
            try:
                for number in folder.numbers:
                    processes[number] = folder.launch(number)
                wait_ready(
                    folder.servers,
                    folder.cluster.cluster_id,
                    nodes=nodes,
                    processes=processes.values,
                    timeout_s=ready_s,
                )
            except PortTaken:
                _stop_all(processes)
                if port or attempt == _START_TRIES:
                    raise
                continue
            except BaseException:
                _stop_all(processes)
                raise
            return ApacheBroker(plan, folder, processes, ready_s=ready_s)
        raise AssertionError("unreachable")
    except BaseException:
        folder.unlock()
        raise


def _stop_all(processes: Mapping[int, GuardedProcess]) -> None:
    """Ask all first: a node that is alone can't finish its controlled shutdown."""
    for process in processes.values():
        process.ask_to_stop()
    for process in processes.values():
        process.stop()


class _Folder:
    """The data folder of a cluster: locked for as long as this object or one of its brokers lives."""

    def __init__(self, plan: BrokerPlan, path: Path, *, heap_mib: int, overrides: Mapping[str, str]) -> None:
        assert plan.java is not None
        assert plan.home is not None
        self.path = path
        self._java = plan.java
        self._classes = f"{plan.home / 'libs'}/*"
        self._heap_mib = heap_mib
        self._overrides = overrides
        self._lock = -1
        self.cluster: _Cluster

    @property
    def numbers(self) -> range:
        return range(1, self.cluster.nodes + 1)

    @property
    def servers(self) -> str:
        return ",".join(f"{HOST}:{broker}" for broker, _ in self.cluster.ports)

    def load(self, nodes: int) -> None:
        """Lock the folder and read what an earlier start left there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BrokerError(f"data folder {self.path}: {error.strerror}: choose another one") from None
        # The broker of a process that was killed is stopped by its guard; that takes a moment.
        limit_s = _STOP_S + 5.0
        deadline = time.monotonic() + limit_s
        watch = Watch(
            f"data folder {self.path}",
            lambda: f"another broker uses it; if that is one that is just ending, it is free within {limit_s:g} s",
            limit_s=_SILENT_S,
        )
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                watch.progress()
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BrokerError(
                        f"data folder {self.path} is in use by another broker: stop it, or choose another folder"
                    ) from None
                if not watch.spoken:
                    watch.check()
                time.sleep(0.1)
        file = self.path / "cluster.json"
        if not file.exists():
            self.cluster = _Cluster(cluster_id=_new_cluster_id(), nodes=nodes, ports=[])
            return
        try:
            self.cluster = msgspec.json.decode(file.read_bytes(), type=_Cluster)
        except msgspec.DecodeError as error:
            raise BrokerError(f"{file} is damaged ({error}): restore it, or choose another data folder") from None
        if self.cluster.nodes != nodes:
            raise BrokerError(
                f"data folder {self.path} belongs to a cluster of {self.cluster.nodes} node(s), not {nodes}: start it with "
                f"--nodes {self.cluster.nodes}, or choose another folder"
            )

    def unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def choose_ports(self, port: int) -> None:
        nodes = self.cluster.nodes
        if port:
            wanted = list(range(port, port + nodes))
            if busy := taken(wanted):
                raise BrokerError(f"port {busy[0]} of {HOST} is taken: stop what listens there, or choose other ports")
        else:
            wanted = [broker for broker, _ in self.cluster.ports]
        wanted += [controller for _, controller in self.cluster.ports] or [0] * nodes
        chosen = free_ports(2 * nodes, wanted)
        self.cluster.ports = list(zip(chosen[:nodes], chosen[nodes:], strict=True))

    def _write_settings(self) -> None:
        beside = self.path / "cluster.json.new"
        beside.write_bytes(msgspec.json.encode(self.cluster))
        beside.replace(self.path / "cluster.json")
        (self.path / "log4j2.properties").write_text(_LOG4J2)
        for number in self.numbers:
            self._node(number).mkdir(exist_ok=True)
            settings = {**self._settings(number), **self._overrides}
            text = "".join(f"{name}={value}\n" for name, value in settings.items())
            (self._node(number) / "server.properties").write_text(text)

    def prepare(self) -> None:
        """Write the settings, and format what was never formatted."""
        try:
            self._write_settings()
        except OSError as error:
            raise BrokerError(f"data folder {self.path}: {error.strerror}: free space there, or choose another one") from None
        # Kafka writes meta.properties last when it formats.
        new = [number for number in self.numbers if not (self._node(number) / "data" / "meta.properties").exists()]
        for number, run in [(number, self._start_format(number)) for number in new]:
            try:
                output, _ = run.communicate(timeout=_FORMAT_S)
            except subprocess.TimeoutExpired:
                run.kill()
                run.communicate()
                raise BrokerError(f"formatting {self._node(number)} took longer than {_FORMAT_S:g} s") from None
            if run.returncode != 0:
                raise BrokerError(f"{self._node(number)} can't be formatted (status {run.returncode}): {last_lines(output)}")

    def launch(self, number: int) -> GuardedProcess:
        program = [
            str(self._java),
            f"-Xmx{self._heap_mib}m",
            "-Djava.awt.headless=true",
            f"-Dlog4j2.configurationFile={self.path / 'log4j2.properties'}",
            *("-cp", self._classes),
            *("kafka.Kafka", str(self._node(number) / "server.properties")),
        ]
        return GuardedProcess(
            f"Apache Kafka node {number}",
            program,
            cwd=self._node(number),
            environment=java_environment(),
            log=self._node(number) / "broker.log",
            stop_signal=signal.SIGTERM,
            stop_s=_STOP_S,
            keep_open=(self._lock,),
        )

    def _node(self, number: int) -> Path:
        return self.path / f"node-{number}"

    def _start_format(self, number: int) -> subprocess.Popen[str]:
        command = [str(self._java), "-XX:TieredStopAtLevel=1", "-cp", self._classes, "kafka.tools.StorageTool", "format"]
        command += ["-t", self.cluster.cluster_id, "-c", str(self._node(number) / "server.properties"), "--ignore-formatted"]
        return subprocess.Popen(
            command,
            env=java_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _settings(self, number: int) -> dict[str, str]:
        broker, controller = self.cluster.ports[number - 1]
        replicas = self.cluster.nodes
        in_sync = min(2, replicas)
        return {
            "process.roles": "broker,controller",
            "node.id": str(number),
            # Voters by address, not by a recorded quorum: so the ports may change between two starts.
            "controller.quorum.voters": ",".join(f"{n}@{HOST}:{self.cluster.ports[n - 1][1]}" for n in self.numbers),
            "listeners": f"PLAINTEXT://{HOST}:{broker},CONTROLLER://{HOST}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{broker}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self._node(number) / "data"),
            "default.replication.factor": str(replicas),
            "min.insync.replicas": str(in_sync),
            "offsets.topic.replication.factor": str(replicas),
            "transaction.state.log.replication.factor": str(replicas),
            "transaction.state.log.min.isr": str(in_sync),
            "share.coordinator.state.topic.replication.factor": str(replicas),
            "share.coordinator.state.topic.min.isr": str(in_sync),
            # Kafka's 50 are for clusters; here each partition is files on one disk.
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.num.partitions": "4",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            "message.max.bytes": str(MESSAGE_MAX_BYTES),
        }


def _new_cluster_id() -> str:
    """As Kafka makes them: a random UUID in URL-safe base64, never one that looks like an option."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text
