"""`accelerate launch` as a person would type it, on the CPU of this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def free_port() -> int:
    """Where ranks may meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(module: str, *arguments: str, log_path: Path, ranks: int = 2) -> subprocess.Popen[bytes]:
    """Start `module` on so many ranks; what they say goes to `log_path`."""
    port = free_port()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes"]
    command += [str(ranks), "--main_process_port", str(port), "--mixed_precision", "no", "--dynamo_backend", "no"]
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [*command, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
