"""Pulling with a version in hand: deltas where they lead from it, chunks where they don't or are no good; memory used again."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from echo.metrics import WeightsMetrics
from echo.weights import manifest as manifests
from echo.weights.buffers import Buffers
from echo.weights.client import Pulled, WeightClient
from echo.weights.manifest import Chunk, HostTensor, TensorEntry, digest
from echo.weights.server import WeightServer, create_app
from echo.weights.store import Published, WeightStore

CHUNK = 64 * 1024
COUNT = 5 * CHUNK


def policy(version: int) -> list[HostTensor]:
    """Two bf16 tensors that differ a little from version to version, a small one that does, and one that never changes."""
    tensors = []
    for seed, (name, count) in enumerate({"a": COUNT, "b": COUNT, "small": 3000}.items()):
        values = np.random.default_rng(seed).integers(0, 2**16, count, dtype=np.uint16)
        for step in range(1, version + 1):
            values[np.random.default_rng(100 * seed + step).integers(0, count, count // 200)] += 1
        tensors.append(HostTensor(name, "BF16", (count,), values.view(np.uint8).data))
    tensors.append(HostTensor("fixed", "U8", (CHUNK,), memoryview(np.random.default_rng(9).bytes(CHUNK))))
    return tensors


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


@pytest.fixture
def url(store: WeightStore) -> Iterator[str]:
    server = WeightServer(
        create_app(store, token=None, metrics=WeightsMetrics(CollectorRegistry())), host="127.0.0.1", port=0
    ).start()
    yield server.url
    server.stop()


def publish(store: WeightStore, version: int, tensors: Sequence[HostTensor] | None = None, **options: Any) -> Published:
    options = {"chunk_bytes": CHUNK, "keep": 2, "created": 1.5, "delta_chain": 2, **options}
    return store.publish("run", version, version, tensors or policy(version), **options)


def pull(url: str, published: Published, *, puller: WeightClient | None = None, **options: Any) -> Pulled:
    return (puller or WeightClient(first_wait_s=0.01, longest_wait_s=0.05)).pull(
        [f"{url}/v1/runs/run/manifests/{published.manifest.version}"],
        run_id="run",
        version=published.manifest.version,
        manifest_digest=published.digest,
        deadline_s=60,
        **options,
    )


def assert_is(pulled: Pulled, tensors: Sequence[HostTensor]) -> None:
    assert {name: bytes(one.data) for name, one in pulled.tensors.items()} == {one.name: bytes(one.data) for one in tensors}
    assert list(pulled.tensors) == [one.name for one in tensors]


def test_a_small_change_travels_as_deltas(store: WeightStore, url: str) -> None:
    """Bit for bit the new version, for a fraction of its bytes; the held one stays as it was."""
    have = pull(url, publish(store, 0))
    newer = publish(store, 1)
    pulled = pull(url, newer, have=have)
    assert_is(pulled, policy(1))
    assert_is(have, policy(0))
    assert pulled.patched == 3
    assert pulled.received_bytes == newer.manifest.delta_bytes < newer.manifest.nbytes / 50
    assert pulled.tensors["fixed"] is have.tensors["fixed"]


def test_ten_deltas_in_a_row_make_no_error(store: WeightStore, url: str) -> None:
    """Each pull stands on the one before; the last is still the published version, bit for bit."""
    have = pull(url, publish(store, 0))
    puller = WeightClient()
    for version in range(1, 11):
        have = pull(url, publish(store, version), puller=puller, have=have)
        assert have.patched == 3
    assert_is(have, policy(10))


def slightly_and_throughout(version: int, redone: int) -> list[HostTensor]:
    """Two small tensors: one that changes in a byte from version to version, and one that changes throughout."""
    slightly = np.full(3000, 7, np.uint8)
    slightly[:version] += 1
    throughout = np.random.default_rng(redone).integers(0, 256, 3000, dtype=np.uint8)
    return [HostTensor(name, "U8", (3000,), data.data) for name, data in (("s", slightly), ("t", throughout))]


def test_tensors_of_one_chunk_travel_as_deltas_while_those_are_fewer_bytes(store: WeightStore, url: str) -> None:
    """Together, not one by one: what changed throughout gains nothing by its delta, and saves the chunk that the other is in.
    Two such deltas in a row are more than the chunk."""
    held = [pull(url, publish(store, 0, slightly_and_throughout(0, 0)))]
    newer = publish(store, 1, slightly_and_throughout(1, 1))
    s, t = newer.manifest.tensors
    assert s.chunks == t.chunks
    assert t.delta is not None
    assert t.delta.nbytes > t.nbytes
    held.append(pull(url, newer, have=held[0]))
    assert (held[1].patched, held[1].received_bytes) == (2, newer.manifest.delta_bytes)
    assert newer.manifest.delta_bytes < s.chunks[0].nbytes
    newest = publish(store, 2, slightly_and_throughout(2, 2))
    for have, patched, received in ((held[1], 2, newest.manifest.delta_bytes), (held[0], 0, s.chunks[0].nbytes)):
        pulled = pull(url, newest, have=have)
        assert_is(pulled, slightly_and_throughout(2, 2))
        assert (pulled.patched, pulled.received_bytes) == (patched, received)


def test_a_chunk_that_comes_anyway_is_not_brought_by_deltas_as_well(store: WeightStore, url: str) -> None:
    """Small tensors share a chunk: where one of them has no delta, as from another publisher, the others come with it."""
    have = pull(url, publish(store, 0, slightly_and_throughout(0, 0)))
    newer = publish(store, 1, slightly_and_throughout(1, 1))
    s, t = newer.manifest.tensors
    newer = with_tensors(newer, (s, msgspec.structs.replace(t, delta=None)))
    pulled = pull(url, newer, have=have)
    assert_is(pulled, slightly_and_throughout(1, 1))
    assert (pulled.patched, pulled.received_bytes) == (0, s.chunks[0].nbytes)
    have = pull(url, publish(store, 2, slightly_and_throughout(2, 1)), have=pulled)
    assert (have.patched, have.received_bytes < 100) == (1, True)


def trained(steps: int) -> list[HostTensor]:
    """A float32 policy of small tensors and tiny norms after so many steps as AdamW's at lr 1e-5: most values move."""
    rng = np.random.default_rng(1)
    shapes = [shape for _ in range(4) for shape in ((32,), (16, 60), (960,))]
    values = [rng.normal(0, 0.05, shape) if len(shape) > 1 else np.ones(shape) for shape in shapes]
    for step in range(steps):
        rng = np.random.default_rng((2, step))
        values = [value + rng.uniform(-1e-5, 1e-5, value.shape) for value in values]
    arrays = [value.astype(np.float32) for value in values]
    return [HostTensor(f"{number}", "F32", array.shape, memoryview(array).cast("B")) for number, array in enumerate(arrays)]


def test_a_tiny_float32_policy_travels_as_deltas(store: WeightStore, url: str) -> None:
    """Every tensor of the one chunk, those of 128 bytes too; also two versions at once. Three are more than the chunk."""
    held = [pull(url, publish(store, version, trained(version), delta_chain=3)) for version in range(3)]
    newest = publish(store, 3, trained(3), delta_chain=3)
    (chunk,) = {chunk for entry in newest.manifest.tensors for chunk in entry.chunks}
    for have, patched, share in ((held[2], 12, 0.5), (held[1], 12, 0.9), (held[0], 0, 1)):
        pulled = pull(url, newest, have=have)
        assert_is(pulled, trained(3))
        assert pulled.patched == patched
        assert pulled.received_bytes <= share * chunk.nbytes


def test_who_missed_a_version_pulls_both_deltas(store: WeightStore, url: str) -> None:
    """The chain leads back as far as it was published; from further back changed tensors come whole."""
    held = [pull(url, publish(store, version)) for version in range(2)]
    publish(store, 2)
    newest = publish(store, 3)
    pulled = pull(url, newest, have=held[1])
    assert_is(pulled, policy(3))
    assert pulled.patched == 3
    assert pulled.received_bytes < newest.manifest.nbytes / 20
    far = pull(url, newest, have=held[0])
    assert_is(far, policy(3))
    assert far.patched == 0
    assert far.received_bytes == newest.manifest.nbytes - CHUNK


def test_a_version_of_another_run_or_content_is_no_base(store: WeightStore, url: str) -> None:
    """Deltas are used only from exactly what they were made from; equal chunks still need not travel."""
    store.publish("other", 0, 0, policy(0), chunk_bytes=CHUNK, keep=2, created=1.5)
    publish(store, 0)
    newer = publish(store, 1)
    other = store.read_manifest("other", 0)[1]
    have = WeightClient().pull(
        [f"{url}/v1/runs/other/manifests/0"], run_id="other", version=0, manifest_digest=other, deadline_s=60
    )
    changed = have._replace(manifest=msgspec.structs.replace(have.manifest, run_id="run"), manifest_digest="0" * 64)
    for wrong in (have, changed):
        pulled = pull(url, newer, have=wrong)
        assert_is(pulled, policy(1))
        assert pulled.tensors["fixed"] is have.tensors["fixed"]


def with_tensors(published: Published, entries: Sequence[TensorEntry]) -> Published:
    """The same version, whose manifest names these."""
    manifest = msgspec.structs.replace(published.manifest, tensors=tuple(entries))
    raw = manifests.encode(manifest)
    published.path.write_bytes(raw)
    return published._replace(manifest=manifest, digest=digest(raw))


def with_delta(published: Published, chunk: Chunk) -> Published:
    """The same version, whose manifest says that the delta of tensor "a" is `chunk`."""
    entries = list(published.manifest.tensors)
    assert entries[0].delta is not None
    entries[0] = msgspec.structs.replace(
        entries[0], delta=msgspec.structs.replace(entries[0].delta, chunks=(chunk,), nbytes=chunk.nbytes, offset=0)
    )
    return with_tensors(published, entries)


@pytest.mark.parametrize("kind", ["nonsense", "of another tensor", "lost", "damaged"])
def test_a_delta_that_is_no_good_costs_only_bytes(store: WeightStore, url: str, kind: str) -> None:
    """Its tensor is pulled whole instead, the others are patched all the same, and the log says so."""
    have = pull(url, publish(store, 0))
    newer = publish(store, 1)
    content = b"no delta" * 20
    if kind == "of another tensor":
        delta = newer.manifest.tensors[1].delta
        assert delta is not None
        content = b"".join(store.chunk_path(chunk.digest).read_bytes() for chunk in delta.chunks)
        content = content[delta.offset : delta.offset + delta.nbytes]
    chunk = Chunk(digest(content), len(content))
    newer = with_delta(newer, chunk)
    path = store.chunk_path(chunk.digest)
    if kind != "lost":
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if kind != "damaged" else bytes(len(content)))
    with capture_logs() as logs:
        puller = WeightClient(first_wait_s=0.001, longest_wait_s=0.001, attempts=3)
        pulled = pull(url, newer, puller=puller, have=have)
    assert_is(pulled, policy(1))
    assert COUNT * 2 < pulled.received_bytes < COUNT * 3
    assert any("a delta is no good" in entry["event"] for entry in logs)


def test_a_truncated_manifest_is_not_used(store: WeightStore, url: str) -> None:
    """The version that is held stays as it is, and the error names the manifest."""
    have = pull(url, publish(store, 0))
    newer = publish(store, 1)
    newer.path.write_bytes(newer.path.read_bytes()[:-100])
    with pytest.raises(manifests.ManifestError, match=r"manifests/1: digest .* is not the announced"):
        pull(url, newer, puller=WeightClient(attempts=1), have=have)
    assert_is(have, policy(0))


def test_a_third_pull_uses_the_memory_of_the_first(store: WeightStore, url: str) -> None:
    """As soon as nothing refers to the first any more, and not before: a view of it keeps its bytes."""
    puller = WeightClient()

    def addresses(pulled: Pulled) -> set[int]:
        return {np.frombuffer(pulled.tensors[name].data, np.uint8).ctypes.data for name in "ab"}

    # Circles of references would keep the memory for as long as it pleases the collector.
    gc.collect()
    gc.disable()
    try:
        first = pull(url, publish(store, 0), puller=puller)
        places, kept = addresses(first), first.tensors["a"].data[10:20]
        second = pull(url, publish(store, 1), puller=puller, have=first)
        del first
        third = pull(url, publish(store, 2), puller=puller, have=second)
    finally:
        gc.enable()
    assert len(addresses(third) & places) == 1
    assert bytes(kept) == bytes(policy(0)[0].data[10:20])
    assert_is(third, policy(2))
    assert_is(second, policy(1))


def test_idle_memory_is_bounded() -> None:
    """What comes back beyond the bound goes to the system."""
    buffers = Buffers(idle_bytes_max=100)
    views = [buffers.take(size) for size in (60, 50, 30)]
    assert buffers.idle_bytes == 0
    del views
    assert buffers.idle_bytes == 80
    buffers.idle_bytes_max = 0
    assert buffers.idle_bytes == 0


def test_a_pull_waits_for_no_closed_client(url: str, store: WeightStore) -> None:
    """A client without peers has nothing to close, and may be closed all the same."""
    with closing(WeightClient()) as puller:
        assert_is(pull(url, publish(store, 0), puller=puller), policy(0))
    assert httpx.get(f"{url}/health").status_code == 200
