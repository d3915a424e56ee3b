"""Scoring survives whatever a scorer does: one completion pays, the others are scored, and nothing leaks or stays behind."""

import errno
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import sympy

from echo.errors import TaskError
from producers.tasks import scoring, wire
from producers.tasks.base import Score
from producers.tasks.scoring import ScorerPool
from tests.fakes.scorers import ScorerTask

GOOD = Score(1.0, {"length": 4.0}, "ok")


@pytest.fixture
def pool() -> Iterator[ScorerPool]:
    """With more time than any scorer takes that does not hang, on a busy machine, too."""
    pool = ScorerPool(ScorerTask(), workers=2, timeout_s=30.0, memory_mib=256)
    yield pool
    pool.close()


@pytest.fixture
def hasty() -> Iterator[ScorerPool]:
    pool = ScorerPool(ScorerTask(), workers=2, timeout_s=2.0, memory_mib=256)
    yield pool
    pool.close()


def _one(pool: ScorerPool, text: str, **reference: object) -> Score:
    return pool.score([(text, reference)])[0]


def test_the_time_that_an_engine_takes_to_be_built_is_not_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are started before the engine and are listened to after it; they import their scorer meanwhile."""
    with monkeypatch.context() as built_slowly:
        built_slowly.setattr(scoring, "START_TIMEOUT_S", 0.0)
        pool = ScorerPool(ScorerTask(), workers=2, timeout_s=30.0, memory_mib=256)
    try:
        replies = [worker.replies for worker in pool._workers]
        for reply in replies:
            assert select.select([reply], [], [], 60.0)[0], "it was told what to import and says that it is ready"
        pool.wait_ready()
        assert _one(pool, "good") == GOOD
    finally:
        pool.close()


def test_scores_come_in_order_with_their_components(pool: ScorerPool) -> None:
    items = [(f"{index}", {"reward": index}) for index in range(300)]
    assert pool.score(items) == [Score(float(i), {"length": float(len(str(i)))}, "ok") for i in range(300)]
    assert pool.score([]) == []


def test_a_reference_arrives_as_it_was_sent(pool: ScorerPool) -> None:
    """Tuples stay tuples and keys keep their type: verifiers compare with ==."""
    reference = {"pair": (1, (2.5, "x")), "list": [1, (2,)], 3: None, "flag": True}
    assert pool.score([("types", reference)])[0].reward == 1.0  # type: ignore[list-item]


def test_more_than_the_pipes_hold_is_scored(pool: ScorerPool) -> None:
    items = [("good", {"padding": "x" * 300_000}) for _ in range(40)]
    assert pool.score(items) == [GOOD] * 40


def test_a_timeout_costs_that_completion_alone(hasty: ScorerPool) -> None:
    """Its worker is killed, and the rest of its portion goes to a new one."""
    texts = ["good"] * 8 + ["hang"] + ["good"] * 23
    scores = hasty.score([(text, {}) for text in texts])
    assert scores.pop(8) == Score(0.0, {}, "timeout")
    assert scores == [GOOD] * 31
    assert _one(hasty, "good") == GOOD


@pytest.mark.parametrize("text", ["raise", "exit", "die", "hog", "creep", "recurse", "nan", "infinity", "no number", "forge"])
def test_an_error_costs_that_completion_alone(pool: ScorerPool, text: str) -> None:
    """Exceptions, exits, deaths, memory, rewards that are no numbers, and nonsense on the pipe."""
    scores = pool.score([("good", {}), (text, {}), ("good", {})])
    assert [score.outcome for score in scores] == ["ok", "error", "ok"]
    assert scores[1].reward == 0.0
    assert _one(pool, "good") == GOOD


def test_a_reply_for_another_completion_is_not_believed() -> None:
    """A scorer that answers in its worker's name loses the worker, and gains nothing for the others."""
    pool = ScorerPool(ScorerTask(), workers=1, timeout_s=5, memory_mib=256)
    try:
        scores = pool.score([(text, {}) for text in ["good", "forge reply", *["good"] * 6]])
    finally:
        pool.close()
    assert scores == [GOOD, Score(0.0, {}, "error"), *[GOOD] * 6]


def test_what_a_scorer_prints_and_reads_does_not_reach_the_pipes(pool: ScorerPool) -> None:
    assert pool.score([("print", {}), ("good", {})]) == [Score(1.0, {}, "ok"), GOOD]


def test_the_environment_and_the_working_directory_are_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("https_proxy", "http://proxy")
    pool = ScorerPool(ScorerTask(), timeout_s=5, memory_mib=256)
    try:
        assert _one(pool, "look").reward == 1.0
    finally:
        pool.close()


def test_no_file_can_be_written(pool: ScorerPool, tmp_path: Path) -> None:
    target = tmp_path / "file"
    assert _one(pool, "write", path=str(target)).reward == -1.0
    assert _one(pool, "write here").reward == -1.0
    assert not target.exists() or target.read_text() == ""


_WITHOUT_LANDLOCK = """
import pathlib, sys
from producers.tasks import sandbox
sandbox._landlock = lambda libc: []
assert "no file growth" in sandbox.confine()
try:
    pathlib.Path(sys.argv[1]).write_text("written")
except OSError as error:
    print(error.errno)
"""


def test_files_stay_empty_on_a_kernel_without_landlock(tmp_path: Path) -> None:
    target = tmp_path / "file"
    argv = [sys.executable, "-c", _WITHOUT_LANDLOCK, str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == [str(errno.EFBIG)]
    assert target.read_text() == ""


def _landlock(abi: int) -> pytest.MarkDecorator:
    if sys.platform == "linux":
        import ctypes

        present = ctypes.CDLL(None).syscall(444, None, 0, 1)
    else:
        present = -1
    return pytest.mark.skipif(present < abi, reason=f"this kernel has no Landlock of version {abi}")


@_landlock(1)
def test_no_file_can_be_removed_and_no_program_executed(pool: ScorerPool, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    assert _one(pool, "remove", path=str(precious)).reward == -1.0
    assert precious.read_text() == "kept"
    assert _one(pool, "execute").reward == -1.0


@_landlock(4)
def test_no_connection_can_be_made(pool: ScorerPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert _one(pool, "connect", port=server.getsockname()[1]).reward == -1.0


@_landlock(6)
def test_no_other_process_can_be_signalled(pool: ScorerPool) -> None:
    assert _one(pool, "signal", pid=os.getpid()).reward == -1.0


@pytest.mark.parametrize(
    ("scorer", "memory_mib", "said"),
    [
        ("tests.fakes.nowhere:score", 256, "No module named 'tests.fakes.nowhere'"),
        ("tests.fakes.scorers:scored", 256, "has no attribute 'scored'"),
    ],
)
def test_a_scorer_that_can_not_be_loaded_is_told_with_its_reason(scorer: str, memory_mib: int, said: str) -> None:
    pool = ScorerPool(ScorerTask(scorer), timeout_s=1, memory_mib=memory_mib)
    with pytest.raises(TaskError, match=said):
        pool.wait_ready()
    with pytest.raises(TaskError, match="closed"):
        pool.score([("good", {})])


def test_a_worker_that_does_not_even_start_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho no such module >&2\nexit 7\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    pool = ScorerPool(ScorerTask(), timeout_s=1, memory_mib=256)
    with pytest.raises(TaskError, match="ended with status 7: no such module"):
        pool.wait_ready()


def test_a_reference_that_is_no_plain_data_is_refused(pool: ScorerPool) -> None:
    with pytest.raises(TaskError, match="object is not plain data"):
        _one(pool, "good", thing=object())
    assert _one(pool, "good") == GOOD


def test_a_worker_killed_between_calls_is_replaced(pool: ScorerPool) -> None:
    pool.wait_ready()
    for worker in pool._workers:
        os.kill(worker.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert pool.score([("good", {})] * 9) == [GOOD] * 9


def test_close_ends_the_workers_and_can_be_repeated() -> None:
    pool = ScorerPool(ScorerTask(), workers=2, timeout_s=1, memory_mib=256)
    pool.wait_ready()
    watches = [os.pidfd_open(worker.pid) for worker in pool._workers]
    folder = Path(pool._folder.name)
    pool.close()
    pool.close()
    assert all(_ended(watch) for watch in watches)
    assert not folder.exists()


def _ended(watch: int, timeout_s: float = 10.0) -> bool:
    """Whether a process ends in time; a pidfd turns readable then."""
    try:
        return bool(select.select([watch], [], [], timeout_s)[0])
    finally:
        os.close(watch)


_PARENT = """
import sys
from producers.tasks.scoring import ScorerPool
from tests.fakes.scorers import ScorerTask
pool = ScorerPool(ScorerTask(), timeout_s=600, memory_mib=256)
pool.wait_ready()
print(pool._workers[0].pid, file=sys.stderr, flush=True)
pool.score([(sys.argv[1], {"listener": int(sys.argv[2])})])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a child with its parent on Linux only")
@pytest.mark.parametrize("deed", ["hang", "hang deaf"])
def test_a_worker_dies_with_a_killed_parent(deed: str) -> None:
    """Even in the middle of a scorer that hangs, or that ignores what signals it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(30)
        argv = [sys.executable, "-c", _PARENT, deed, str(listener.getsockname()[1])]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as parent:
            try:
                assert parent.stderr is not None
                watch = os.pidfd_open(int(parent.stderr.readline()))
                assert listener.recv(100) == b"scoring"
            finally:
                parent.kill()
        assert _ended(watch)


def test_numbers_of_any_size_and_fractions_cross_as_they_are() -> None:
    """Items of reasoning-gym's codeio and gsm_symbolic hold them: the first one that came ended its producer."""
    reference = {"large": [2**64, -(2**63) - 1, 10**5000], "edge": (2**64 - 1, -(2**63)), "part": Fraction(1, 3 * 2**70)}
    crossed = wire.decode(wire.encode(reference)[wire.LENGTH.size :])
    assert crossed == reference
    assert isinstance(crossed["part"], Fraction)


def test_numbers_of_other_libraries_cross_as_plain_ones() -> None:
    """codeio runs code that uses them."""
    reference = [sympy.Integer(3), sympy.Rational(1, 3), sympy.Float(0.5), np.int64(4), np.float32(0.25), np.str_("x")]
    crossed = wire.decode(wire.encode(reference)[wire.LENGTH.size :])
    assert crossed == [3, Fraction(1, 3), 0.5, 4, 0.25, "x"]
    assert [type(one) for one in crossed] == [int, Fraction, float, int, float, str]


def test_a_frame_says_what_is_no_plain_data() -> None:
    with pytest.raises(TaskError, match="set is not plain data"):
        wire.encode({"answers": {1, 2}})
