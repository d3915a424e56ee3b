"""The trainer's loop on a log in memory, with a real learner: what is trained, checkpointed, announced, and said."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from consumers.train import Trainer
from consumers.wiring import Clients, trainer_of
from echo import codec, control, journal, report
from echo.config import RunConfig
from echo.control import Announcement, EndOfRun, Progress
from echo.errors import CheckpointError, FencedError, TrainingError
from echo.metrics import TrainerMetrics
from echo.process import StopSignal
from echo.topic_spec import TopicNames
from tests.fakes.log import FakeAdmin, FakeGroupOffsets, FakeLog, FakeProducer, FakeReader, FakeTransactions
from tests.helpers import RUN_ID, full_disk, make_group, make_trajectory
from tests.unit.test_learner import make_model

NAMES = TopicNames.with_prefix("")
GROUP = 4


pytestmark = pytest.mark.usefixtures("own_process")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


class Cluster:
    """A log in memory with Echo's topics, and the clients that open it."""

    def __init__(self, partitions: int = 2) -> None:
        self.log = FakeLog(markers=True)
        self.log.create_topic(NAMES.trajectories, partitions)
        for name in (NAMES.control, NAMES.heartbeats, NAMES.dead_letter, NAMES.requests):
            self.log.create_topic(name)
        self.clients = Clients(
            cluster_id=self.log.cluster_id,
            topics=NAMES,
            topic_states=FakeAdmin(self.log).topics,
            open_reader=lambda: FakeReader(self.log),
            open_committed=lambda: FakeReader(self.log),
            open_dead_letters=lambda: FakeProducer(self.log),
            open_control=lambda: FakeTransactions(self.log, transactional_id=RUN_ID),
            open_shown=lambda: FakeGroupOffsets(self.log, group=f"echo-{RUN_ID}"),
        )

    def sample(self, numbers: range, version: int = 0, **fields: Any) -> None:
        """What producers would publish: one group per number."""
        with self.log.changed:
            for number in numbers:
                for member in make_group(GROUP, number=number, policy_version=version, **fields).members:
                    key, headers, value = codec.encode(member.trajectory)
                    self.log.append(NAMES.trajectories, key, value, headers)

    def foreign(self, number: int) -> None:
        """A record of another run, in the partition that the number's group goes to."""
        _, headers, value = codec.encode(make_trajectory(run_id="other"))
        with self.log.changed:
            self.log.append(NAMES.trajectories, make_group(1, number=number).group_id.encode(), value, headers)

    def part_of_a_group(self, number: int, **fields: Any) -> None:
        """The first member of a group whose others never come."""
        key, headers, value = codec.encode(
            make_group(GROUP, number=number, members=[fields, *[{}] * (GROUP - 1)]).members[0].trajectory
        )
        with self.log.changed:
            self.log.append(NAMES.trajectories, key, value, headers)

    def messages(self) -> list[control.ControlMessage]:
        return [control.decode_control(record.value, record.where) for record in self.log.records(NAMES.control)]

    def counts(self, run: RunConfig) -> report.Counts:
        lines = journal.read(run.checkpoint.dir / journal.FILE_NAME)
        return report.count(
            RUN_ID,
            self.log.records(NAMES.trajectories),
            self.log.records(NAMES.dead_letter),
            report.fates(lines),
        )


def make_run(model: str, folder: Path, *, steps: int, **sections: dict[str, Any]) -> RunConfig:
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "model": {"path": model},
        "max_staleness": 8,
        "batch": {"groups_per_step": 2},
        "learner": {"steps": steps, "lr": 1e-3, "threads": 1},
        "checkpoint": {"dir": folder / "checkpoints", "every": 2},
        "weights": {"dir": folder / "weights", "serve": False, "url": "http://127.0.0.1:1"},
        "limits": {"waiting_s": 0.01},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return RunConfig.model_validate(values)


def train(run: RunConfig, cluster: Cluster, stop: StopSignal | None = None) -> Trainer:
    metrics = TrainerMetrics(RUN_ID, CollectorRegistry())
    with trainer_of(run, cluster.clients, metrics=metrics, stop=stop or StopSignal()) as trainer:
        trainer.run()
    return trainer


def test_a_run_trains_announces_and_ends(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.sample(range(7))
    run = make_run(model_path, tmp_path, steps=3)
    train(run, cluster)
    announced = [message for message in cluster.messages() if isinstance(message, Announcement)]
    assert [(message.version, message.step) for message in announced] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert isinstance(cluster.messages()[-1], EndOfRun)
    counts = cluster.counts(run)
    assert (counts.produced, counts.trained, counts.pending) == (7 * GROUP, 6 * GROUP, GROUP)
    assert counts.staleness_max == 2


def test_a_resumed_run_trains_the_rest_and_nothing_twice(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.sample(range(5))
    train(make_run(model_path, tmp_path, steps=2), cluster)
    cluster.sample(range(5, 8))
    run = make_run(model_path, tmp_path, steps=4)
    train(run, cluster)
    counts = cluster.counts(run)
    assert (counts.produced, counts.trained, counts.pending) == (8 * GROUP, 8 * GROUP, 0)
    lines = [line for line in journal.read(run.checkpoint.dir / journal.FILE_NAME) if "batch" in line]
    trained = [group[0] for line in lines for group in line["batch"]]
    assert len(trained) == len(set(trained)) == 8
    versions = [message.version for message in cluster.messages() if isinstance(message, Announcement)]
    # 0, 1, 2 of the first life; the restored policy is published anew as 3.
    assert versions == [0, 1, 2, 3, 4, 5]


def test_steps_after_the_checkpoint_are_done_again_after_a_crash(model_path: str, tmp_path: Path) -> None:
    """Step 3 was journaled and announced but not checkpointed: its records are trained again, once, in the new lineage."""
    cluster = Cluster()
    cluster.sample(range(8))
    run = make_run(model_path, tmp_path, steps=3, checkpoint={"every": 2})
    with trainer_of(run, cluster.clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=StopSignal()) as trainer:
        trainer._checkpoint, kept = lambda: kept() if trainer.step == 2 else None, trainer._checkpoint  # type: ignore[method-assign]
        trainer.run()
    assert cluster.counts(run).trained == 6 * GROUP
    run = make_run(model_path, tmp_path, steps=4)
    train(run, cluster)
    assert cluster.counts(run) == report.Counts(8 * GROUP, 8 * GROUP, {}, 0, 0, 5)


@pytest.mark.parametrize("what", ["journal", "checkpoint"])
def test_a_full_disk_ends_the_trainer_with_one_error_and_a_restart_does_the_rest(
    model_path: str, tmp_path: Path, what: str
) -> None:
    """Step 3's line, or the checkpoint after step 4, finds the disk full. Later there is room again."""
    cluster = Cluster()
    cluster.sample(range(10))
    run = make_run(model_path, tmp_path, steps=5)
    metrics = TrainerMetrics(RUN_ID, CollectorRegistry())
    with trainer_of(run, cluster.clients, metrics=metrics, stop=StopSignal()) as trainer:
        append, save = trainer._journal.append, trainer._checkpoints.save

        def append_full(line: Any) -> None:
            with full_disk(trainer._journal.path.stat().st_size + 100) if trainer.step == 3 else nullcontext():
                append(line)

        def save_full(step: int, *arguments: Any, **options: Any) -> Any:
            with full_disk(1000) if step == 4 else nullcontext():
                return save(step, *arguments, **options)

        if what == "journal":
            trainer._journal.append = append_full  # type: ignore[method-assign]
        else:
            trainer._checkpoints.save = save_full  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match=r"can't be written: .*free space on its disk"):
            trainer.run()
    list(journal.read(run.checkpoint.dir / journal.FILE_NAME))
    train(run, cluster)
    counts = cluster.counts(run)
    assert (counts.produced, counts.trained, counts.pending) == (10 * GROUP, 10 * GROUP, 0)


def test_a_second_trainer_fences_the_first(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.sample(range(4))
    first = make_run(model_path, tmp_path / "a", steps=2)
    with trainer_of(first, cluster.clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=StopSignal()) as trainer:
        train(make_run(model_path, tmp_path / "b", steps=1), cluster)
        with pytest.raises(FencedError):
            trainer.run()


def test_a_planned_stop_checkpoints_and_leaves_the_run_open(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    stop = StopSignal()
    stop.request()
    trainer = train(make_run(model_path, tmp_path, steps=3), cluster, stop)
    assert trainer.step == 0
    assert not any(isinstance(message, EndOfRun) for message in cluster.messages())
    assert (tmp_path / "checkpoints" / "step-0000000").is_dir()


def test_a_record_that_can_not_be_read_goes_to_the_dead_letters_and_training_goes_on(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    with cluster.log.changed:
        cluster.log.append(NAMES.trajectories, b"k", b"\x80\x04not a record", [("schema", b"1.0"), ("run", RUN_ID.encode())])
    cluster.sample(range(2))
    run = make_run(model_path, tmp_path, steps=1)
    train(run, cluster)
    counts = cluster.counts(run)
    assert (counts.produced, counts.trained, counts.dead_lettered) == (2 * GROUP + 1, 2 * GROUP, 1)


def test_the_last_checkpoint_waits_for_the_word_about_dead_letters(model_path: str, tmp_path: Path) -> None:
    """Else the next start would write the letter again."""

    class Late(FakeProducer):
        def poll(self, timeout_s: float) -> None:
            """The broker's word comes with `flush` alone."""

    cluster = Cluster()
    cluster.clients = cluster.clients._replace(open_dead_letters=lambda: Late(cluster.log))
    with cluster.log.changed:
        cluster.log.append(NAMES.trajectories, b"k", b"\x80\x04not a record", [("schema", b"1.0"), ("run", RUN_ID.encode())])
    cluster.sample(range(2))
    train(make_run(model_path, tmp_path, steps=1), cluster)
    cluster.sample(range(2, 4))
    run = make_run(model_path, tmp_path, steps=2)
    train(run, cluster)
    assert len(cluster.log.records(NAMES.dead_letter)) == cluster.counts(run).dead_lettered == 1
    (letter,) = cluster.log.records(NAMES.dead_letter)
    assert letter.value == b"\x80\x04not a record"


def test_a_checkpoint_of_another_cluster_is_refused(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.sample(range(2))
    run = make_run(model_path, tmp_path, steps=1)
    train(run, cluster)
    other = Cluster()
    other.clients = other.clients._replace(cluster_id="another")
    with pytest.raises(CheckpointError, match="another"):
        train(run, other)


def test_a_starving_trainer_says_what_it_waits_for(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.sample(range(1))
    stop = StopSignal()
    run = make_run(model_path, tmp_path, steps=1)
    with (
        capture_logs() as said,
        trainer_of(run, cluster.clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=stop) as trainer,
    ):

        def stop_once_said() -> None:
            if any("1 of 2 groups are ready; of 4 records read" in entry["event"] for entry in said):
                stop.request()

        trainer._check_children = stop_once_said
        trainer.run()
    (first, *_) = [entry["event"] for entry in said if entry["event"].startswith("waiting for a batch")]
    assert "newest announced 0; no producer is alive" in first


def test_progress_tells_a_new_producer_its_window(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    heartbeat = control.Heartbeat(
        run_id=RUN_ID,
        producer_id="p",
        incarnation="p.1",
        sequence=0,
        state="waiting",
        serving=0,
        announced=0,
        control_sequence=0,
        granted_limit=9,
        groups_started=0,
        groups_published=0,
        trajectories=0,
        tokens=0,
        busy_seconds=1.0,
        pulls=0,
        failed_pulls=0,
        created=1.0,
    )
    stop = StopSignal()
    run = make_run(model_path, tmp_path, steps=1)
    with trainer_of(run, cluster.clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=stop) as trainer:
        sequence = 0

        def beat() -> None:
            nonlocal sequence
            sequence += 1
            message = control.encode(msgspec.structs.replace(heartbeat, sequence=sequence))
            with cluster.log.changed:
                cluster.log.append(NAMES.heartbeats, b"p", message, [])
            if any(isinstance(m, Progress) and "p.1" in m.grants for m in cluster.messages()):
                stop.request()

        trainer._check_children = beat
        trainer.run()
    granted = [m.grants["p.1"] for m in cluster.messages() if isinstance(m, Progress)]
    assert granted[0].window == (8 + 1) * 2


@pytest.mark.parametrize("bound", [None, 7])
def test_a_group_longer_than_the_model_takes_is_dropped(model_path: str, tmp_path: Path, bound: int | None) -> None:
    """By default the model's 128 positions are the bound; with a lower one in the run file, that."""
    cluster = Cluster()
    length = 126 if bound is None else 5
    cluster.part_of_a_group(9, completion_ids=[4] * length)
    cluster.sample(range(2))
    run = make_run(model_path, tmp_path, steps=1, batch={"max_tokens": bound})
    train(run, cluster)
    counts = cluster.counts(run)
    assert (counts.trained, counts.dropped) == (2 * GROUP, {"too_large": 1})


def test_steps_that_are_not_finite_end_the_run_after_so_many_in_a_row(model_path: str, tmp_path: Path) -> None:
    """Two left out, a good one, then three in a row: told, counted, resolved as such, and the weights as they were."""
    cluster = Cluster(partitions=1)  # Trained in the order of their numbers.
    run = make_run(model_path, tmp_path, steps=20, learner={"max_skipped": 3}, checkpoint={"every": 100})
    for number in range(12):
        with cluster.log.changed:
            for member in make_group(GROUP, number=number, loss_mask=np.full(4, number in (4, 5))).members:
                key, headers, value = codec.encode(member.trajectory)
                cluster.log.append(NAMES.trajectories, key, value, headers)
    metrics = TrainerMetrics(RUN_ID, CollectorRegistry())
    with (
        pytest.raises(TrainingError, match=r"3 steps in a row, up to step 6, were left out: .*0 tokens to train"),
        trainer_of(run, cluster.clients, metrics=metrics, stop=StopSignal()) as trainer,
    ):
        trainer.run()
    assert metrics.registry.get_sample_value("echo_train_steps_skipped_total", {"run": RUN_ID}) == 5
    counts = cluster.counts(run)
    assert (counts.trained, counts.dropped) == (2 * GROUP, {"nonfinite": 10 * GROUP})


def test_the_numbers_of_a_step_are_shown(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.sample(range(2))
    metrics = TrainerMetrics(RUN_ID, CollectorRegistry())
    run = make_run(model_path, tmp_path, steps=1, learner={"kl_coefficient": 0.1})
    with trainer_of(run, cluster.clients, metrics=metrics, stop=StopSignal()) as trainer:
        trainer.run()

    def shown(name: str, **labels: str) -> float:
        value = metrics.registry.get_sample_value(f"echo_train_{name}", {"run": RUN_ID, **labels})
        assert value is not None, name
        return value

    for phase in ("wait", "unpack", "forward", "backward", "publish", "checkpoint"):
        assert shown("phase_seconds_total", phase=phase) > 0
    assert 0 < shown("ess_ratio") <= 1
    assert shown("reward_std") == 0.5
    assert shown("learning_rate") == run.learner.lr
    assert shown("tokens_per_second") > 0
    assert shown("reference_kl_nats") == pytest.approx(0, abs=1e-9)
    assert (shown("ranks"), shown("steps_skipped_total")) == (1, 0)
