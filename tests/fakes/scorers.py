"""Scorers that misbehave, each in the way that its completion names: what a worker of `producers.tasks.scoring` must bear.

Imported by scoring workers, so nothing here may be heavy. Run it only confined.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from producers.tasks import wire


class ScorerTask:
    """As much of a task as a scorer pool needs."""

    name = "test"

    def __init__(self, scorer: str = "tests.fakes.scorers:score", **params: Any) -> None:
        self.scorer = scorer
        self.scorer_params = params

    def prompts(self, seed: int) -> Any:
        raise NotImplementedError("only scored")

    def prompt(self, seed: int, index: int) -> Any:
        raise NotImplementedError("only scored")


def score(completion: str, reference: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """1 for "good"; 1 or 0 for what a deed succeeded in, which its completion names; else what the reference says."""
    deed = _DEEDS.get(completion)
    if deed is None:
        return float(reference.get("reward", completion == "good")), {"length": float(len(completion))}
    try:
        return float(deed(reference)), {}
    except OSError as error:
        return -1.0, {"errno": float(error.errno or 0)}


def _hang(reference: Mapping[str, Any]) -> float:
    """Tells a test that listens, then hangs."""
    if "listener" in reference:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"scoring", ("127.0.0.1", reference["listener"]))
    threading.Event().wait()
    return 0.0


def _hang_deaf(reference: Mapping[str, Any]) -> float:
    """The same, ignoring every signal that can be ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return _hang(reference)


def _hog(reference: Mapping[str, Any]) -> float:
    return float(len(bytearray(1 << 40)))


def _creep(reference: Mapping[str, Any]) -> float:
    kept = []
    while True:
        kept.append(bytearray(8 << 20))


def _print(reference: Mapping[str, Any]) -> float:
    print("\x00" * 5000, flush=True)
    print("noise", file=sys.stderr, flush=True)
    os.write(1, b"more noise")
    sys.stdin.read()
    return 1.0


def _forge(reference: Mapping[str, Any]) -> float:
    """Writes nonsense into every descriptor that is open."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\xff" * 64)
        except OSError:
            continue
    return 1.0


def _forge_reply(reference: Mapping[str, Any]) -> float:
    """Answers in the worker's name, with a reward, for the first of the batch: wherever a descriptor is open."""
    reply = wire.encode_reply(wire.Reply(0, None, 100.0, {}))
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, reply)
        except OSError:
            continue
    return 0.0


def _remove(reference: Mapping[str, Any]) -> float:
    Path(reference["path"]).unlink()
    return 1.0


def _write(reference: Mapping[str, Any]) -> float:
    Path(reference["path"]).write_text("written")
    return 1.0


def _write_here(reference: Mapping[str, Any]) -> float:
    Path("note").write_text("written")
    return 1.0


def _execute(reference: Mapping[str, Any]) -> float:
    subprocess.run([sys.executable, "-c", "1"], check=True, timeout=20)
    return 1.0


def _connect(reference: Mapping[str, Any]) -> float:
    socket.create_connection(("127.0.0.1", reference["port"]), timeout=5).close()
    return 1.0


def _signal(reference: Mapping[str, Any]) -> float:
    os.kill(reference["pid"], 0)
    return 1.0


def _look(reference: Mapping[str, Any]) -> float:
    """1 where no variable, and no file in the working directory, is beyond what the pool gives."""
    allowed = {"PYTHONPATH", "HOME", "LANG", "LC_CTYPE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
    return float(set(os.environ) <= allowed and not os.listdir())


def _types(reference: Mapping[str, Any]) -> float:
    return float(reference == {"pair": (1, (2.5, "x")), "list": [1, (2,)], 3: None, "flag": True})


_DEEDS = {
    "hang": _hang,
    "hang deaf": _hang_deaf,
    "hog": _hog,
    "creep": _creep,
    "die": lambda reference: os._exit(3),
    "exit": lambda reference: sys.exit(3),
    "raise": lambda reference: 1 / 0,
    "recurse": lambda reference: _DEEDS["recurse"](reference),
    "nan": lambda reference: float("nan"),
    "infinity": lambda reference: float("inf"),
    "no number": lambda reference: "much",
    "print": _print,
    "forge": _forge,
    "forge reply": _forge_reply,
    "remove": _remove,
    "write": _write,
    "write here": _write_here,
    "execute": _execute,
    "connect": _connect,
    "signal": _signal,
    "look": _look,
    "types": _types,
}
