"""Where a trainer goes on from: what it takes up, what it leaves behind for good, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from consumers import lineage
from consumers.checkpoint import TENSORS, CheckpointStore
from consumers.cli import _resuming
from consumers.train import Trainer
from consumers.wiring import trainer_of
from echo import journal, report
from echo.config import RunConfig
from echo.control import Announcement, decode_control
from echo.errors import CheckpointError, ConfigError
from echo.metrics import TrainerMetrics
from echo.process import StopSignal
from echo.run_file import dump, load, save
from tests.helpers import RUN_ID
from tests.unit.test_train_loop import GROUP, NAMES, Cluster, make_run, model_path, train

__all__ = ["model_path"]

pytestmark = pytest.mark.usefixtures("own_process")


@pytest.fixture
def four_steps(model_path: str, tmp_path: Path) -> tuple[Cluster, Callable[..., RunConfig]]:
    """A run of four steps with a checkpoint after each second one, over ten groups; and how to make its run file."""
    cluster = Cluster()
    cluster.sample(range(10))

    def run_file(steps: int, **checkpoint: Any) -> RunConfig:
        return make_run(model_path, tmp_path, steps=steps, checkpoint={"keep": 9, **checkpoint})

    train(run_file(4), cluster)
    return cluster, run_file


def steps_of(run: RunConfig) -> list[int]:
    return [line["step"] for line in journal.read(run.checkpoint.dir / journal.FILE_NAME) if "batch" in line]


def checkpoints_of(run: RunConfig) -> list[str]:
    return sorted(path.name for path in run.checkpoint.dir.glob("step-*"))


def test_a_named_checkpoint_is_gone_on_from(four_steps: tuple[Cluster, Callable[..., RunConfig]]) -> None:
    """Set back from step 4 to step 2: what steps 3 and 4 had trained is trained again, once, and their versions stay used."""
    cluster, run_file = four_steps
    run = run_file(5)
    assert checkpoints_of(run) == ["step-0000002", "step-0000004"]
    run = run_file(5, resume=run.checkpoint.dir / "step-0000002")
    trainer = train(run, cluster)
    assert trainer.step == 5
    assert steps_of(run) == [1, 2, 3, 4, 5]
    assert cluster.counts(run) == report.Counts(10 * GROUP, 10 * GROUP, {}, 0, 0, 7)
    announced = [(m.version, m.step) for m in cluster.messages() if isinstance(m, Announcement)]
    assert announced[4:] == [(4, 4), (5, 2), (6, 3), (7, 4), (8, 5)]


def test_what_is_newer_than_the_start_is_gone_before_the_first_step(
    four_steps: tuple[Cluster, Callable[..., RunConfig]],
) -> None:
    """A crash right after being set back: the next resume must not take a checkpoint whose journal lines were cut."""
    cluster, run_file = four_steps
    stop = StopSignal()
    run = run_file(5, resume=run_file(5).checkpoint.dir / "step-0000002")
    with trainer_of(run, cluster.clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=stop) as trainer:
        assert trainer.step == 2
    assert checkpoints_of(run) == ["step-0000002"]
    assert steps_of(run) == [1, 2]
    train(run_file(5), cluster)
    assert cluster.counts(run).trained == 10 * GROUP


def test_starting_over_leaves_nothing_of_the_former_life(four_steps: tuple[Cluster, Callable[..., RunConfig]]) -> None:
    cluster, run_file = four_steps
    run = run_file(4, resume="never")
    with trainer_of(run, cluster.clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=StopSignal()) as trainer:
        assert trainer.step == 0
    assert checkpoints_of(run) == []
    assert steps_of(run) == []
    train(run_file(4), cluster)
    assert cluster.counts(run).trained == 8 * GROUP


def test_a_folder_that_is_no_checkpoint_of_this_run_is_refused(
    four_steps: tuple[Cluster, Callable[..., RunConfig]], model_path: str, tmp_path: Path
) -> None:
    """Missing, damaged, of another run: one error each, and nothing was removed or cut."""
    cluster, run_file = four_steps
    folder = run_file(5).checkpoint.dir
    with pytest.raises(CheckpointError, match=r"step-0000003: there is no checkpoint.* step-0000004, step-0000002"):
        train(run_file(5, resume=folder / "step-0000003"), cluster)

    tensors = folder / "step-0000002" / TENSORS
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"step-0000002.* digest .* is not the recorded"):
        train(run_file(5, resume=folder / "step-0000002"), cluster)
    tensors.write_bytes(whole)

    other = tmp_path / "other" / "step-0000002"
    loaded = CheckpointStore(folder, RUN_ID, 9).load(folder / "step-0000002")
    CheckpointStore(other.parent, "another-run", 9).save(2, loaded.tensors, loaded.meta, policy_version=2, reader=loaded.reader)
    with pytest.raises(CheckpointError, match=rf"{other}: is a checkpoint of run 'another-run', and this is run '{RUN_ID}'"):
        train(run_file(5, resume=other), cluster)

    assert checkpoints_of(run_file(5)) == ["step-0000002", "step-0000004"]
    assert steps_of(run_file(5)) == [1, 2, 3, 4]


def test_the_run_file_and_the_option_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file a folder is relative to the file, on the command line to where the command runs."""
    path = tmp_path / "run.yaml"
    path.write_text("run_id: r\nmodel: {path: m}\ncheckpoint: {resume: checkpoints/step-0000010}\n")
    run = load(path)
    assert run.checkpoint.resume == tmp_path / "checkpoints" / "step-0000010"
    saved = tmp_path / "saved.yaml"
    save(run, saved)
    assert load(saved) == run
    assert "resume: " + str(tmp_path / "checkpoints" / "step-0000010") in dump(run)
    for word in ("auto", "never"):
        assert load(path, [f"checkpoint.resume={word}"]).checkpoint.resume == word
        assert _resuming(run, word).checkpoint.resume == word
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert _resuming(run, "step-0000010").checkpoint.resume == tmp_path / "elsewhere" / "step-0000010"
    with pytest.raises(ConfigError, match=r"checkpoint\.resume"):
        load(path, ["checkpoint.resume=5"])


def exposed(metrics: TrainerMetrics, name: str) -> float:
    """The sum of a metric's series."""
    return sum(s.value for family in metrics.registry.collect() for s in family.samples if s.name == name)


def run_with_metrics(run: RunConfig, cluster: Cluster) -> tuple[Trainer, TrainerMetrics]:
    metrics = TrainerMetrics(RUN_ID, CollectorRegistry())
    with trainer_of(run, cluster.clients, metrics=metrics, stop=StopSignal()) as trainer:
        trainer.run()
    return trainer, metrics


def test_trained_records_of_abandoned_versions_are_counted(model_path: str, tmp_path: Path) -> None:
    """Checkpoint at version 2, announced up to 3, then a crash: version 3 is abandoned, and stays so after further resumes.

    Also where its announcement is not to be seen by the next trainer: a producer may have heard of it all the same."""
    cluster = Cluster()
    cluster.sample(range(6))
    run = make_run(model_path, tmp_path, steps=3)
    with trainer_of(run, cluster.clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=StopSignal()) as trainer:
        trainer._checkpoint, kept = lambda: kept() if trainer.step == 2 else None, trainer._checkpoint  # type: ignore[method-assign]
        trainer.run()
    control = cluster.log.partition((NAMES.control, 0)).records
    for offset, record in enumerate(control):
        if record is not None and decode_control(record.value, record.where).version == 3:
            control[offset] = None
    cluster.sample(range(6, 7), version=2)
    cluster.sample(range(7, 8), version=3)
    _, metrics = run_with_metrics(make_run(model_path, tmp_path, steps=4), cluster)
    # Two groups of version 0 (again), then one of version 2 and one of 3.
    assert exposed(metrics, "echo_train_abandoned_version_records_total") == GROUP
    cluster.sample(range(8, 9), version=3)
    cluster.sample(range(9, 10), version=6)
    _, metrics = run_with_metrics(make_run(model_path, tmp_path, steps=5), cluster)
    assert exposed(metrics, "echo_train_abandoned_version_records_total") == GROUP


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=6), st.data())
def test_abandoned_versions_are_those_without_a_successor(lives: list[tuple[int, int]], data: st.DataObject) -> None:
    """Against a plain model: every life publishes the restored policy and `more` versions, and keeps a checkpoint at one of
    them; what was announced after that one is abandoned for ever."""
    model: set[int] = set()
    carried: list[tuple[int, int]] = []
    restored, newest = -1, -1
    for more, kept in lives:
        first = newest + 1
        carried = lineage.abandoned(carried, restored=restored, republished=first)
        model |= set(range(restored + 1, first))
        newest = first + more
        restored = first + min(kept, more)
    spans = [(0, data.draw(st.integers(0, newest + 3)))]
    spans.append((1, spans[0][1] + data.draw(st.integers(1, 3))))
    assert lineage.touches(spans, carried) == bool({version for _, version in spans} & model)


def test_the_exposed_numbers_keep_the_identity(model_path: str, tmp_path: Path) -> None:
    """read = trained + dropped + dead_lettered + pending, in one process and after a resume, where counters begin anew."""
    cluster = Cluster()
    with cluster.log.changed:
        cluster.log.append(NAMES.trajectories, b"k", b"junk", [("schema", b"1.0")])
    cluster.foreign(0)
    cluster.sample(range(5))
    _, metrics = run_with_metrics(make_run(model_path, tmp_path, steps=2), cluster)

    def parts(metrics: TrainerMetrics) -> tuple[float, dict[str, float], float]:
        resolved: dict[str, float] = {}
        for family in metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "echo_train_records_resolved_total":
                    outcome = sample.labels["outcome"]
                    resolved[outcome] = resolved.get(outcome, 0) + sample.value
        return (
            exposed(metrics, "echo_train_records_read_total"),
            resolved,
            exposed(metrics, "echo_train_records_pending"),
        )

    read, resolved, pending = parts(metrics)
    assert read == sum(resolved.values()) + pending
    assert (resolved["trained"], pending) == (4 * GROUP, GROUP)
    assert (resolved["dropped"], resolved["dead_lettered"]) == (1, 1)
    cluster.sample(range(5, 6))
    _, metrics = run_with_metrics(make_run(model_path, tmp_path, steps=3), cluster)
    read, resolved, pending = parts(metrics)
    assert read == sum(resolved.values()) + pending == 2 * GROUP
    assert (resolved["trained"], pending) == (2 * GROUP, 0)


def test_a_ledger_that_does_not_add_up_stops_the_trainer(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.sample(range(2))
    run = make_run(model_path, tmp_path, steps=1)
    with trainer_of(run, cluster.clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=StopSignal()) as trainer:
        trainer._intake._ledger.read += 1
        with pytest.raises(AssertionError, match="does not add up"):
            trainer.run()


def test_lengths_and_rewards_are_exposed_by_outcome(model_path: str, tmp_path: Path) -> None:
    """Dropped ones too, where they were decoded: here one whose group was incomplete when it became stale."""
    cluster = Cluster()
    cluster.sample(range(2))
    cluster.part_of_a_group(7, completion_ids=list(range(9)), reward=-2.0)
    run = make_run(model_path, tmp_path, steps=1).model_copy(update={"max_staleness": 0})
    _, metrics = run_with_metrics(run, cluster)
    found = {
        (sample.name, sample.labels["outcome"]): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name
        in ("echo_train_completion_tokens_count", "echo_train_completion_tokens_sum", "echo_train_outcome_reward_mean")
    }
    assert found == {
        ("echo_train_completion_tokens_count", "trained"): 2 * GROUP,
        ("echo_train_completion_tokens_sum", "trained"): 2 * GROUP * 4,
        ("echo_train_outcome_reward_mean", "trained"): 0.5,
        ("echo_train_completion_tokens_count", "dropped"): 1,
        ("echo_train_completion_tokens_sum", "dropped"): 9,
        ("echo_train_outcome_reward_mean", "dropped"): -2.0,
    }


def test_lag_tools_are_shown_the_frontier_of_the_last_checkpoint(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.sample(range(5))
    run = make_run(model_path, tmp_path, steps=2)
    train(run, cluster)
    loaded = CheckpointStore(run.checkpoint.dir, RUN_ID, 9).newest()
    assert loaded is not None
    frontier = {(NAMES.trajectories, int(number)): offset for number, offset in loaded.reader["ledger"]["frontier"].items()}
    assert cluster.log.groups == {f"echo-{RUN_ID}": frontier}
    assert sum(frontier.values()) == 4 * GROUP
