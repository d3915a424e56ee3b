"""How long a version takes to N producers where every machine has the same narrow uplink: time(N) / time(1), with peers.

Each node, the origin too, is a network namespace of its own with a shaped uplink (tc tbf) where this host lets us make them
(root, iproute2); else a process whose server paces itself (`weights.max_egress_bytes_per_s`, `own shaper` in the result).
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from echo.weights.manifest import HostTensor
from echo.weights.store import WeightStore
from echo.weights.urls import TOKEN_VARIABLE
from tests.benchmarks.weights_node import TOKEN

RUN = "broadcast"
PORT = 9103
START_S = 1.0
DEADLINE_S = 600.0


class Place(NamedTuple):
    """Where a node runs: what goes before its command, and its address."""

    prefix: tuple[str, ...]
    host: str


class Network(NamedTuple):
    """The first place is the origin's. uplink: what each server has to pace itself to, None where the network does it."""

    places: list[Place]
    uplink: float | None
    kind: str


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@contextlib.contextmanager
def network(nodes: int, uplink: float) -> Iterator[Network]:
    """`nodes` places on one switch, each with an uplink of so many bytes per second."""
    name = f"eb{secrets.token_hex(2)}"
    made = contextlib.ExitStack()
    with made:
        places = []
        try:
            _run("ip", "link", "add", name, "type", "bridge")
            made.callback(_run, "ip", "link", "del", name)
            _run("ip", "addr", "add", "10.213.0.254/24", "dev", name)
            _run("ip", "link", "set", name, "up")
            for index in range(nodes):
                space, outside = f"{name}-{index}", f"{name}v{index}"
                _run("ip", "netns", "add", space)
                made.callback(_run, "ip", "netns", "del", space)
                _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
                _run("ip", "link", "set", outside, "master", name, "up")
                inside = ("ip", "-n", space)
                _run(*inside, "addr", "add", f"10.213.0.{index + 1}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _run(*inside, "link", "set", device, "up")
                rate = ("rate", f"{int(8 * uplink)}bit", "burst", "64kb", "latency", "200ms")
                _run("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
                places.append(Place(("ip", "netns", "exec", space), f"10.213.0.{index + 1}"))
            yield_value = Network(places, None, "network namespaces, tc tbf")
        except (OSError, subprocess.CalledProcessError):
            made.close()
            yield_value = Network([Place((), "127.0.0.1")] * nodes, uplink, "own shaper")
        yield yield_value


def publish(store: WeightStore, nbytes: int, chunk_bytes: int) -> None:
    parts = 8
    tensors = [
        HostTensor(f"t{part}", "U8", (nbytes // parts,), memoryview(np.random.default_rng(part).bytes(nbytes // parts)))
        for part in range(parts)
    ]
    store.publish(RUN, 0, 0, tensors, chunk_bytes=chunk_bytes, keep=2, created=time.time())


@contextlib.contextmanager
def origin(store: WeightStore, net: Network) -> Iterator[str]:
    place = net.places[0]
    command = [*place.prefix, sys.executable, "-m", "echo.cli.weights", "serve", str(store.root)]
    command += ["--host", place.host, "--port", str(PORT if place.prefix else 0), "--ready-fd", "1"]
    if net.uplink is not None:
        command += ["--max-egress", str(net.uplink)]
    environment = os.environ | {TOKEN_VARIABLE: TOKEN.get_secret_value()}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the weight server ended with status {process.wait(10)}: {' '.join(command)}")
        yield f"http://{place.host}:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=30)


def sent_bytes(url: str) -> float:
    text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN.get_secret_value()}"}).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("echo_weights_sent_bytes_total"))


def broadcast(url: str, net: Network, pullers: int, *, peers: bool) -> dict[str, Any]:
    """Seconds from the common start to the last puller's end, and what was sent by whom."""
    before = sent_bytes(url)
    processes = []
    try:
        for place in net.places[1 : pullers + 1]:
            command = [*place.prefix, sys.executable, "-m", "tests.benchmarks.weights_node", url, RUN]
            if peers:
                command += ["--peers", place.host]
                if net.uplink is not None:
                    command += ["--uplink", str(net.uplink)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("a puller did not come up, see its error above")
        start = time.time() + START_S
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{start}\n")
            process.stdin.flush()
        results = []
        for process in processes:
            assert process.stdout is not None
            results.append(json.loads(process.stdout.readline()))
    finally:
        for process in processes:
            process.communicate(timeout=30)
    return {
        "seconds": max(result["ended"] for result in results) - start,
        "sent_bytes": sent_bytes(url) - before,
        "peer_bytes": sum(result["peer_bytes"] for result in results),
        "retries": sum(result["retries"] for result in results),
        "cpu_s": sum(result["cpu_s"] for result in results),
    }


def broadcast_figures(
    folder: Path, *, nbytes: int, chunk_bytes: int, uplink: float, counts: Sequence[int] = (1, 2, 4, 8), without: int = 4
) -> dict[str, Any]:
    """without: also that many pullers without peers, for comparison; 0 leaves it out."""
    store = WeightStore(folder / "store")
    publish(store, nbytes, chunk_bytes)
    found: dict[str, Any] = {"broadcast_seconds": {}, "broadcast_egress_models": {}}
    with network(max(counts) + 1, uplink) as net, origin(store, net) as url:
        for count in counts:
            one = broadcast(url, net, count, peers=True)
            found["broadcast_seconds"][str(count)] = round(one["seconds"], 3)
            found["broadcast_egress_models"][str(count)] = round(one["sent_bytes"] / nbytes, 3)
            found.setdefault("broadcast_retries", {})[str(count)] = one["retries"]
            found.setdefault("broadcast_cpu_s", {})[str(count)] = round(one["cpu_s"], 2)
        if without:
            one = broadcast(url, net, without, peers=False)
            found["without_peers"] = {
                "pullers": without,
                "seconds": round(one["seconds"], 3),
                "egress_models": round(one["sent_bytes"] / nbytes, 3),
            }
        found["broadcast_network"] = net.kind
    found["origin_egress_models"] = max(found["broadcast_egress_models"].values())
    found["broadcast_model_bytes"], found["broadcast_uplink_bytes_per_s"] = nbytes, uplink
    return found
