"""A past step is rebuilt from the log byte for byte, or refused with the record that is missing or wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from consumers import batching
from consumers.batching import MicroBatch
from consumers.digest import batch_digest, micro_batches_digest
from consumers.replay import Replay, StepLine, find_step, replay
from consumers.wiring import kafka_clients, trainer_of
from echo import codec, journal, topics
from echo.broker import RunningBroker
from echo.config import RunConfig
from echo.errors import CheckpointError
from echo.kafka import KafkaLogAdmin, KafkaLogProducer
from echo.log import LogRecord
from echo.metrics import TrainerMetrics
from echo.process import StopSignal
from echo.run_file import save
from echo.trajectory import Sampling
from tests.fakes.log import FakeReader
from tests.helpers import make_group, make_trajectory
from tests.unit.test_train_loop import GROUP, NAMES, Cluster, make_run, model_path, train

__all__ = ["model_path"]

pytestmark = pytest.mark.usefixtures("own_process")


def journal_of(run: RunConfig) -> Path:
    return run.checkpoint.dir / journal.FILE_NAME


def replayed(cluster: Cluster, run: RunConfig, step: int) -> Replay:
    line = find_step(journal_of(run), step)
    with closing(cluster.clients.open_reader()) as reader:
        return replay(line, reader, topic=NAMES.trajectories, cluster_id=cluster.clients.cluster_id)


@pytest.fixture
def trained(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Cluster, RunConfig, list[list[MicroBatch]]]:
    """Three steps over two partitions, and the micro-batches that the learner was given in each."""
    seen: list[list[MicroBatch]] = []
    real = batching.micro_batches

    def spy(*args: Any, **options: Any) -> Iterator[MicroBatch]:
        seen.append(list(real(*args, **options)))
        yield from seen[-1]

    cluster = Cluster()
    for number in range(7):
        cluster.sample(range(number, number + 1))
        # Other records lie between those of a batch.
        cluster.foreign(number)
    run = make_run(model_path, tmp_path, steps=3, learner={"tokens_per_microbatch": 16})
    with monkeypatch.context() as patched:
        patched.setattr(batching, "micro_batches", spy)
        train(run, cluster)
    return cluster, run, seen


def test_every_step_is_rebuilt_byte_for_byte(trained: tuple[Cluster, RunConfig, list[list[MicroBatch]]]) -> None:
    """Groups, members, arrays, advantages and micro-batches; also after the run file cuts batches in another way."""
    cluster, run, seen = trained
    steps = {line["step"]: line for line in journal.read(journal_of(run)) if "batch" in line}
    assert len(seen) == 3
    for step, parts in enumerate(seen, 1):
        found = replayed(cluster, run, step)
        assert found.matches
        batch = [[group.group_id, *[[m.partition, m.offset] for m in group.members]] for group in found.groups]
        assert batch == steps[step]["batch"]
        assert len(found.micro_batches) == len(parts) > 1
        for mine, theirs in zip(found.micro_batches, parts, strict=True):
            assert mine.first == theirs.first
            for name in ("input_ids", "attention_mask", "loss_mask", "behaviour", "advantages", "temperatures", "staleness"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        report = found.report()
        assert report["micro_batches_digest"] == micro_batches_digest(parts)
        assert (report["tokens"], report["reward_mean"]) == (steps[step]["tokens"], steps[step]["reward_mean"])
        assert report["staleness"] == steps[step]["staleness"]
        assert json.loads(json.dumps(report)) == report


def test_where_stale_tokens_were_masked_a_replay_masks_the_same(model_path: str, tmp_path: Path) -> None:
    """Two groups are of the first policy, two changed it after two tokens: at S = 0 these are too old for step 2."""
    cluster = Cluster()
    cluster.sample(range(2))
    masking = {"max_staleness": 0, "on_stale": "mask"}
    train(make_run(model_path, tmp_path, steps=1).model_copy(update=masking), cluster)
    cluster.sample(range(2, 4), spans=((0, 1), (2, 2)))
    run = make_run(model_path, tmp_path, steps=2).model_copy(update=masking)
    train(run, cluster)
    lines = [line for line in journal.read(journal_of(run)) if "batch" in line]
    assert [line["masked_below"] for line in lines] == [0, 2]
    assert [line["staleness"] for line in lines] == [{"0": 2 * GROUP}] * 2
    assert [replayed(cluster, run, step).matches for step in (1, 2)] == [True, True]
    masks = [m.trajectory.loss_mask.tolist() for group in replayed(cluster, run, 2).groups for m in group.members]
    assert masks == [[False, False, *[True] * (len(mask) - 2)] for mask in masks]
    counts = cluster.counts(run)
    assert (counts.trained, counts.staleness_max) == (4 * GROUP, 0)


def test_a_record_that_retention_deleted_is_named(trained: tuple[Cluster, RunConfig, list[list[MicroBatch]]]) -> None:
    cluster, run, _ = trained
    line = find_step(journal_of(run), 1)
    partition, offsets = next(iter(line.wanted.items()))
    cluster.log.delete_before((NAMES.trajectories, partition), offsets[0] + 1)
    with pytest.raises(CheckpointError, match=rf"step 1 .* partition {partition} offset {offsets[0]} .*retention") as caught:
        replayed(cluster, run, 1)
    assert "replay a later step" in str(caught.value)


def test_a_record_that_can_not_be_read_any_more_is_named(trained: tuple[Cluster, RunConfig, list[list[MicroBatch]]]) -> None:
    """The disk spoiled its batch, say: another record of the batch before it is part of it."""
    cluster, run, _ = trained
    partition, offsets = next(iter(find_step(journal_of(run), 1).wanted.items()))
    part = cluster.log.partition((NAMES.trajectories, partition))
    first = offsets[1] - 1
    part.records[first : offsets[1] + 1] = [
        LogRecord(NAMES.trajectories, partition, offset, None, (), None, 0, "its sum is wrong", offsets[1] + 1 - offset)
        for offset in (first, offsets[1])
    ]
    lost = min(offset for offset in offsets if offset >= first)
    with pytest.raises(CheckpointError, match=rf"step 1 can't be replayed: .*\[{partition}\]@{lost} .*its sum is wrong"):
        replayed(cluster, run, 1)


def test_a_record_that_is_gone_from_the_middle_or_the_end_is_named(
    trained: tuple[Cluster, RunConfig, list[list[MicroBatch]]],
) -> None:
    """Compaction leaves gaps; a topic that was made anew ends too early."""
    cluster, run, _ = trained
    partition, offsets = next(iter(find_step(journal_of(run), 1).wanted.items()))
    part = cluster.log.partition((NAMES.trajectories, partition))
    whole = list(part.records)
    part.records[offsets[1]] = None
    with pytest.raises(CheckpointError, match=rf"partition {partition} offset {offsets[1]} .*goes on at offset .* without it"):
        replayed(cluster, run, 1)
    part.records[:] = whole[: offsets[1]]
    with pytest.raises(CheckpointError, match=rf"partition {partition} offset {offsets[1]} .*the log ends before it"):
        replayed(cluster, run, 1)


def overwrite(cluster: Cluster, line: StepLine, **fields: Any) -> tuple[int, int]:
    """Put another record in the place of the batch's first one."""
    _, (partition, offset), *_ = line.batch[0]
    part = cluster.log.partition((NAMES.trajectories, partition))
    record = part.records[offset]
    assert record is not None
    part.records[offset] = record._replace(**fields)
    return partition, offset


def test_a_damaged_record_is_named(trained: tuple[Cluster, RunConfig, list[list[MicroBatch]]]) -> None:
    cluster, run, _ = trained
    line = find_step(journal_of(run), 2)
    partition, offset = overwrite(cluster, line, value=b"\x80\x04junk")
    with pytest.raises(CheckpointError, match=rf"trajectories\[{partition}\]@{offset} was trained, and can't be read"):
        replayed(cluster, run, 2)
    other = codec.encode(make_trajectory(group_id="test-run/p0.test/g99"))
    overwrite(cluster, line, value=other.value)
    with pytest.raises(CheckpointError, match=r"is of group 'test-run/p0.test/g99', the journal says 'test-run/p0.test/g"):
        replayed(cluster, run, 2)


def test_a_record_that_reads_well_and_is_another_one_is_found_by_the_digest(
    trained: tuple[Cluster, RunConfig, list[list[MicroBatch]]],
) -> None:
    cluster, run, _ = trained
    line = find_step(journal_of(run), 2)
    record = next(r for r in cluster.log.records(NAMES.trajectories) if [r.partition, r.offset] == line.batch[0][1])
    forged = msgspec.structs.replace(codec.decode(record.value), reward=0.5)
    overwrite(cluster, line, value=codec.encode(forged).value)
    assert not replayed(cluster, run, 2).matches


def test_another_cluster_and_an_unknown_step_are_refused(
    trained: tuple[Cluster, RunConfig, list[list[MicroBatch]]], tmp_path: Path
) -> None:
    cluster, run, _ = trained
    line = find_step(journal_of(run), 1)
    with pytest.raises(CheckpointError, match="read from cluster fake, this is cluster another"):
        replay(line, FakeReader(cluster.log), topic=NAMES.trajectories, cluster_id="another")
    with pytest.raises(CheckpointError, match="no step 9 in it, it holds steps 1 to 3"):
        find_step(journal_of(run), 9)
    with pytest.raises(CheckpointError, match="there is no journal"):
        find_step(tmp_path / "nowhere.jsonl", 1)
    old = tmp_path / "old.jsonl"
    old.write_text('{"step": 1, "version": 0, "batch": []}\n')
    with pytest.raises(CheckpointError, match=r"step 1 can't be replayed: .*digest"):
        find_step(old, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"reward": 0.25},
        {"logprobs": np.array([-1.0, -1.0, -1.0, np.nextafter(np.float32(-1.0), np.float32(0))], np.float32)},
        {"logprobs": np.full(4, -1.0, np.float16)},
        {"completion_ids": [17, 4, 9, 3]},
        {"prompt_ids": [5, 6, 8]},
        {"prompt_ids": [5, 6], "completion_ids": [7, 17, 4, 9, 2]},
        {"loss_mask": np.array([True, True, True, False])},
        {"spans": ((0, 0), (2, 1))},
        {"sampling": Sampling(temperature=0.5, max_tokens=16)},
        {"trajectory_id": "another"},
    ],
)
def test_the_digest_sees_whatever_training_depends_on(change: dict[str, Any]) -> None:
    plain = make_group(2)
    assert batch_digest([plain]) == batch_digest([make_group(2, first_offset=7, engine="another", started_at=1.0)])
    changed = make_group(2, members=[{}, change])
    assert batch_digest([plain]) != batch_digest([changed])
    assert batch_digest([plain, changed]) != batch_digest([changed, plain])


def command(run_file: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "consumers.cli", str(run_file), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )


def test_the_command_replays_from_a_real_broker(
    model_path: str, tmp_path: Path, tansu: RunningBroker, topic_prefix: str
) -> None:
    """On the embedded broker, through the command: the table and the JSON, and status 1 once the journal says otherwise."""
    settings = {"bootstrap.servers": tansu.bootstrap_servers}
    run = make_run(model_path, tmp_path, steps=2, broker={"settings": settings}, topics={"prefix": topic_prefix})
    run_file = tmp_path / "run.yaml"
    save(run, run_file)
    spec = topics.of_run(run)
    admin = KafkaLogAdmin(settings, client_id="test")
    topics.apply(topics.plan(spec, topics.read_actual(admin, spec.names)), admin)
    with closing(KafkaLogProducer(settings, client_id="test", max_record_bytes=2**24, queue_bytes=2**26)) as producer:
        for number in range(5):
            for member in make_group(GROUP, number=number).members:
                key, headers, value = codec.encode(member.trajectory)
                producer.send(spec.names.trajectories, key=key, value=value, headers=headers)
        assert producer.flush(30.0) == 0

    with trainer_of(
        run, kafka_clients(run, stop=StopSignal()), metrics=TrainerMetrics(run.run_id, CollectorRegistry()), stop=StopSignal()
    ) as trainer:
        trainer.run()
    line = find_step(journal_of(run), 2)
    answer = command(run_file, "--replay", "2")
    assert answer.returncode == 0, answer.stderr
    assert "yes, byte for byte" in answer.stdout
    path = journal_of(run)
    path.write_text(path.read_text().replace(line.digest, "0" * 64))
    answer = command(run_file, "--replay", "2", "--json")
    assert answer.returncode == 1
    report = json.loads(answer.stdout)
    assert (report["digest"], report["matches"], report["trajectories"]) == (line.digest, False, 2 * GROUP)
    assert "not the one that was trained" in answer.stderr
