"""A real `echo-produce` process on a real broker, with a real weight server, and the fake engine: how it lives and ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from consumers.policy import ControlWriter, PolicyPublisher
from echo import codec, control, topics
from echo.broker import RunningBroker
from echo.config import RunConfig
from echo.control import Grant, Heartbeat
from echo.kafka import KafkaLogAdmin, KafkaLogReader, TransactionalProducer
from echo.log import BEGINNING
from echo.run_file import save
from echo.trajectory import Trajectory, incarnation_of
from echo.weights.manifest import HostTensor
from echo.weights.spawn import WeightServerProcess
from echo.weights.store import WeightStore
from tests.conftest import ROOT
from tests.eventually import eventually

GROUP = 2


def save_tokenizer(folder: Path) -> None:
    """One token per character, 128 of them."""
    tokenizer = Tokenizer(WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex(""), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


class Swarm:
    """A run without a trainer: the test announces, grants and reads."""

    def __init__(self, run: RunConfig, folder: Path, server: WeightServerProcess) -> None:
        self.run = run
        self.run_file = folder / "run.yaml"
        save(run, self.run_file)
        self._settings = run.broker.settings
        self._names = topics.of_run(run).names
        self._writer = ControlWriter(
            TransactionalProducer(self._settings, transactional_id=run.run_id, client_id="test-trainer"), self._names.control
        )
        self._publisher = PolicyPublisher(
            run_id=run.run_id,
            store=WeightStore(run.weights.dir),
            writer=self._writer,
            server_url=server.url,
            chunk_bytes=4096,
            keep=6,
            newest=-1,
        )
        self._log = (folder / "producer.log").open("wb+")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **environment: str) -> int:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.produce_process", str(self.run_file), "--id", "p0"],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=self._log,
            stderr=self._log,
        )
        return self.process.pid

    def announce(self, grants: dict[str, Grant] | None = None) -> None:
        data = memoryview(os.urandom(20_000))
        stored = self._publisher.store(step=0, tensors=[HostTensor("w", "U8", (20_000,), data)])
        self._publisher.announce(stored, grants=lambda _: grants or {})

    def end(self) -> None:
        self._publisher.end(step=1, reason="all steps done")

    def output(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def exit_status(self) -> int:
        assert self.process is not None
        return self.process.wait(60)

    def read(self, topic: str) -> list:  # type: ignore[type-arg]
        """All records of a topic, from its beginning to its end."""
        admin = KafkaLogAdmin(self._settings, client_id="test")
        reader = KafkaLogReader(self._settings, client_id="test", max_record_bytes=2**24)
        records = []
        try:
            reader.assign({(topic, number): BEGINNING for number in range(admin.partitions(topic, 10))})
            deadline = time.monotonic() + 20
            while not reader.at_end():
                assert time.monotonic() < deadline
                records += reader.read(1000, 0.2)
        finally:
            reader.close()
        return records

    def trajectories(self) -> list[Trajectory]:
        return [codec.decode(record.value) for record in self.read(self._names.trajectories)]

    def heartbeats(self) -> list[Heartbeat]:
        return [control.decode_heartbeat(record.value, record.where) for record in self.read(self._names.heartbeats)]

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._writer.close()
        self._log.close()


@pytest.fixture
def swarm(tansu: RunningBroker, topic_prefix: str, tmp_path: Path) -> Iterator[Swarm]:
    model = tmp_path / "model"
    save_tokenizer(model)
    run = RunConfig.model_validate(
        {
            "run_id": f"run-{topic_prefix}0",
            "model": {"path": str(model)},
            "task": {"name": "fake"},
            "broker": {"settings": {"bootstrap.servers": tansu.bootstrap_servers}},
            "topics": {"prefix": topic_prefix},
            "sampling": {"group_size": GROUP, "max_tokens": 16},
            "producer": {"engine": "fake", "groups_per_call": 4, "heartbeat_s": 0.2},
            "weights": {"dir": str(tmp_path / "weights"), "port": 0, "token": "a-token-for-this-test"},
            "metrics": {"produce_port": 0},
        }
    )
    spec, admin = topics.of_run(run), KafkaLogAdmin(run.broker.settings, client_id="test")
    topics.apply(topics.plan(spec, topics.read_actual(admin, spec.names)), admin)
    with WeightServerProcess.start(run, tmp_path / "weights.log") as server:
        made = Swarm(run, tmp_path, server)
        yield made
        made.close()


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def wait_for_groups(swarm: Swarm, count: int) -> list[Trajectory]:
    def look() -> list[Trajectory]:
        assert swarm.process is None or swarm.process.poll() is None, swarm.output()
        found = swarm.trajectories()
        return found if len(found) >= count * GROUP else []

    return eventually(look, f"{count} groups in the log; {swarm.output()[-2000:]}", timeout_s=60)


def test_sigterm_ends_it_with_status_0_and_everything_acknowledged(swarm: Swarm) -> None:
    """It samples under what it pulled, takes a newer policy, and leaves nothing behind: no record, no scorer, no window."""
    pid = swarm.start()
    swarm.announce()
    me = incarnation_of(wait_for_groups(swarm, 1)[0].group_id)
    swarm.announce({me: Grant(window=20, resolved=1)})
    eventually(lambda: any(one.max_policy_version == 1 for one in swarm.trajectories()), "version 1 samples", timeout_s=30)
    scorers = children_of(pid)
    assert scorers
    os.kill(pid, signal.SIGTERM)
    assert swarm.exit_status() == 0, swarm.output()
    records = swarm.trajectories()
    last = swarm.heartbeats()[-1]
    assert last.leaving
    assert last.groups_started == last.groups_published == len(records) / GROUP
    assert last.trajectories == len(records)
    assert sorted(one.sequence_number for one in records) == list(range(len(records)))
    assert {one.reward for one in records} <= {0.0, 1.0}
    assert last.serving == 1
    assert not [child for child in scorers if is_alive(child)]


def test_the_end_of_the_run_ends_it_with_status_0(swarm: Swarm) -> None:
    swarm.start()
    swarm.announce()
    wait_for_groups(swarm, 1)
    swarm.end()
    assert swarm.exit_status() == 0, swarm.output()
    assert "all steps done" in swarm.output()


def test_kill_9_leaves_no_scorer_behind(swarm: Swarm) -> None:
    pid = swarm.start()
    swarm.announce()
    wait_for_groups(swarm, 1)
    scorers = children_of(pid)
    os.kill(pid, signal.SIGKILL)
    assert swarm.exit_status() == -signal.SIGKILL
    eventually(lambda: not [child for child in scorers if is_alive(child)], "the scorers are gone")


def test_a_heartbeat_thread_that_dies_ends_it_with_status_1_and_is_named(swarm: Swarm) -> None:
    swarm.start(KILLED_THREAD="heartbeat")
    swarm.announce()
    assert swarm.exit_status() == 1, swarm.output()
    lines = swarm.output().splitlines()
    assert lines[-1] == (
        "echo-produce: error: heartbeat died of an error in Echo itself (ZeroDivisionError: injected): see its traceback above"
    )
    assert "Traceback (most recent call last)" in swarm.output()


def test_a_task_that_gives_nothing_usable_is_one_line_and_status_1(swarm: Swarm) -> None:
    swarm.start(BROKEN_TASK="1")
    assert swarm.exit_status() == 1
    assert "Traceback" not in swarm.output()
    last = swarm.output().splitlines()[-1]
    assert last.startswith(
        "echo-produce: error: prompts ended: task count: 10 prompts in a row can't be used, the last of them is"
    )
    assert last.endswith("FileNotFoundError: [Errno 2] No such file or directory: 'shard-9.jsonl'")


def test_a_topic_that_is_missing_is_one_line_and_status_1(swarm: Swarm) -> None:
    other = swarm.run.model_copy(update={"topics": swarm.run.topics.model_copy(update={"prefix": "nowhere-"})})
    save(other, swarm.run_file)
    swarm.start()
    assert swarm.exit_status() == 1
    assert "nowhere-trajectories" in swarm.output().splitlines()[-1]
    assert "echo-topics apply" in swarm.output().splitlines()[-1]
