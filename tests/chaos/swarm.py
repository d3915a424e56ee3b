"""A small real run whose processes can be killed: broker, weight server, trainer, producers, each with its logs.

    with open_broker(choose_broker(), folder) as broker, Swarm(folder / "run", broker) as swarm:
        swarm.start_all()
        swarm.kill("trainer"); swarm.start("trainer")
        swarm.end_well()

Refuses to wait without end or to overlook a death: where a wait lasts too long, or a process ended that was not killed, it
raises with the ends of all logs.
"""

import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from echo import journal, report, topics
from echo.broker import ApacheBroker, BrokerPlan, RunningBroker, plan_broker, start_broker
from echo.config import RunConfig
from echo.errors import BrokerError
from echo.kafka import KafkaLogAdmin, KafkaLogReader
from echo.log import LogRecord
from echo.run_file import save
from tests.chaos.processes import Process, warm_up
from tests.conftest import ROOT
from tests.helpers import RUN_ID
from tests.tiny import tiny_config

T = TypeVar("T")

TRAINER, WEIGHTS = "trainer", "weights"
GROUP, GROUPS_PER_STEP, STALENESS = 4, 4, 4
DEAD_S = 2.0
# Of the trajectories, instead of eight: more groups of different producers and versions behind one another in each.
PARTITIONS = 2
VOCABULARY = 128
# Of one process. The libraries take most of it; a record that unpacks to much, and is read, some tens.
PEAK_MIB = 800.0

_LOOK_S = 0.02
_MEASURE_EVERY_S = 0.5
_READ_BACK_S = 60.0
# After kill -9 a single node waits until its own former session has ended: 9 s by default.
_APACHE_SETTINGS = {"broker.session.timeout.ms": "1500", "broker.heartbeat.interval.ms": "300"}


class ChaosError(Exception):
    """A process ended that was not killed, or ended otherwise than it had to; the message holds the ends of all logs."""


class HungError(ChaosError):
    """The run did not go on, or did not end, in time."""


def choose_broker() -> BrokerPlan:
    """Apache Kafka where a home is there (KAFKA_HOME or ../shared/kafka), else Tansu. Raises BrokerError."""
    home = os.environ.get("KAFKA_HOME") or str(ROOT.parent / "shared" / "kafka")
    try:
        return plan_broker(environ={**os.environ, "KAFKA_HOME": home})
    except BrokerError:
        return plan_broker(environ={})


@contextmanager
def open_broker(plan: BrokerPlan, folder: Path) -> Iterator[RunningBroker]:
    """A broker of our own: it may be killed."""
    overrides = _APACHE_SETTINGS if plan.kind == "apache" else None
    with start_broker(plan, data_dir=folder / "broker", heap_mib=384, overrides=overrides) as broker:
        yield broker


def save_model(folder: Path) -> str:
    """A tiny Qwen3 with random weights and a tokenizer of one token per ASCII character."""
    tokenizer = Tokenizer(WordLevel({chr(code): code for code in range(VOCABULARY)}, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex(""), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = tiny_config(vocab_size=VOCABULARY, max_position_embeddings=128, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


class Swarm:
    """The processes of one run. patience_s: the longest that any single wait may take, restarts and a busy machine included.

    keys: of the run file, over what is usual here, by dotted name. small_disk: a folder on a file system of its own, which may
    get full: checkpoints and weights lie there.
    """

    def __init__(
        self,
        folder: Path,
        broker: RunningBroker,
        *,
        producers: int = 2,
        patience_s: float = 90.0,
        keys: Mapping[str, Any] | None = None,
        small_disk: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.broker = broker
        self.producers = tuple(f"p{number}" for number in range(producers))
        self._patience_s = patience_s
        self._folder = folder
        self.small_disk = small_disk
        self._metrics_ports = {role: free_port() for role in (TRAINER, *self.producers)}
        self.peak_mib: dict[str, float] = {}
        self._measured_at = 0.0
        self._lives: dict[str, int] = {}
        self._overrides: dict[str, tuple[str, ...]] = {}
        self._alive: dict[str, Process] = {}
        self._processes: list[Process] = []
        self._to_die: set[Process] = set()
        self._trainer_since = 0.0
        self.events: list[str] = []
        self._topics = folder / "topics.yaml"
        self._topics.write_text((ROOT / "topics.yaml").read_text().replace("partitions: 8", f"partitions: {PARTITIONS}"))
        self.run = self._make_run(keys or {})
        self.run_file = folder / "run.yaml"
        save(self.run, self.run_file)
        self.notes = folder / "acknowledged.jsonl"
        self.notes.touch()
        self.spec = topics.of_run(self.run)
        self.admin = KafkaLogAdmin(self.run.broker.settings, client_id="chaos")
        topics.apply(topics.plan(self.spec, topics.read_actual(self.admin, self.spec.names)), self.admin)
        warm_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()

    # Processes.

    def start_all(self) -> None:
        for role in (WEIGHTS, TRAINER, *self.producers):
            self.start(role)

    def start(self, role: str, *overrides: str, die_at: str | int | None = None) -> None:
        """A new life of a role. die_at: as its `--die-at` takes it."""
        assert role not in self._alive, f"{role} runs"
        self._lives[role] = self._lives.get(role, 0) + 1
        self._overrides[role] = overrides
        name = f"{role}-{self._lives[role]}"
        arguments = [] if die_at is None else ["--die-at", str(die_at)]
        if role in self.producers:
            port = f"metrics.produce_port={self._metrics_ports[role]}"
            arguments += ["--notes", str(self.notes), str(self.run_file), port, *overrides, "--id", role]
            module = "producer_process"
        elif role == TRAINER:
            arguments += [str(self.run_file), f"metrics.train_port={self._metrics_ports[role]}", *overrides]
            module = "trainer_process"
            self._trainer_since = time.time()
        else:
            arguments += [str(self.run_file)]
            module = "weights_process"
        self.say(f"start {name} {' '.join(overrides)} {'' if die_at is None else f'to die at {die_at}'}")
        process = Process(name, f"tests.chaos.{module}", arguments, log_path=self._folder / f"{name}.log")
        self._alive[role] = process
        self._processes.append(process)
        if die_at is not None:
            self._to_die.add(process)

    def kill(self, role: str) -> None:
        """kill -9."""
        self.say(f"kill -9 {role}")
        self._alive.pop(role).kill()

    def send(self, role: str, number: signal.Signals) -> None:
        self.say(f"{number.name} to {role}")
        self._alive[role].send(number)

    def await_death(self, role: str) -> str:
        """Wait until a process has killed itself; where it did."""
        process = self._alive[role]
        self.until(lambda: process.poll() is not None, f"{role} dies by its own hand")
        del self._alive[role]
        told = [line for line in process.log_path.read_text(errors="replace").splitlines() if line.startswith("DIES ")]
        if process.poll() != -signal.SIGKILL or not told:
            raise ChaosError(self._with_logs(f"{role} was to kill itself, and ended with status {process.poll()}"))
        self.say(f"{role} died {told[0]}")
        return told[0].removeprefix("DIES ")

    def restart_broker(self) -> None:
        """kill -9 of the single node, and a new start on its data."""
        assert isinstance(self.broker, ApacheBroker)
        self.say("kill -9 the broker")
        self.broker.kill_node(1)
        self.broker.restart_node(1)
        self.say("the broker is back")

    def stop_trainer(self) -> None:
        """A planned stop: it must end with status 0."""
        self.send(TRAINER, signal.SIGTERM)
        self._await_end([TRAINER])

    def end_well(self, *, more_steps: int = 4) -> None:
        """A planned stop of the trainer, its last life with some steps left to do, and everybody ends with status 0."""
        if TRAINER in self._alive:
            self.await_training()
            self.stop_trainer()
        self.start(TRAINER, f"learner.steps={self.step() + more_steps}")
        self.await_end()

    def await_end(self) -> None:
        """Trainer and producers end by themselves with status 0, and the weight server when it is asked to."""
        self._await_end([TRAINER, *self.producers])
        self.send(WEIGHTS, signal.SIGTERM)
        self._await_end([WEIGHTS])

    def _await_end(self, roles: Iterable[str]) -> None:
        wanted = [self._alive[role] for role in roles]
        self.until(
            lambda: all(process.poll() == 0 for process in wanted),
            f"{', '.join(process.name for process in wanted)} end with status 0",
        )
        for role in roles:
            self.say(f"{role} ended with status 0")
            del self._alive[role]

    # Looking.

    def until(self, condition: Callable[[], T], what: str) -> T:
        """What `condition` gives once it is true. Raises ChaosError where that takes too long, or a process ended of itself."""
        deadline = time.monotonic() + self._patience_s
        while True:
            value = condition()
            if value:
                return value
            self.look()
            if time.monotonic() > deadline:
                raise HungError(self._with_logs(f"hung: not within {self._patience_s:g} s: {what}"))
            time.sleep(_LOOK_S)

    def look(self) -> None:
        """Raise ChaosError where a process has ended that was not killed or meant to kill itself, other than well.

        One that the full disk ended is started again, as its supervisor would.
        """
        self.broker.check()
        self._measure()
        for role, process in list(self._alive.items()):
            if not process.poll() or process in self._to_die:
                continue
            # Its error names a file there, or the folder.
            if self.small_disk is None or process.poll() != 1 or str(self.small_disk) not in process.tail(1):
                raise ChaosError(self._with_logs(f"{process.name} ended with status {process.poll()}"))
            self.say(f"{process.name} ended of the full disk")
            del self._alive[role]
            self.start(role, *self._overrides[role])

    def _measure(self) -> None:
        """Now and then: the largest resident memory of each role so far."""
        if time.monotonic() - self._measured_at < _MEASURE_EVERY_S:
            return
        self._measured_at = time.monotonic()
        for role, process in self._alive.items():
            kind = "producers" if role in self.producers else role
            self.peak_mib[kind] = max(self.peak_mib.get(kind, 0.0), process.resident_mib())

    def grown(self) -> list[str]:
        """The roles that took more memory than a run of this size may."""
        return [f"{role} took {peak:.0f} MiB" for role, peak in self.peak_mib.items() if peak > PEAK_MIB]

    def ports(self) -> list[int]:
        """Every port on which a process of the run listens."""
        return [self.run.weights.port, *self._metrics_ports.values()]

    def live_on(self, seconds: float) -> None:
        """Let the run go on for so long: how long it lives is the scenario, not a wait for something."""
        until = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= until, "the time is over")

    def await_training(self, steps: int = 1) -> None:
        """Wait until the trainer's present life has done this many steps."""
        began = self._trainer_since
        self.until(
            lambda: sum(line.get("time", 0.0) > began for line in self.journal()) >= steps, f"{steps} steps of the trainer"
        )

    def journal(self) -> list[dict[str, Any]]:
        path = self.run.checkpoint.dir / journal.FILE_NAME
        return list(journal.read(path)) if path.exists() else []

    def step(self) -> int:
        """The newest checkpoint's step."""
        return max((int(path.name[5:12]) for path in self.run.checkpoint.dir.glob("step-*")), default=0)

    def acknowledged(self) -> list[tuple[str, int, int]]:
        """What the broker acknowledged to producers: (trajectory id, partition, offset)."""
        # A kill may cut the last line of a life short; then the producer did not hear of the acknowledgement either.
        lines = self.notes.read_text().splitlines()
        return [tuple(json.loads(line)) for line in lines if line.endswith("]")]

    def records(self, topic: str) -> list[LogRecord]:
        """A topic from its beginning to its end."""
        reader = KafkaLogReader(
            self.run.broker.settings,
            client_id="chaos",
            max_record_bytes=self.run.limits.record_bytes,
            committed=topic == self.spec.names.control,
        )
        try:
            partitions = self.admin.partitions(topic, 20.0)
            return list(report.read_topic(reader, topic, partitions, deadline_s=_READ_BACK_S))
        finally:
            reader.close()

    def say(self, event: str) -> None:
        self.events.append(f"{time.strftime('%H:%M:%S')} {event.strip()}")
        with (self._folder / "events.log").open("a") as out:
            out.write(self.events[-1] + "\n")

    def _with_logs(self, what: str) -> str:
        tails = [process.tail() for process in self._processes if process in self._alive.values()]
        return "\n".join([what, "--- events", *self.events[-30:], *tails])

    def _make_run(self, keys: Mapping[str, Any]) -> RunConfig:
        name = f"chaos-{secrets.token_hex(4)}"
        disk = self.small_disk or self._folder
        values: dict[str, Any] = {
            # Poison names it, too.
            "run_id": RUN_ID,
            "max_staleness": STALENESS,
            "model": {"path": save_model(self._folder / "model")},
            "task": {"name": "count_on"},
            "broker": {
                "settings": {
                    "bootstrap.servers": self.broker.bootstrap_servers,
                    # New partitions are used within a life.
                    "topic.metadata.refresh.interval.ms": 1000,
                }
            },
            "topics": {"file": str(self._topics), "prefix": f"{name}-"},
            "sampling": {"group_size": GROUP, "max_tokens": 16},
            "producer": {"engine": "fake", "groups_per_call": 2, "heartbeat_s": 0.3},
            "batch": {"groups_per_step": GROUPS_PER_STEP, "group_deadline_s": 2.0, "producer_dead_s": DEAD_S},
            "learner": {"steps": 1_000_000, "lr": 1e-3, "threads": 1},
            "checkpoint": {"dir": str(disk / "checkpoints"), "every": 2},
            "weights": {
                "dir": str(disk / "weights"),
                "serve": False,
                "port": free_port(),
                "peers": True,
                "chunk_bytes": 8192,
                "read_timeout_s": 5.0,
            },
            "limits": {"waiting_s": 5.0},
        }
        for key, value in keys.items():
            section, _, name = key.rpartition(".")
            (values[section] if section else values)[name] = value
        return RunConfig.model_validate(values)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
