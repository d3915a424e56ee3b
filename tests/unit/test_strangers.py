"""A thousand strangers at each of Echo's ports at once: some send nothing, some drip, some send without an end.

The process stays within its descriptors, threads and memory, Prometheus and pullers are served meanwhile, and the strangers'
connections are closed in the end.
"""

import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from echo.weights.manifest import digest
from tests.fakes.ports import DATA, NEEDED_FILES, TOKEN

COUNT = 1000
MIB = 2**20
# What each sends first, and then over and over, until its connection is closed. No token.
KINDS = {
    "idle": (b"", b""),
    "dripping head": (b"GET /metrics HTTP/1.1\r\nX-Drip: ", b"x"),
    "dripping body": (b"POST /v1/runs/run/peers/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b"x"),
    "huge head": (b"GET /metrics HTTP/1.1\r\nX-Huge: ", b"x" * MIB),
    "huge body": (b"POST /v1/runs/run/peers/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 400000000\r\n\r\n", b"x" * MIB),
    "huge chunked body": (
        b"POST /v1/runs/run/peers/0 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n17D78400\r\n",
        b"x" * MIB,
    ),
}


class Strangers:
    """Their connections, in one thread."""

    def __init__(self, port: int, count: int) -> None:
        self._open: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        kinds = list(KINDS.values())
        for number in range(count):
            first, more = kinds[number % len(kinds)]
            one = socket.create_connection(("127.0.0.1", port), timeout=10)
            one.setblocking(False)
            self._open[one] = more
            self._selector.register(one, selectors.EVENT_READ)
            self._send(one, first)
        self._dripped = time.monotonic()

    def turn(self) -> int:
        """Send what there is to send, and find out which connections were closed. Returns how many are open."""
        drips = time.monotonic() - self._dripped > 0.5
        if drips:
            self._dripped = time.monotonic()
        for one, more in list(self._open.items()):
            if len(more) > 1 or drips:
                self._send(one, more)
        for key, _ in self._selector.select(0):
            assert isinstance(key.fileobj, socket.socket)
            try:
                if not key.fileobj.recv(4096):
                    self._closed(key.fileobj)
            except BlockingIOError:
                continue
            except OSError:
                self._closed(key.fileobj)
        return len(self._open)

    def close(self) -> None:
        for one in list(self._open):
            self._closed(one)
        self._selector.close()

    def _send(self, one: socket.socket, data: bytes) -> None:
        try:
            one.send(data)
        except BlockingIOError:
            return
        except OSError:
            self._closed(one)

    def _closed(self, one: socket.socket) -> None:
        if self._open.pop(one, None) is not None:
            self._selector.unregister(one)
            one.close()


@pytest.fixture(autouse=True)
def own_descriptors() -> Iterator[None]:
    """This process holds a thousand connections itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def serving(kind: str, descriptors: int, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    command = [sys.executable, "-m", "tests.fakes.ports", kind, str(descriptors), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        try:
            yield int(running.stdout.readline()), psutil.Process(running.pid)
            running.stdin.close()
            assert running.wait(20) == 0, "it ends when it is asked to"
        finally:
            running.kill()


def ask(kind: str, port: int) -> None:
    """What Prometheus or a puller does, over a connection of its own."""
    known = {"Authorization": f"Bearer {TOKEN}"}
    path = "/metrics" if kind == "metrics" else f"/v1/chunks/{'0' * 64 if kind == 'peers' else digest(DATA)}"
    answer = httpx.get(f"http://127.0.0.1:{port}{path}", headers=known, timeout=10)
    assert answer.status_code == 200
    if kind == "metrics":
        assert f"files {float(NEEDED_FILES)}" in answer.text
    else:
        assert answer.content == DATA


@pytest.mark.parametrize(
    ("kind", "descriptors", "connections"),
    [
        ("metrics", 256, 64),
        # Room for all of them: they end by time alone.
        pytest.param("weights", 4096, 1024, id="weights"),
        pytest.param("weights", 256, 64, id="weights-crowded"),
        ("peers", 256, 64),
    ],
)
def test_a_thousand_strangers_cost_nobody_anything(kind: str, descriptors: int, connections: int, tmp_path: Path) -> None:
    with serving(kind, descriptors, tmp_path / "store") as (port, process):
        ask(kind, port)
        before = process.memory_info().rss
        strangers = Strangers(port, COUNT)
        try:
            deadline = time.monotonic() + 60
            files, threads, memory, slowest, asked = 0, 0, 0, 0.0, 0
            while (left := strangers.turn()) or asked < 5:
                assert time.monotonic() < deadline, f"{left} strangers are still connected"
                begun = time.monotonic()
                ask(kind, port)
                slowest, asked = max(slowest, time.monotonic() - begun), asked + 1
                files = max(files, process.num_fds())
                threads = max(threads, process.num_threads())
                memory = max(memory, process.memory_info().rss - before)
        finally:
            strangers.close()
        print(f"{kind}: {files} descriptors, {threads} threads, {memory / MIB:.0f} MiB more, slowest answer {slowest:.2f} s")
        assert files < min(connections + 100, descriptors), "descriptors"
        # The event loop's, those that read files and run routes, and what the libraries have.
        assert threads < 70, "threads"
        assert memory < 128 * MIB, "memory"
        assert slowest < 5, "Prometheus, or a puller, waits"
