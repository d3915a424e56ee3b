"""echo-train on two ranks over a real broker: its end, a planned stop, and a killed rank, after which one process goes on."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState
from confluent_kafka import Producer
from prometheus_client import CollectorRegistry

from consumers.wiring import kafka_clients, trainer_of
from echo import codec, journal, topics
from echo.broker import RunningBroker
from echo.config import RunConfig
from echo.kafka.admin import KafkaLogAdmin
from echo.metrics import TrainerMetrics
from echo.process import StopSignal
from echo.run_file import save
from tests.chaos.processes import Process, warm_up
from tests.eventually import eventually
from tests.helpers import RUN_ID, make_group
from tests.parallel.launch import free_port, launch
from tests.unit.test_learner import make_model

GROUP = 3
GROUPS_PER_STEP = 2
PATIENCE_S = 100
"""For what takes seconds, on a machine that others use, too."""
GONE_WITHIN_S = 60
"""The promise."""


@pytest.fixture
def run(tansu: RunningBroker, topic_prefix: str, tmp_path: Path) -> Iterator[RunConfig]:
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "max_staleness": 8,
        "model": {"path": make_model(tmp_path / "model")},
        "broker": {"settings": {"bootstrap.servers": tansu.bootstrap_servers}},
        "topics": {"prefix": topic_prefix},
        "batch": {"groups_per_step": GROUPS_PER_STEP},
        "learner": {"steps": 2, "lr": 1e-3, "threads": 1, "sharding": "full"},
        "checkpoint": {"dir": tmp_path / "checkpoints", "every": 1},
        "weights": {"dir": tmp_path / "weights", "serve": False, "url": "http://127.0.0.1:1"},
        "metrics": {"train_port": 0},
    }
    made = RunConfig.model_validate(values)
    spec = topics.of_run(made)
    admin = KafkaLogAdmin(made.broker.settings, client_id="ranks")
    topics.apply(topics.plan(spec, topics.read_actual(admin, spec.names)), admin)
    save(made, tmp_path / "run.yaml")
    threads = torch.get_num_threads()
    yield made
    torch.set_num_threads(threads)


def sample(run: RunConfig, numbers: range) -> None:
    """What producers would publish."""
    producer = Producer({"bootstrap.servers": run.broker.settings["bootstrap.servers"], "acks": "all"})
    for number in numbers:
        for member in make_group(GROUP, number=number).members:
            key, headers, value = codec.encode(member.trajectory)
            producer.produce(topics.of_run(run).names.trajectories, key=key, value=value, headers=headers)
    assert producer.flush(30) == 0


def steps(run: RunConfig) -> list[int]:
    path = run.checkpoint.dir / journal.FILE_NAME
    return [line["step"] for line in journal.read(path) if "batch" in line] if path.exists() else []


def ranks_of(launcher: int) -> dict[int, psutil.Process]:
    return {int(child.environ()["RANK"]): child for child in psutil.Process(launcher).children() if child.environ().get("RANK")}


def ranks_by_fork(file: Path, *overrides: str) -> list[Process]:
    """echo-train as two ranks, each begun in no time, and stopped as a launcher would."""
    warm_up()
    port = str(free_port())
    return [
        Process(
            f"rank {rank}",
            "tests.parallel.rank_process",
            [str(rank), port, str(file), *overrides],
            log_path=file.with_name(f"{rank}.log"),
        )
        for rank in (0, 1)
    ]


def test_two_ranks_train_to_the_end_or_to_a_planned_stop(run: RunConfig, tmp_path: Path) -> None:
    """Both end with status 0: after the last step, and asked to, with a checkpoint of what was done. Sharded adapters on a base
    that is published first: the commands that ranks gather by follow one another.
    """
    adapters = "learner.lora={rank: 2, publish: adapter}"
    sample(run, range(2 * GROUPS_PER_STEP))
    pair = ranks_by_fork(tmp_path / "run.yaml", adapters)
    assert [rank.wait(PATIENCE_S) for rank in pair] == [0, 0], [rank.tail() for rank in pair]
    assert "run finished" in pair[0].log_path.read_text()

    sample(run, range(2 * GROUPS_PER_STEP, 3 * GROUPS_PER_STEP))
    pair = ranks_by_fork(tmp_path / "run.yaml", adapters, "learner.steps=4", "checkpoint.every=10")
    eventually(lambda: steps(run) == [1, 2, 3], "a third step", timeout_s=PATIENCE_S)
    for rank in reversed(pair):
        rank.send(signal.SIGTERM)
    assert [rank.wait(PATIENCE_S) for rank in pair] == [0, 0], [rank.tail() for rank in pair]
    assert "stopped as asked" in pair[0].log_path.read_text()
    assert (run.checkpoint.dir / "step-0000003").is_dir()


def test_a_rank_that_is_killed_ends_the_job_and_one_process_goes_on(run: RunConfig, tmp_path: Path) -> None:
    """A kill -9 while rank 0 waits for records: within a minute nobody is left, and the launcher says that it failed."""
    file, log_path = str(tmp_path / "run.yaml"), tmp_path / "job.log"
    sample(run, range(GROUPS_PER_STEP))
    job = launch("consumers.cli", file, log_path=log_path)
    try:
        # Saved, so that what one process does next begins behind it.
        eventually((run.checkpoint.dir / "step-0000001").is_dir, "a first step", timeout_s=PATIENCE_S)
        ranks = ranks_of(job.pid)
        assert ranks.keys() == {0, 1}
        began = time.monotonic()
        ranks[1].send_signal(signal.SIGKILL)
        assert job.wait(GONE_WITHIN_S) not in (0, None)
        gone, left = psutil.wait_procs(ranks.values(), timeout=max(0.0, GONE_WITHIN_S - (time.monotonic() - began)))
        assert (len(gone), left) == (2, [])
    finally:
        job.kill()
        job.wait()

    sample(run, range(GROUPS_PER_STEP, 2 * GROUPS_PER_STEP))
    AcceleratorState._reset_state(True)
    stop = StopSignal()
    metrics = TrainerMetrics(RUN_ID, CollectorRegistry())
    with trainer_of(run, kafka_clients(run, stop=stop), metrics=metrics, stop=stop) as trainer:
        trainer.run()
    lines = [line for line in journal.read(run.checkpoint.dir / journal.FILE_NAME) if "batch" in line]
    assert [(line["step"], line["ranks"]) for line in lines] == [(1, 2), (2, 1)]
    trained = [name for line in lines for name, *_ in line["batch"]]
    assert len(set(trained)) == len(trained) == 2 * GROUPS_PER_STEP
