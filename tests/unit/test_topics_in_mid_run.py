"""The trainer's loop while its topics change: they grow, lose records, vanish, are made anew."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from consumers.train import Trainer
from consumers.wiring import trainer_of
from echo import codec, control, journal, report
from echo.config import RunConfig
from echo.control import Announcement, Progress
from echo.errors import CheckpointError, TopicError
from echo.metrics import TrainerMetrics
from echo.process import StopSignal
from tests.helpers import INCARNATION, RUN_ID, make_group
from tests.unit.test_fleet import beat
from tests.unit.test_train_loop import GROUP, NAMES, Cluster, make_run, model_path, train

__all__ = ["model_path"]

pytestmark = pytest.mark.usefixtures("own_process")


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo.topic_watch.LOOK_EVERY_S", 0.02)
    monkeypatch.setattr("echo.topic_watch.GONE_AFTER_S", 0.1)


@contextmanager
def trainer(run: RunConfig, cluster: Cluster, stop: StopSignal | None = None) -> Iterator[Trainer]:
    metrics = TrainerMetrics(RUN_ID, CollectorRegistry())
    with trainer_of(run, cluster.clients, metrics=metrics, stop=stop or StopSignal()) as made:
        yield made


def once(action: Callable[[], Any]) -> Callable[[], None]:
    """For `_check_children`, which the loop calls while it waits: `action`, the first time."""
    done = []

    def call() -> None:
        if not done:
            done.append(True)
            action()

    return call


def heartbeat(cluster: Cluster, sequence: int, *, started: int, published: int, **fields: Any) -> None:
    message = beat(
        INCARNATION, sequence, published=published, run_id=RUN_ID, producer_id="p0", groups_started=started, **fields
    )
    with cluster.log.changed:
        cluster.log.append(NAMES.heartbeats, control.key(message), control.encode(message), ())


def announced(cluster: Cluster) -> list[int]:
    return [message.version for message in cluster.messages() if isinstance(message, Announcement)]


def lost_of(counts: report.Counts) -> int:
    return counts.dropped.get("lost", 0)


# More partitions.


def test_new_partitions_are_read_in_mid_run_and_groups_may_stand_in_two(model_path: str, tmp_path: Path) -> None:
    """A group of which one half was written before the topic grew and the other after it is trained as any other."""
    cluster = Cluster(partitions=1)
    cluster.sample(range(2))
    halves = [codec.encode(member.trajectory) for number in range(2, 10) for member in make_group(GROUP, number=number).members]

    def write(part: int) -> None:
        with cluster.log.changed:
            for key, headers, value in halves[part::2]:
                cluster.log.append(NAMES.trajectories, key, value, headers)

    def grow() -> None:
        write(0)
        cluster.log.add_partitions(NAMES.trajectories, 4)
        write(1)
        assert {record.partition for record in cluster.log.records(NAMES.trajectories)} == {0, 1, 2, 3}

    run = make_run(model_path, tmp_path, steps=5)
    with trainer(run, cluster) as made:
        made._check_children = once(grow)
        made.run()
    assert cluster.counts(run) == report.Counts(10 * GROUP, 10 * GROUP, {}, 0, 0, 4)
    batches = [line["batch"] for line in journal.read(run.checkpoint.dir / journal.FILE_NAME) if "batch" in line]
    places = [{partition for partition, _ in members} for batch in batches for _, *members in batch]
    assert any(len(found) == 2 for found in places)


def test_a_restart_reads_partitions_that_its_checkpoint_does_not_know_from_their_beginning(
    model_path: str, tmp_path: Path
) -> None:
    cluster = Cluster(partitions=1)
    cluster.sample(range(5))
    train(make_run(model_path, tmp_path, steps=2), cluster)
    cluster.log.add_partitions(NAMES.trajectories, 3)
    cluster.sample(range(5, 12))
    assert {record.partition for record in cluster.log.records(NAMES.trajectories)} == {0, 1, 2}
    run = make_run(model_path, tmp_path, steps=6)
    train(run, cluster)
    assert cluster.counts(run) == report.Counts(12 * GROUP, 12 * GROUP, {}, 0, 0, 6)


# Records that were deleted.


def delete_unread(cluster: Cluster, records: int) -> int:
    """Of each partition, so many beyond what the last checkpoint read; how many there were."""
    frontiers = cluster.log.groups[f"echo-{RUN_ID}"]
    deleted = 0
    for partition, frontier in frontiers.items():
        until = min(frontier + records, cluster.log.partition(partition).end)
        cluster.log.delete_before(partition, until)
        deleted += until - frontier
    return deleted


def test_a_start_that_finds_records_deleted_announces_nothing(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.sample(range(4))
    train(make_run(model_path, tmp_path, steps=2), cluster)
    cluster.sample(range(4, 10))
    assert delete_unread(cluster, 2) == 4
    before = cluster.messages()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"trajectories\[0\] begins at offset .*trajectories\[1\].*--accept-lost"):
            train(make_run(model_path, tmp_path, steps=4), cluster)
    assert cluster.messages() == before


def test_what_was_deleted_is_counted_as_lost_where_the_run_accepts_it(model_path: str, tmp_path: Path) -> None:
    """With offsets, in the journal and in the report; what was learned is kept, and a group that lost members is decided."""
    cluster = Cluster()
    cluster.sample(range(4))
    train(make_run(model_path, tmp_path, steps=2), cluster)
    cluster.sample(range(4, 12))
    deleted = delete_unread(cluster, GROUP + 1)
    assert deleted == 2 * (GROUP + 1)
    # Two groups are gone, two have lost a member, four are whole.
    run = make_run(
        model_path, tmp_path, steps=4, checkpoint={"accept_lost": True}, batch={"group_deadline_s": 0.3, "groups_per_step": 2}
    )
    with capture_logs() as said:
        train(run, cluster)
    counts = cluster.counts(run)
    assert counts.produced == 12 * GROUP
    assert (counts.trained, lost_of(counts), counts.dead_lettered) == (8 * GROUP, deleted, 0)
    assert counts.dropped.get("deadline", 0) + counts.pending == 2 * (GROUP - 1)
    losses = [entry for entry in said if entry["event"] == "records are lost"]
    assert sum(entry["count"] for entry in losses) == deleted
    lines = list(journal.read(run.checkpoint.dir / journal.FILE_NAME))
    assert [line["step"] for line in lines if "batch" in line] == [1, 2, 3, 4]
    assert set(next(line for line in lines if "lost" in line["resolved"])["resolved"]["lost"]) == {"0", "1"}
    assert announced(cluster) == [0, 1, 2, 3, 4, 5]
    # The loss is part of the lineage: the next start needs no leave.
    cluster.sample(range(12, 14))
    train(make_run(model_path, tmp_path, steps=5), cluster)
    assert lost_of(cluster.counts(run)) == deleted


def test_a_run_that_starts_over_after_records_were_deleted_frees_its_producers(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have begun what their windows allow, and this trainer will never read it: it says that it holds no room."""
    monkeypatch.setattr("consumers.fleet._SETTLED_S", 0.3)
    cluster = Cluster()
    cluster.sample(range(6))
    train(make_run(model_path, tmp_path, steps=2), cluster)
    for number in range(2):
        partition = (NAMES.trajectories, number)
        cluster.log.delete_before(partition, cluster.log.partition(partition).end)
    run = make_run(model_path, tmp_path, steps=2, checkpoint={"resume": "never"})
    sequence, freed = 0, []

    def beats() -> None:
        nonlocal sequence
        sequence += 1
        heartbeat(cluster, sequence, started=6, published=6)
        grants = [
            message.grants[INCARNATION]
            for message in cluster.messages()
            if isinstance(message, Progress | Announcement) and INCARNATION in message.grants
        ]
        if grants and grants[-1].resolved == 6 and not freed:
            freed.append(True)
            cluster.sample(range(6, 10), version=cluster_version())

    def cluster_version() -> int:
        return announced(cluster)[-1]

    with trainer(run, cluster) as made:
        made._check_children = beats
        made.run()
    assert made.step == 2
    assert freed


# Topics that go away.


@pytest.mark.parametrize("made_anew", [False, True])
@pytest.mark.parametrize("role", ["trajectories", "control"])
def test_a_topic_that_the_run_rests_on_ends_it_with_its_name_and_the_remedy(
    model_path: str, tmp_path: Path, role: str, made_anew: bool
) -> None:
    cluster = Cluster()
    topic = getattr(NAMES, role)

    def delete() -> None:
        cluster.log.delete_topic(topic)
        if made_anew:
            cluster.log.create_topic(topic, 2 if role == "trajectories" else 1)

    what = "was deleted and made anew" if made_anew else "was deleted"
    with trainer(make_run(model_path, tmp_path, steps=1), cluster) as made:
        made._check_children = once(delete)
        with pytest.raises(TopicError, match=rf"topic {topic} {what} in mid-run.*`echo-topics apply`"):
            made.run()


def test_a_run_goes_on_where_its_trajectories_were_made_anew_if_it_accepts_that(model_path: str, tmp_path: Path) -> None:
    """Offsets of the former topic mean nothing in the new one: without leave that is an error, before anything is announced."""
    cluster = Cluster()
    cluster.sample(range(5))
    train(make_run(model_path, tmp_path, steps=2), cluster)
    cluster.log.delete_topic(NAMES.trajectories)
    cluster.log.create_topic(NAMES.trajectories, 2)
    cluster.sample(range(5, 10))
    before = cluster.messages()
    with pytest.raises(CheckpointError, match=r"topic trajectories was deleted and made anew since.*--accept-lost"):
        train(make_run(model_path, tmp_path, steps=4), cluster)
    assert cluster.messages() == before
    run = make_run(model_path, tmp_path, steps=4, checkpoint={"accept_lost": True})
    assert train(run, cluster).step == 4
    counts = cluster.counts(run)
    assert (counts.produced, counts.trained, counts.pending) == (5 * GROUP, 4 * GROUP, GROUP)
    run = make_run(model_path, tmp_path, steps=5)
    cluster.sample(range(10, 11))
    train(run, cluster)
    assert cluster.counts(run).trained == 6 * GROUP


def test_versions_are_not_used_again_after_the_control_topic_was_made_anew(model_path: str, tmp_path: Path) -> None:
    """Also where the store of the weights is another one: the checkpoint knows of them."""
    cluster = Cluster()
    cluster.sample(range(5))
    train(make_run(model_path, tmp_path, steps=2), cluster)
    cluster.log.delete_topic(NAMES.control)
    cluster.log.create_topic(NAMES.control)
    cluster.sample(range(5, 6), version=2)
    shutil.rmtree(tmp_path / "weights")
    run = make_run(model_path, tmp_path, steps=3)
    train(run, cluster)
    assert announced(cluster) == [3, 4]
    assert cluster.counts(run).trained == 6 * GROUP


def test_heartbeats_that_are_deleted_are_waited_for_aloud_and_received_again(model_path: str, tmp_path: Path) -> None:
    """Nothing that was learned is in them: `echo-topics apply` is all that it takes."""
    cluster = Cluster()
    stop = StopSignal()
    sequence = 0

    with capture_logs() as said:

        def turn() -> None:
            nonlocal sequence
            sequence += 1
            if sequence == 1:
                cluster.log.delete_topic(NAMES.heartbeats)
            told = [entry["event"] for entry in said if entry["event"].startswith("waiting for a batch")]
            if NAMES.heartbeats not in cluster.log._topics:
                missing = f"topic {NAMES.heartbeats} does not exist any more: `echo-topics apply` makes it again"
                if any(missing in event for event in told):
                    cluster.log.create_topic(NAMES.heartbeats, 2)
                return
            heartbeat(cluster, sequence, started=0, published=0)
            if any(isinstance(message, Progress) and INCARNATION in message.grants for message in cluster.messages()):
                stop.request()

        with trainer(make_run(model_path, tmp_path, steps=1), cluster, stop) as made:
            made._check_children = turn
            made.run()
    assert made.step == 0


def test_the_readers_last_error_is_in_the_line_of_the_wait(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    stop = StopSignal()
    with capture_logs() as said, trainer(make_run(model_path, tmp_path, steps=1), cluster, stop) as made:
        made._reader._reader.last_error = "_TRANSPORT: Connection refused"  # type: ignore[misc]

        def look() -> None:
            if any(
                "the last error of reading trajectories: _TRANSPORT: Connection refused" in entry["event"] for entry in said
            ):
                stop.request()

        made._check_children = look
        made.run()
