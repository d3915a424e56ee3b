"""A run as anybody starts it: broker, weight server, trainer and producers, each a process, over a real log.

    with start(run, folder) as running:
        running.finish(limit_s=300)

Refuses to outlive its block, to wait without end, and to go on after a process that failed: it raises with the end of its log.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from echo import journal, report, topics
from echo.broker import plan_broker, start_broker
from echo.broker.process import free_ports
from echo.config import RunConfig
from echo.control import Heartbeat
from echo.kafka import KafkaLogAdmin, KafkaLogReader
from echo.process import Child, stop_children
from echo.run_file import save
from echo.weights.client import WeightClient
from echo.weights.spawn import WeightServerProcess
from echo.weights.store import WeightStore
from echo.weights.urls import manifest_url
from producers.engines.base import Policy

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
_LOOK_S = 0.1
_STOP_S = 20.0
_READ_BACK_S = 60.0


class ProcessError(Exception):
    """A process of an experiment failed or did not end; the message holds the end of its log."""


class Commands(NamedTuple):
    """Modules that are run, with the options that come before the run file."""

    trainer: Sequence[str] = ("consumers.cli",)
    producer: Sequence[str] = ("producers.cli",)


REAL = Commands()


class RunningProcesses:
    """What `start` yields. run: as its processes read it."""

    def __init__(self, run: RunConfig, server: WeightServerProcess, children: Sequence[Child]) -> None:
        self.run = run
        self._server = server
        self._children = children

    def finish(self, *, limit_s: float) -> None:
        """Wait until the trainer and its producers have ended well."""
        deadline = time.monotonic() + limit_s
        left = list(self._children)
        while left:
            if time.monotonic() > deadline:
                raise ProcessError(f"{left[0].name} did not end within {limit_s:g} s:\n{left[0].log_tail()}")
            if left[0].wait(_LOOK_S) is not None:
                left.pop(0)
            for child in self._children:
                if child.poll():
                    raise ProcessError(f"{child.name} ended with status {child.poll()}:\n{child.log_tail()}")

    def steps(self) -> list[dict[str, Any]]:
        """The journal's line of every step."""
        lines = journal.read(self.run.checkpoint.dir / journal.FILE_NAME)
        return [dict(line) for line in lines if "reward_mean" in line]

    def versions(self) -> list[int]:
        """What the store holds of this run."""
        return WeightStore(self.run.weights.dir).versions(self.run.run_id)

    def policy(self, version: int) -> Policy:
        """A published version, pulled as a producer does."""
        _, digest = WeightStore(self.run.weights.dir).read_manifest(self.run.run_id, version)
        client = WeightClient(token=None, connect_timeout_s=5.0, read_timeout_s=30.0)
        pulled = client.pull(
            [manifest_url(self._server.url, self.run.run_id, version)],
            run_id=self.run.run_id,
            version=version,
            manifest_digest=digest,
            deadline_s=60.0,
        )
        return Policy(version, pulled.tensors)

    def heartbeats(self) -> list[Heartbeat]:
        """The last one of each producer."""
        topic = topics.of_run(self.run).names.heartbeats
        settings, limit = self.run.broker.settings, self.run.broker.timeout_s
        partitions = KafkaLogAdmin(settings, client_id="experiment").partitions(topic, limit)
        reader = KafkaLogReader(settings, client_id="experiment", max_record_bytes=self.run.limits.record_bytes)
        try:
            records = report.read_topic(reader, topic, partitions, deadline_s=_READ_BACK_S)
            return list(report.last_heartbeats(self.run.run_id, records).values())
        finally:
            reader.close()


@contextmanager
def start(run: RunConfig, folder: Path, *, producers: int = 1, commands: Commands = REAL) -> Iterator[RunningProcesses]:
    """Start everything on a Tansu of its own; whatever still runs at the end of the block is stopped.

    What they write goes into a new folder in `folder`, so that an experiment that broke off can be done again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{run.run_id}-", dir=folder))
    with ExitStack() as opened:
        broker = opened.enter_context(start_broker(plan_broker(environ={}), data_dir=folder / "broker"))
        train_port, weights_port, *produce_ports = free_ports(2 + producers)
        data = run.model_dump(mode="json")
        data["broker"]["settings"] = {"bootstrap.servers": broker.bootstrap_servers}
        data["checkpoint"]["dir"] = str(folder / "checkpoints")
        data["weights"] |= {"dir": str(folder / "weights"), "port": weights_port, "serve": False}
        data["metrics"]["train_port"] = train_port
        run = RunConfig.model_validate(data)
        run_file = folder / "run.yaml"
        save(run, run_file)
        spec = topics.of_run(run)
        admin = KafkaLogAdmin(run.broker.settings, client_id="experiment")
        topics.apply(
            topics.plan(spec, topics.read_actual(admin, spec.names, run.broker.timeout_s)), admin, run.broker.timeout_s
        )
        server = WeightServerProcess.start(run, folder / "weights.log")
        opened.callback(server.stop)
        children: list[Child] = []
        opened.callback(lambda: stop_children(children, timeout_s=_STOP_S))

        def child(name: str, command: Sequence[str], *arguments: str) -> None:
            argv = [sys.executable, "-m", *command, str(run_file), *arguments]
            children.append(Child(name, argv, log_path=folder / f"{name}.log", env={**os.environ, **_ENVIRONMENT}))

        child("trainer", commands.trainer)
        for number, port in enumerate(produce_ports):
            child(f"producer-{number}", commands.producer, f"metrics.produce_port={port}", "--id", f"p{number}")
        yield RunningProcesses(run, server, children)
