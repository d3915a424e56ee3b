"""Tansu, the embedded development broker: started so that its surprises can't hurt, and watched so that its limits are said.

Refuses to restart it: its records died with it, and whoever reads on would read another log under the same address.
"""

import secrets
import signal
from pathlib import Path

import structlog

from echo.background import Background
from echo.broker.plan import BrokerPlan
from echo.broker.process import HOST, GuardedProcess, PortTaken, free_ports, taken, wait_ready
from echo.broker.running import RunningBroker
from echo.errors import BrokerError
from echo.kafka import KafkaLogAdmin

log = structlog.get_logger("broker")

_START_TRIES = 5
_STOP_S = 5.0
_WATCH_S = 5.0
_ASK_S = 10.0

WARN_BYTES = 2**30
LIMIT_BYTES = 4 * 2**30
# Readers at the tail stall at about 100,000 stored batches in a partition. Batches can't be counted from outside; there are
# at most as many as records.
WARN_RECORDS = 50_000

_REMEDY = "use Apache Kafka: bootstrap.servers in the run file, or an embedded one with --apache HOME or KAFKA_HOME"


class TansuBroker(RunningBroker):
    """See `RunningBroker`. A thread of its own watches the broker's memory and the size of its partitions."""

    def __init__(
        self,
        plan: BrokerPlan,
        bootstrap_servers: str,
        cluster_id: str,
        process: GuardedProcess,
        *,
        limit_bytes: int,
        watch_s: float,
    ) -> None:
        super().__init__(plan, bootstrap_servers, cluster_id)
        self._process = process
        self._limit_bytes = limit_bytes
        self._watch_s = watch_s
        self._failed: BrokerError | None = None
        self._said: set[object] = set()
        self._watching = Background("tansu-watch", self._watch)
        self._watching.start()

    @property
    def nodes(self) -> dict[int, int]:
        return {1: self._process.pid} if self._process.running() else {}

    def check(self) -> None:
        if self._failed is not None:
            raise self._failed
        if not self._watching.stopping.is_set() and not self._process.running():
            raise BrokerError(
                f"the embedded broker has ended with status {self._process.status()}, and its records with it: start the run "
                f"anew with a new run_id; for records that survive, {_REMEDY}. Its last words: {self._process.last_words()}"
            )
        self._watching.check()

    def stop(self) -> None:
        self._watching.stopping.set()
        self._process.stop()
        self._watching.stop()

    def _watch(self) -> None:
        admin = KafkaLogAdmin({"bootstrap.servers": self.bootstrap_servers}, client_id="echo-broker-watch")
        while not self._watching.stopping.wait(self._watch_s) and self._process.running():
            self._watch_memory()
            if self._failed is None:
                self._watch_partitions(admin)

    def _watch_memory(self) -> None:
        held = resident_bytes(self._process.pid)
        if held is None:
            return
        if held >= self._limit_bytes:
            self._failed = BrokerError(
                f"the embedded broker was stopped: it held {_gib(held)} GiB in memory, its limit is {_gib(self._limit_bytes)} "
                f"GiB, and it never deletes anything. For a run of this size {_REMEDY}"
            )
            log.error(str(self._failed))
            self._process.stop()
        elif held >= WARN_BYTES and "memory" not in self._said:
            self._said.add("memory")
            log.warning(
                f"the embedded broker holds {_gib(held)} GiB in memory, deletes nothing and will be stopped at "
                f"{_gib(self._limit_bytes)} GiB: for longer runs {_REMEDY}"
            )

    def _watch_partitions(self, admin: KafkaLogAdmin) -> None:
        try:
            ends = admin.ends(_ASK_S)
        except BrokerError as error:
            if not self._watching.stopping.is_set():
                log.warning("the embedded broker does not tell its partitions", error=str(error))
            return
        for partition, end in ends.items():
            if end >= WARN_RECORDS and partition not in self._said:
                self._said.add(partition)
                log.warning(
                    f"{partition[0]}[{partition[1]}] holds {end} records in the embedded broker; at about 100,000 batches its "
                    f"readers stall: for longer runs {_REMEDY}"
                )


def start_tansu(
    plan: BrokerPlan, *, data_dir: Path, port: int, ready_s: float, limit_bytes: int = LIMIT_BYTES, watch_s: float = _WATCH_S
) -> TansuBroker:
    """Start Tansu on a free port of the loopback interface (or on `port`), with a cluster id of its own.

    data_dir gets the log and an empty working folder. Raises BrokerError if it isn't ready in time.
    """
    assert plan.binary is not None
    if port and taken([port]):
        raise BrokerError(f"port {port} of {HOST} is taken: stop what listens there, or leave the port to the broker")
    folder = data_dir / "tansu"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Tansu reads the first .env at or above its working folder: an empty one ends the search.
        (folder / ".env").write_bytes(b"")
    except OSError as error:
        raise BrokerError(f"data folder {data_dir}: {error.strerror}: choose another one") from None
    for attempt in range(1, _START_TRIES + 1):
        number = port or free_ports(1)[0]
        cluster_id = f"emb-{secrets.token_hex(8)}"
        process = _launch(plan.binary, folder, data_dir / "tansu.log", number, cluster_id)
        servers = f"{HOST}:{number}"
        try:
            wait_ready(servers, cluster_id, nodes=1, processes=lambda: [process], timeout_s=ready_s)  # noqa: B023
        except PortTaken:
            process.stop()
            if port or attempt == _START_TRIES:
                raise
            continue
        except BaseException:
            process.stop()
            raise
        return TansuBroker(plan, servers, cluster_id, process, limit_bytes=limit_bytes, watch_s=watch_s)
    raise AssertionError("unreachable")


def _launch(binary: Path, folder: Path, log_file: Path, port: int, cluster_id: str) -> GuardedProcess:
    # Every flag is given: the defaults listen on all interfaces, and what is not given is taken from the environment.
    address = f"tcp://{HOST}:{port}"
    program = [
        str(binary),
        "broker",
        *("--cluster-id", cluster_id),
        *("--listener-url", address),
        *("--advertised-listener-url", address),
        *("--storage-engine", "memory://tansu/"),
    ]
    return GuardedProcess("Tansu", program, cwd=folder, environment={}, log=log_file, stop_signal=signal.SIGINT, stop_s=_STOP_S)


def resident_bytes(pid: int) -> int | None:
    """Memory of a process; None where the system does not tell (not Linux), or the process is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f}"
