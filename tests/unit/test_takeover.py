"""A trainer takes over from another, or from itself in its last life: nothing that was saved is lost, nothing is told twice."""

import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from consumers.wiring import trainer_of
from echo.errors import FencedError
from echo.log import LogTransactions
from echo.metrics import TrainerMetrics
from echo.process import StopSignal
from tests.fakes.log import FakeTransactions
from tests.helpers import RUN_ID
from tests.unit.test_train_loop import Cluster, make_run, model_path, train

__all__ = ["model_path"]

pytestmark = pytest.mark.usefixtures("own_process")


class Killed(BaseException):
    """As kill -9 would: nobody handles it."""


def test_who_takes_over_goes_on_from_the_last_that_the_other_saved(model_path: str, tmp_path: Path) -> None:
    """The first trains on while the second starts, and has removed older checkpoints when it is fenced."""
    cluster = Cluster()
    cluster.sample(range(40))
    run = make_run(model_path, tmp_path, steps=20, checkpoint={"every": 1, "keep": 2})
    starting, fence = threading.Event(), threading.Event()
    taken_over_at: list[int] = []

    def open_control() -> LogTransactions:
        starting.set()
        assert fence.wait(60)
        return FakeTransactions(cluster.log, transactional_id=RUN_ID)

    def take_over() -> None:
        clients = cluster.clients._replace(open_control=open_control)
        with trainer_of(run, clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=StopSignal()) as second:
            taken_over_at.append(second.step)

    thread = threading.Thread(target=take_over)

    def look() -> None:
        if first.step == 3 and not starting.is_set():
            thread.start()
            assert starting.wait(60)
        if first.step == 7:
            fence.set()

    with trainer_of(run, cluster.clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=StopSignal()) as first:
        first._check_children = look
        with pytest.raises(FencedError):
            first.run()
        saved = max(int(path.name.removeprefix("step-")) for path in run.checkpoint.dir.glob("step-*"))
    thread.join(60)
    assert taken_over_at == [saved]
    assert saved >= 6


def test_records_that_were_dropped_without_a_step_are_told_once(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed, it drops records, takes no step, and dies in its last checkpoint, after the journal's line about them."""
    cluster = Cluster()
    cluster.sample(range(4))
    train(make_run(model_path, tmp_path, steps=2), cluster)
    run = make_run(model_path, tmp_path, steps=4)
    cluster.foreign(60)
    stop = StopSignal()
    metrics = TrainerMetrics(RUN_ID, CollectorRegistry())

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    def look() -> None:
        if metrics.registry.get_sample_value(
            "echo_train_records_resolved_total", {"run": RUN_ID, "outcome": "dropped", "reason": "foreign_run"}
        ):
            stop.request()

    with trainer_of(run, cluster.clients, metrics=metrics, stop=stop) as trainer:
        trainer._check_children = look
        monkeypatch.setattr(trainer._checkpoints, "save", die)
        with pytest.raises(Killed):
            trainer.run()
    monkeypatch.undo()
    cluster.sample(range(10, 14))
    train(run, cluster)
    assert cluster.counts(run).trained == 4 * 8
