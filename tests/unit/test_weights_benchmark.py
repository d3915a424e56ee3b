"""The weights' benchmark judges by its targets, and its fast parts run. Numbers want a quiet machine."""

from pathlib import Path

import httpx
import pytest

from echo.weights.store import WeightStore
from tests.benchmarks import weights, weights_pull
from tests.benchmarks.weights_broadcast import Network, Place, broadcast, origin, publish

GOOD = {
    "pull_ratio": 0.9,
    "health_p99_ms": 20.0,
    "delta_ratio": 0.03,
    "delta_bit_identical": True,
    "broadcast_seconds": {"1": 10.0, "2": 99.0, "8": 14.0},
    "origin_egress_models": 2.0,
}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("pull_ratio", 0.89, "pull_ratio is 0.89, to be at least 0.9"),
        ("pull_ratio", float("nan"), "pull_ratio is nan, to be at least 0.9"),
        ("health_p99_ms", 20.5, "health_p99_ms is 20.5, to be at most 20"),
        ("delta_ratio", 0.031, "delta_ratio is 0.031, to be at most 0.03"),
        ("delta_bit_identical", False, "delta_bit_identical is false"),
        ("broadcast_seconds", {"1": 10.0, "8": 14.1}, "broadcast_seconds 8 / 1 is 1.41, to be at most 1.4"),
        ("origin_egress_models", 2.1, "origin_egress_models is 2.1, to be at most 2"),
    ],
)
def test_what_falls_short_is_named(name: str, value: object, said: str) -> None:
    """And nothing else; what was not measured is not judged."""
    assert weights.shortfalls(GOOD) == []
    assert weights.shortfalls({}) == []
    assert weights.shortfalls(GOOD | {name: value}) == [said]


def test_a_broadcast_runs_without_namespaces(tmp_path: Path) -> None:
    """Real processes that pace themselves: the pullers share what the origin sends."""
    nbytes = 2**20
    store = WeightStore(tmp_path / "store")
    publish(store, nbytes, 2**15)
    net = Network([Place((), "127.0.0.1")] * 3, nbytes * 2, "own shaper")
    with origin(store, net) as url:
        found = broadcast(url, net, 2, peers=True)
    assert nbytes <= found["sent_bytes"] <= 2 * nbytes
    assert found["sent_bytes"] + found["peer_bytes"] >= 2 * nbytes
    assert found["seconds"] > 0.4


def test_a_static_server_is_there_to_compare_with(tmp_path: Path) -> None:
    """nginx, or what stands for it, serves the file that curl fetches."""
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "model.bin").write_bytes(b"model")
    with weights_pull.static_server(folder) as (url, _, kind):
        assert httpx.get(f"{url}/model.bin").content == b"model"
    assert kind in ("nginx", "uvicorn")
