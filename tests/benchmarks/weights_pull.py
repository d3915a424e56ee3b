"""How fast a verified pull into host memory is, beside curl from nginx; and whether the server answers while many pull.

curl writes to /dev/null and checks nothing; our pull fills the memory of tensors and checks every byte. Both read the same
content from the page cache, over loopback, one after the other; what is told is the median of the repetitions.
"""

import contextlib
import http.client
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import psutil

from echo.weights.client import Pulled, WeightClient
from echo.weights.manifest import HostTensor
from echo.weights.store import WeightStore

RUN = "pull"
GIB = 2**30
TENSOR_BYTES = 16 * 2**20

_PULLER = """
import os, sys, threading
from echo.weights.client import WeightClient
url, run, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
latest = WeightClient().latest(url, run)
# Pullers are other machines, whose work takes nothing from the server's processors.
os.nice(15)
def pull():
    client = WeightClient(connections=1)
    while True:
        client.pull([latest.url], run_id=run, version=latest.version, manifest_digest=latest.digest, deadline_s=600)
for _ in range(count):
    threading.Thread(target=pull, daemon=True).start()
print("pulling", flush=True)
sys.stdin.read()
"""


class Cost(NamedTuple):
    """Wall and CPU seconds: of who asks, and of who serves."""

    wall_s: float
    client_cpu_s: float
    server_cpu_s: float


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _cpu_s(process: psutil.Process) -> float:
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def process(command: list[str], *, port: int) -> Iterator[psutil.Process]:
    """A server that listens on `port`, for as long as the context."""
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if running.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} does not listen on port {port}, status {running.poll()}")
            time.sleep(0.05)
        yield psutil.Process(running.pid)
    finally:
        running.terminate()
        running.wait(30)


@contextlib.contextmanager
def static_server(folder: Path) -> Iterator[tuple[str, psutil.Process, str]]:
    """nginx over `folder`, or uvicorn with our own chunk response where there is none; says which."""
    port = free_port()
    if shutil.which("nginx") is None:
        application = folder.parent / "static_app.py"
        application.write_text(
            "from starlette.applications import Starlette\n"
            "from starlette.routing import Route\n"
            "from echo.weights.serving import FileChunk\n"
            f"app = Starlette(routes=[Route('/model.bin', lambda request: FileChunk('{folder}/model.bin'))])\n"
        )
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(folder.parent), "static_app:app", "--port", str(port)]
        with process([*command, "--log-level", "error"], port=port) as running:
            yield f"http://127.0.0.1:{port}", running, "uvicorn"
        return
    settings = folder.parent / "nginx.conf"
    settings.write_text(
        f"daemon off; worker_processes 1; pid {folder.parent}/nginx.pid; error_log {folder.parent}/nginx.log; user root;\n"
        "events { worker_connections 64; }\n"
        f"http {{ access_log off; sendfile on; tcp_nopush on; client_body_temp_path {folder.parent}/body;\n"
        f"server {{ listen 127.0.0.1:{port}; root {folder}; }} }}\n"
    )
    with process(["nginx", "-p", str(folder.parent), "-c", str(settings)], port=port) as running:
        yield f"http://127.0.0.1:{port}", running, "nginx"


def publish(store: WeightStore, nbytes: int, chunk_bytes: int) -> None:
    def tensors() -> Iterator[HostTensor]:
        for index in range(nbytes // TENSOR_BYTES):
            data = np.random.default_rng(index).bytes(TENSOR_BYTES)
            yield HostTensor(f"t{index}", "BF16", (TENSOR_BYTES // 2,), memoryview(data))

    store.publish(RUN, 0, 0, tensors(), chunk_bytes=chunk_bytes, keep=2, created=time.time())


def timed(work: Callable[[], Any], server: psutil.Process) -> Cost:
    served, begun, own = _cpu_s(server), time.perf_counter(), os.times()
    work()
    wall = time.perf_counter() - begun
    now = os.times()
    client = sum(now[:4]) - sum(own[:4])
    return Cost(wall, client, _cpu_s(server) - served)


def pull_figures(
    folder: Path, *, nbytes: int, chunk_bytes: int, repetitions: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    store = WeightStore(folder / "store")
    publish(store, nbytes, chunk_bytes)
    static = folder / "static"
    static.mkdir()
    with open(static / "model.bin", "wb") as file:
        for index in range(nbytes // TENSOR_BYTES):
            file.write(np.random.default_rng(index).bytes(TENSOR_BYTES))
    port = free_port()
    serve = [sys.executable, "-m", "echo.cli.weights", "serve", str(store.root), "--port", str(port)]
    with static_server(static) as (static_url, static_process, kind), process(serve, port=port) as server:
        url = f"http://127.0.0.1:{port}"
        client = WeightClient()
        latest = client.latest(url, RUN)

        def pull() -> Pulled:
            return client.pull([latest.url], run_id=RUN, version=latest.version, manifest_digest=latest.digest, deadline_s=600)

        def curl() -> None:
            subprocess.run(["curl", "-sS", "-o", "/dev/null", f"{static_url}/model.bin"], check=True, timeout=600)

        # Once each before: page cache, and the memory that a producer's second pull finds again.
        pull()
        curl()
        ours, theirs = [], []
        for _ in range(repetitions):
            theirs.append(timed(curl, static_process))
            ours.append(timed(pull, server))
            tell(f"pull {ours[-1].wall_s:.3f} s, curl from {kind} {theirs[-1].wall_s:.3f} s")
        health = health_p99_ms(url, seconds=8.0 if nbytes >= GIB else 2.0)
    per_gib = GIB / nbytes

    def median(costs: list[Cost], part: Callable[[Cost], float]) -> float:
        return statistics.median(part(cost) for cost in costs)

    def cpu(costs: list[Cost]) -> dict[str, float]:
        return {
            "client": round(median(costs, lambda cost: cost.client_cpu_s) * per_gib, 3),
            "server": round(median(costs, lambda cost: cost.server_cpu_s) * per_gib, 3),
        }

    return {
        "pull_ratio": round(median(theirs, lambda cost: cost.wall_s) / median(ours, lambda cost: cost.wall_s), 3),
        "pull_s_per_gib": round(median(ours, lambda cost: cost.wall_s) * per_gib, 3),
        "curl_s_per_gib": round(median(theirs, lambda cost: cost.wall_s) * per_gib, 3),
        "pull_cpu_s_per_gib": {"echo": cpu(ours), f"curl from {kind}": cpu(theirs)},
        "static_server": kind,
        "health_p99_ms": round(health, 2),
    }


def health_p99_ms(url: str, *, seconds: float, pullers: int = 8) -> float:
    """Time of /health, 99 of 100 are faster, while `pullers` pull all the time."""
    running = subprocess.Popen(
        [sys.executable, "-c", _PULLER, url, RUN, str(pullers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    times = []
    try:
        assert running.stdout is not None
        running.stdout.readline()
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begun = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            times.append(1000 * (time.perf_counter() - begun))
            time.sleep(0.01)
        connection.close()
        if running.poll() is not None:
            raise RuntimeError("the pullers ended, see their error above")
    finally:
        running.kill()
        running.communicate()
    return statistics.quantiles(times, n=100)[98]
