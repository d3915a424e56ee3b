"""Ranks that only wait notice that the other one is gone: killed at once, halted after the timeout."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.processes import Process, warm_up
from tests.eventually import eventually
from tests.parallel.launch import free_port

TIMEOUT_S = 4
PATIENCE_S = 60


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Process]]:
    """Two ranks; a parameter is one more argument for both."""
    warm_up()
    port = str(free_port())
    more = [request.param] if hasattr(request, "param") else []
    pair = [
        Process(
            f"rank {rank}", "tests.parallel.lonely", [str(rank), port, str(TIMEOUT_S), *more], log_path=tmp_path / f"{rank}.log"
        )
        for rank in (0, 1)
    ]
    yield pair
    for rank in pair:
        rank.kill()


@pytest.mark.parametrize(("lost", "how"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)])
def test_the_other_rank_ends_with_an_error(ranks: list[Process], lost: int, how: signal.Signals) -> None:
    for rank in ranks:
        eventually(lambda rank=rank: "together\n" in rank.log_path.read_text(), "ranks that met", timeout_s=PATIENCE_S)
    ranks[lost].send(how)
    left = ranks[1 - lost]
    assert left.wait(PATIENCE_S) == 3, left.tail()
    assert f"RankError: {'another rank is gone' if lost == 1 else 'rank 1 lost rank 0'}" in left.log_path.read_text()


@pytest.mark.parametrize("ranks", ["mistake"], indirect=True)
def test_the_death_of_the_thread_that_keeps_company_ends_both_ranks(ranks: list[Process]) -> None:
    for rank, reason in zip(ranks, ("BackgroundError: ranks died", "RankError: rank 1 lost rank 0"), strict=True):
        assert rank.wait(PATIENCE_S) == 3, rank.tail()
        assert reason in rank.log_path.read_text()
