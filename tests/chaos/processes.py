"""Real processes for the kill tests, forked from one that has imported torch and transformers already.

A trainer's imports take some five seconds; forked after them, and before any thread or Kafka client exists, a life begins at
once. What runs is the real command of each side. Refuses to leave anything behind: a child ends with the process that forked
it, and that one ends with the tests.
"""

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

import psutil

from echo.process import PARENT_VARIABLE
from tests.conftest import ROOT

_context = multiprocessing.get_context("forkserver")
# One thread each, as on a machine that is shared. Read when the libraries are loaded, so they belong to the forking process.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
_warm: list[bool] = []


def warm_up() -> None:
    """Start the process that forks the others. Once is enough."""
    if _warm:
        return
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    folder = Path.cwd()
    os.environ.update(_ENVIRONMENT)
    # The forking process finds the tests from where it starts.
    os.chdir(ROOT)
    try:
        _context.set_forkserver_preload(["tests.chaos.preload"])
        forkserver.ensure_running()
    finally:
        os.chdir(folder)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    _warm.append(True)


class Process:
    """One life: `module`'s main() with these arguments, its output in `log_path`."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], *, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        log_path.touch()
        self._process = _context.Process(target=_live, args=(module, list(arguments), str(log_path)), daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        """The exit status (negative: the signal that ended it); None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int | None:
        self._process.join(timeout_s)
        return self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def resident_mib(self) -> float:
        """Resident memory; 0 once it has ended."""
        try:
            return float(psutil.Process(self._process.pid).memory_info().rss / 2**20)
        except psutil.NoSuchProcess:
            return 0.0

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        self.send(signal.SIGKILL)
        self._process.join()

    def tail(self, lines: int = 20) -> str:
        status = self.poll()
        text = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        return f"--- {self.log_path.name} ({'runs' if status is None else f'ended with status {status}'})\n{text}"


def _live(module: str, arguments: list[str], log_path: str) -> None:
    os.setsid()
    output = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ[PARENT_VARIABLE] = str(os.getppid())
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()
