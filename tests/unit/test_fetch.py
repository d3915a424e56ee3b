"""From announcements to policies: what is held is used, and an adapter comes with the full version it is for, once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from echo.config import WeightsConfig
from echo.control import Announcement
from echo.errors import ConfigError, WeightsError
from echo.metrics import ProducerMetrics, WeightsMetrics
from echo.weights.client import WeightClient
from echo.weights.manifest import Adapter, Canary, HostTensor
from echo.weights.server import WeightServer, create_app
from echo.weights.store import Published, WeightStore
from echo.weights.transport import Access
from producers.fetch import Fetcher
from producers.wiring import _peer_node

RUN = "run"
FULL_BYTES, ADAPTER_BYTES = 200_000, 2_000


def tensors(name: str, nbytes: int, seed: int) -> list[HostTensor]:
    data = bytearray(np.random.default_rng(0).bytes(nbytes))
    data[:: 1 + nbytes // 10] = bytes([seed]) * len(data[:: 1 + nbytes // 10])
    return [HostTensor(name, "U8", (nbytes,), memoryview(bytes(data)))]


class World:
    def __init__(self, folder: Path) -> None:
        self.store = WeightStore(folder)
        app = create_app(self.store, token=None, metrics=WeightsMetrics(CollectorRegistry()))
        self.server = WeightServer(app, host="127.0.0.1", port=0).start()
        self.metrics = ProducerMetrics(RUN, "p0", CollectorRegistry())
        client = WeightClient(first_wait_s=0.01, longest_wait_s=0.02, attempts=2)
        self.fetcher = Fetcher(client, metrics=self.metrics, deadline_s=30)

    def publish(self, version: int, content: list[HostTensor], **options: Any) -> Published:
        return self.store.publish(
            RUN, version, version, content, chunk_bytes=2**16, keep=3, created=1.5, delta_chain=2, **options
        )

    def announce(self, published: Published) -> Announcement:
        version = published.manifest.version
        return Announcement(
            run_id=RUN,
            sequence=0,
            version=version,
            step=version,
            manifest_urls=(f"{self.server.url}/v1/runs/{RUN}/manifests/{version}",),
            manifest_digest=published.digest,
            nbytes=published.manifest.nbytes,
            created=0.0,
        )

    def fetch(self, published: Published) -> Any:
        before = self.received
        policy = self.fetcher.fetch(self.announce(published), lambda: False)
        return policy, self.received - before

    @property
    def received(self) -> float:
        samples = self.metrics.pull_bytes.collect()[0].samples
        return sum(one.value for one in samples if one.name.endswith("_total"))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.server.stop()


def test_the_next_version_stands_on_the_last(world: World) -> None:
    """A fraction of it travels; canary and tensors are those of the version."""
    canary = Canary(token_ids=(1, 2), logprobs=(-0.5,))
    policy, received = world.fetch(world.publish(0, tensors("w", FULL_BYTES, 1), canary=canary))
    assert (policy.version, policy.canary, policy.adapter, received) == (0, canary, None, FULL_BYTES)
    policy, received = world.fetch(world.publish(1, tensors("w", FULL_BYTES, 2)))
    assert bytes(policy.tensors["w"].data) == bytes(tensors("w", FULL_BYTES, 2)[0].data)
    assert (policy.version, policy.canary) == (1, None)
    assert 0 < received < FULL_BYTES / 100


def test_a_failed_fetch_keeps_what_is_held(world: World) -> None:
    """The next one still stands on it."""
    world.fetch(world.publish(0, tensors("w", FULL_BYTES, 1)))
    gone = world.publish(1, tensors("w", FULL_BYTES, 2))
    with pytest.raises(WeightsError):
        world.fetch(gone._replace(digest="0" * 64))
    _, received = world.fetch(gone)
    assert received < FULL_BYTES / 100


def test_an_adapter_comes_with_its_full_version_once(world: World) -> None:
    """The base travels with its first adapter and never again, and stays as it is; another base is pulled in its turn."""
    full = world.publish(0, tensors("w", FULL_BYTES, 1))
    for version in (1, 2):
        adapter = Adapter(model_version=0, model_digest=full.digest, config={"r": 1, "lora_alpha": 2})
        policy, received = world.fetch(world.publish(version, tensors("a", ADAPTER_BYTES, version), adapter=adapter))
        assert policy.version == version
        assert bytes(policy.tensors["a"].data) == bytes(tensors("a", ADAPTER_BYTES, version)[0].data)
        assert policy.adapter is not None
        assert policy.adapter.config == {"r": 1, "lora_alpha": 2}
        assert bytes(policy.adapter.tensors["w"].data) == bytes(tensors("w", FULL_BYTES, 1)[0].data)
        assert (received > FULL_BYTES) == (version == 1)
    other = world.publish(3, tensors("w", FULL_BYTES, 3))
    adapter = Adapter(model_version=3, model_digest=other.digest, config={"r": 1, "lora_alpha": 2})
    policy, received = world.fetch(world.publish(4, tensors("a", ADAPTER_BYTES, 4), adapter=adapter))
    assert bytes(policy.adapter.tensors["w"].data) == bytes(tensors("w", FULL_BYTES, 3)[0].data)
    assert received > 0


def test_peers_need_an_address_that_others_reach_and_a_token_beyond_loopback() -> None:
    """Mistakes of the run file are told at the start."""
    metrics = ProducerMetrics(RUN, "p0", CollectorRegistry())
    with pytest.raises(ConfigError, match=r"weights\.peer_host is '10\.0\.0\.1' and there is no weights\.token"):
        _peer_node(WeightsConfig(peers=True, peer_host="10.0.0.1"), metrics, Access(None, 1, 1))
    with pytest.raises(ConfigError, match=r"weights\.peer_host is '0\.0\.0\.0', which peers can't reach"):
        _peer_node(WeightsConfig(peers=True, peer_host="0.0.0.0"), metrics, Access(SecretStr("t"), 1, 1))
    node = _peer_node(WeightsConfig(peers=True, peer_url="http://me:1"), metrics, Access(None, 1, 1)).start()
    assert node.url == "http://me:1"
    node.close()
