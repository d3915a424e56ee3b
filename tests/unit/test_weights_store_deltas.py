"""The store's small tensors, deltas and adapters: what shares a chunk, what leads from version to version, what is kept."""

import os
import shutil
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from echo.errors import ManifestError, WeightsError
from echo.weights import manifest as manifests
from echo.weights import writing
from echo.weights.chunks import ChunkFiles, StoredTensor
from echo.weights.delta import apply_delta
from echo.weights.manifest import Adapter, Base, Chunk, Delta, HostTensor, Manifest, TensorEntry, deltas_between
from echo.weights.store import Published, WeightStore

KIB = 1024
CHUNK = 64 * KIB
Usage = namedtuple("Usage", "total used free")


def bf16(name: str, seed: int, words: int = 32 * KIB, *, changes: int = 0) -> HostTensor:
    """A tensor; `changes` counts how often every fiftieth word or so moved by a unit in the last place."""
    array = np.random.default_rng(seed).integers(0, 2**16, words).astype("<u2")
    for change in range(changes):
        array[np.random.default_rng((seed, change)).random(words) < 0.02] += 1
    return HostTensor(name, "BF16", (words,), array.data.cast("B"))


def publish(
    store: WeightStore,
    version: int,
    tensors: Sequence[HostTensor],
    *,
    keep: int = 2,
    delta_chain: int = 4,
    adapter: Adapter | None = None,
) -> Published:
    return store.publish(
        "run",
        version,
        version,
        tensors,
        chunk_bytes=CHUNK,
        keep=keep,
        created=1.5,
        delta_chain=delta_chain,
        adapter=adapter,
    )


def read(store: WeightStore, extent: TensorEntry | Delta) -> bytes:
    return bytes(StoredTensor(ChunkFiles(store.root), extent).read(0, extent.nbytes))


def entries(manifest: Manifest) -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in manifest.tensors}


def assert_holds(store: WeightStore, manifest: Manifest, tensors: Sequence[HostTensor]) -> None:
    assert {entry.name: read(store, entry) for entry in manifest.tensors} == {one.name: bytes(one.data) for one in tensors}


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


# Small tensors


def test_small_tensors_are_one_file(store: WeightStore) -> None:
    """A hundred tensors of up to a sixteenth of a chunk lie in as few chunks as hold them, and read back; larger ones in their
    own."""
    tensors = [bf16(f"norm.{number}", number, 1 + 20 * number) for number in range(100)]
    tensors.insert(50, bf16("large", 1000, 3 * KIB))
    manifest = publish(store, 0, tensors).manifest
    assert sum(one.data.nbytes for one in tensors) > 3 * CHUNK
    assert len(list(ChunkFiles(store.root).all())) == 5
    assert [entry.name for entry in manifest.tensors] == [one.name for one in tensors]
    assert len(entries(manifest)["large"].chunks) == 1
    assert entries(manifest)["large"].chunks[0].nbytes == 6 * KIB
    assert_holds(store, manifest, tensors)
    assert store.verify() == []


def test_a_version_of_small_tensors_takes_few_fsyncs(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the folders are there: a file and a folder for the tensors, for their deltas and for the manifest. What an earlier
    version names is durable already."""
    frozen = bf16("frozen", 99, 200 * KIB)
    publish(store, 0, [frozen, *(bf16(f"{number}", number, KIB) for number in range(25))])
    # Which of the 256 folders a chunk lies in is its digest's choice: the next one's are made beforehand.
    for prefix in range(256):
        (store.root / "chunks" / f"{prefix:02x}").mkdir(exist_ok=True)
    store._files._durable = set((store.root / "chunks").iterdir())
    synced: list[str] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    published = publish(store, 1, [frozen, *(bf16(f"{number}", number, KIB, changes=1) for number in range(25))])
    assert published.manifest.delta_bytes > 0
    assert len(synced) == 6


def test_unchanged_small_tensors_stay_where_they_are(store: WeightStore) -> None:
    """Those that change move to a chunk of their own; the others go on sharing the old one, until most of it is unused."""
    frozen = [bf16(f"frozen.{number}", number, KIB) for number in range(10)]
    trained = [bf16(f"trained.{number}", 100 + number, KIB) for number in range(10)]
    first = publish(store, 0, frozen + trained, delta_chain=0)
    moved = [bf16(f"trained.{number}", 200 + number, KIB) for number in range(10)]
    second = publish(store, 1, frozen + moved, delta_chain=0)
    assert second.new_bytes == 20 * KIB
    assert all(entries(second.manifest)[one.name] == entries(first.manifest)[one.name] for one in frozen)
    third = publish(store, 2, [*frozen[:9], bf16("frozen.9", 9, KIB, changes=1), *moved], delta_chain=0)
    assert third.new_bytes == 20 * KIB, "nine of twenty are no reason to keep the old chunk alive"
    for published, tensors in ((second, frozen + moved), (third, [*frozen[:9], bf16("frozen.9", 9, KIB, changes=1), *moved])):
        assert_holds(store, published.manifest, tensors)
    assert store.verify() == []


def test_a_damaged_shared_chunk_is_not_shared_again(store: WeightStore) -> None:
    """Unchanged tensors move out of a file that went bad."""
    tensors = [bf16(f"{number}", number, KIB) for number in range(4)]
    chunk = publish(store, 0, tensors).manifest.tensors[0].chunks[0]
    path = store.chunk_path(chunk.digest)
    raw = bytearray(path.read_bytes())
    raw[5] ^= 1
    path.write_bytes(raw)
    published = publish(store, 1, [*tensors[:3], bf16("3", 3, KIB, changes=1)])
    assert_holds(store, published.manifest, [*tensors[:3], bf16("3", 3, KIB, changes=1)])
    assert chunk not in set(published.manifest.chunks())


# Deltas


def policy(changes: int) -> list[HostTensor]:
    return [
        bf16("embedding", 1, 100 * KIB, changes=changes),
        bf16("norm", 2, 999, changes=changes),
        bf16("frozen", 3, 40 * KIB),
        HostTensor("step", "I64", (), memoryview(changes.to_bytes(8, "little"))),
    ]


def test_deltas_lead_from_version_to_version(store: WeightStore) -> None:
    """Applied one after the other to version 0, the deltas give every later version, tensor by tensor, at a fraction of its
    bytes; each version is there in full as well."""
    held = {one.name: bytes(one.data) for one in policy(0)}
    publish(store, 0, policy(0), keep=9)
    for version in range(1, 5):
        manifest = publish(store, version, policy(version), keep=9).manifest
        assert manifest.base is not None
        assert (manifest.base.version, manifest.base.digest) == (version - 1, store.read_manifest("run", version - 1)[1])
        found = entries(manifest)
        assert {name for name, entry in found.items() if entry.delta is not None} == {"embedding", "norm", "step"}, (
            "the frozen tensor needs none"
        )
        assert manifest.delta_bytes < 0.03 * (100 * KIB + 999) * 2
        for name, entry in found.items():
            if entry.delta is not None:
                held[name] = bytes(apply_delta(held[name], read(store, entry.delta)))
        assert held == {one.name: bytes(one.data) for one in policy(version)}
        assert_holds(store, manifest, policy(version))
    assert store.verify() == []


@pytest.mark.parametrize("window", [0, 2**30])
def test_deltas_of_any_size_find_their_place(store: WeightStore, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a chunk, alone in one, or cut into many, and whether results are taken one by one or all at the end."""
    monkeypatch.setattr(writing, "_WINDOW_BYTES", window)
    words = [3, 5000, 40, 300, 34 * KIB, 17, 700, 5000, 3000, 2000]
    versions = [[bf16(f"{n}", n, size, changes=changes) for n, size in enumerate(words)] for changes in (0, 1)]
    for version, tensors in enumerate(versions):
        published = store.publish("run", version, version, iter(tensors), chunk_bytes=512, keep=2, created=1.5, delta_chain=1)
    old = {one.name: bytes(one.data) for one in versions[0]}
    counts = set()
    for new, entry in zip(versions[1], published.manifest.tensors, strict=True):
        assert read(store, entry) == bytes(new.data)
        if entry.delta is not None:
            assert apply_delta(old[entry.name], read(store, entry.delta)) == bytes(new.data)
            counts.add(len(entry.delta.chunks))
    assert {1, 2} <= counts
    offsets = [entry.delta.offset for entry in published.manifest.tensors if entry.delta is not None]
    assert any(offsets)
    assert store.verify() == []


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from(["keep", "nudge", "redo", "drop"]), min_size=1, max_size=5), st.data())
def test_a_puller_gets_from_any_version_to_the_newest(
    tmp_path_factory: pytest.TempPathFactory, moves: list[str], data: st.DataObject
) -> None:
    """Whatever happens to a tensor: the chain of deltas gives exactly its newest state, or there is none."""
    store = WeightStore(tmp_path_factory.mktemp("store"))
    array = np.random.default_rng(1).integers(0, 2**16, 4 * KIB).astype("<u2")
    history: list[bytes | None] = [array.tobytes()]
    chain = [publish(store, 0, [HostTensor("w", "BF16", array.shape, array.data)], keep=9).manifest]
    for version, move in enumerate(moves, 1):
        array = array.copy()
        if move == "nudge":
            array[data.draw(st.integers(0, 4000))] += 1
        elif move == "redo":
            array = np.random.default_rng(version + 1).integers(0, 2**16, 4 * KIB).astype("<u2")
        tensors = [] if move == "drop" else [HostTensor("w", "BF16", array.shape, array.data)]
        chain.insert(0, publish(store, version, tensors, keep=9, delta_chain=9).manifest)
        history.append(None if move == "drop" else array.tobytes())
    newest = history[-1]
    if newest is None:
        return
    for version, held in enumerate(history):
        if held is None:
            continue
        path = deltas_between(manifests.digest(held), "w", [entries(manifest) for manifest in chain])
        since = moves[version:]
        if held == newest:
            assert path == []
        elif "redo" in since or "drop" in since:
            assert path is None or len(path) < len(since)
        else:
            assert path is not None
            assert len(path) == since.count("nudge")
        current = bytearray(held)
        for delta in path or []:
            current = apply_delta(current, read(store, delta))
        assert path is None or current == newest


def test_versions_that_deltas_lead_back_to_are_kept(store: WeightStore) -> None:
    """Two of the newest, and what their deltas need: as far back as `delta_chain` says, and no further."""
    for version in range(7):
        published = publish(store, version, policy(version), keep=2, delta_chain=3)
    assert published.manifest.base is not None
    assert published.manifest.base.chain == 3
    assert store.versions("run") == [3, 4, 5, 6]
    publish(store, 7, policy(7), keep=2, delta_chain=0)
    assert store.versions("run") == [6, 7], "a version without deltas needs none before it"
    assert store.verify() == []
    assert store.gc().chunks == 0


def test_a_chain_begins_anew_where_nothing_leads_back(store: WeightStore) -> None:
    """A version that shares no tensor with the one before has no base; the next one's chain is one long."""
    publish(store, 0, policy(0))
    publish(store, 1, policy(1))
    broken = publish(store, 2, [bf16("embedding", 99, 100 * KIB)]).manifest
    assert (broken.base, broken.delta_bytes) == (None, 0)
    after = publish(store, 3, [bf16("embedding", 99, 100 * KIB, changes=1)]).manifest
    assert after.base is not None
    assert (after.base.version, after.base.chain) == (2, 1)


def test_chunks_that_are_shared_are_not_paid_for_by_a_delta(store: WeightStore) -> None:
    """Where one word of one chunk changes, its delta is weighed against that chunk alone; where the chunk is small it is not
    taken."""
    old = np.zeros(4 * CHUNK + 16, np.uint8)
    old[:] = np.random.default_rng(1).integers(0, 256, len(old))
    publish(store, 0, [HostTensor("w", "U8", old.shape, old.data)])
    new = old.copy()
    new[-1] ^= 1
    entry = publish(store, 1, [HostTensor("w", "U8", new.shape, new.data)]).manifest.tensors[0]
    assert entry.delta is None
    new = new.copy()
    new[0] ^= 1
    entry = publish(store, 2, [HostTensor("w", "U8", new.shape, new.data)]).manifest.tensors[0]
    assert entry.delta is not None
    assert entry.delta.nbytes < 300


def shared(*, tiny: int = 1, changes: int = 0, redone: int = 0) -> list[HostTensor]:
    """A small tensor of 4 KiB that changes a little, and `tiny` tensors of 8 bytes; redone: all of them change throughout."""
    numbers = [np.random.default_rng((number, redone)).integers(0, 256, 8, dtype=np.uint8) for number in range(tiny)]
    return [
        bf16("small", 1, 2 * KIB, changes=changes + redone),
        *(HostTensor(f"tiny.{number}", "U8", (8,), data.data) for number, data in enumerate(numbers)),
    ]


def test_tensors_that_share_a_chunk_have_deltas_where_those_are_smaller_together(store: WeightStore) -> None:
    """A tiny tensor's delta is larger than itself: it is named where all of them save the chunk, else none is."""
    publish(store, 0, shared())
    entry = entries(publish(store, 1, shared(redone=1)).manifest)
    assert entry["small"].chunks == entry["tiny.0"].chunks
    small, tiny = entry["small"].delta, entry["tiny.0"].delta
    assert small is not None
    assert tiny is not None
    assert 8 < tiny.nbytes < 8 + 100
    publish(store, 2, shared(tiny=50))
    published = publish(store, 3, shared(tiny=50, redone=1))
    assert (published.manifest.delta_bytes, published.new_bytes) == (0, 4 * KIB + 50 * 8)


@pytest.mark.parametrize("why", ["new", "reshaped"])
def test_where_one_tensor_of_a_chunk_can_have_no_delta_no_other_has(store: WeightStore, why: str) -> None:
    """The chunk is fetched for it anyway, and nothing is stored beside it."""
    before = shared()
    publish(store, 0, before[:1] if why == "new" else [before[0], before[1]._replace(shape=(2, 4))])
    published = publish(store, 1, shared(changes=1))
    assert (published.manifest.delta_bytes, published.new_bytes) == (0, 4 * KIB + 8)


def test_what_did_not_change_in_a_new_chunk_needs_no_delta(store: WeightStore) -> None:
    """It moved there, since too little of its old one is in use; the others' deltas lead past the chunk all the same."""
    publish(store, 0, shared())
    entry = entries(publish(store, 1, shared(changes=1)).manifest)
    assert entry["small"].chunks == entry["tiny.0"].chunks
    assert (entry["small"].delta is None, entry["tiny.0"].delta is None) == (False, True)


def test_deltas_go_on_after_a_restart(store: WeightStore) -> None:
    """The version before is read from the store, so a new process makes deltas at once."""
    publish(store, 0, policy(0))
    assert publish(WeightStore(store.root), 1, policy(1)).manifest.delta_bytes > 0


@pytest.mark.parametrize("harm", ["flip", "remove", "shorten"])
def test_a_damaged_version_before_means_no_delta(store: WeightStore, harm: str) -> None:
    """A wrong delta is never published: what is read is held against its digest."""
    before = publish(store, 0, [bf16("w", 1, 100 * KIB)]).manifest.tensors[0]
    path = store.chunk_path(before.chunks[1].digest)
    raw = bytearray(path.read_bytes())
    if harm == "flip":
        raw[7] ^= 1
        path.write_bytes(raw)
    elif harm == "remove":
        path.unlink()
    else:
        path.write_bytes(raw[:-1])
    with capture_logs() as logs:
        entry = publish(store, 1, [bf16("w", 1, 100 * KIB, changes=1)]).manifest.tensors[0]
    assert entry.delta is None
    assert any("no delta" in line["event"] for line in logs)


def test_an_unreadable_version_before_is_no_obstacle(store: WeightStore) -> None:
    """Its manifest is damaged: the next version is published without deltas, and nothing is retired on a guess."""
    publish(store, 0, policy(0))
    published = publish(store, 1, policy(1))
    published.path.write_bytes(b"{")
    manifest = publish(store, 2, policy(2)).manifest
    assert manifest.base is None
    assert_holds(store, manifest, policy(2))
    assert store.versions("run") == [0, 1, 2]


def test_verify_finds_a_damaged_delta(store: WeightStore) -> None:
    """A puller would find it too, and take the whole tensor: the store says which file is bad."""
    publish(store, 0, policy(0))
    delta = entries(publish(store, 1, policy(1)).manifest)["embedding"].delta
    assert delta is not None
    path = store.chunk_path(delta.chunks[0].digest)
    path.write_bytes(path.read_bytes()[:-1])
    problem = store.verify()[0]
    assert problem.path == path
    assert "tensor 'embedding', version 1 of run 'run'" in problem.text


def test_room_is_asked_for_deltas_too(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that has room for the tensors, and not for deltas like the last ones beside them, is full."""
    publish(store, 0, policy(0))
    last = publish(store, 1, policy(1)).manifest
    free = 16 * 2**20 + last.nbytes + last.delta_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, free - 1))
    with pytest.raises(WeightsError, match=f"up to {last.nbytes + last.delta_bytes:,} needed"):
        publish(store, 2, policy(2))
    assert store.versions("run") == [0, 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, free))
    assert publish(store, 2, policy(2)).manifest.delta_bytes > 0


# Adapters


def test_an_adapter_keeps_the_policy_that_it_is_for(store: WeightStore) -> None:
    """Its manifest names the full version and the configuration; that version stays, untouched, as long as adapters name it,
    and deltas lead from adapter to adapter."""
    model = publish(store, 0, policy(0), keep=1)
    named = Adapter(model_version=0, model_digest=model.digest, config={"r": 8, "target_modules": ["q_proj"]})
    for version in range(1, 4):
        lora = [bf16("layer.lora_A", 7, 8 * KIB, changes=version)]
        published = publish(store, version, lora, keep=1, delta_chain=1, adapter=named)
    raw, _ = store.read_manifest("run", 3)
    manifest = manifests.decode(raw, where="test", run_id="run", expected_digest=published.digest)
    assert (manifest.kind, manifest.adapter, manifest.nbytes) == ("adapter", named, 16 * KIB)
    assert manifest.tensors[0].delta is not None
    assert store.versions("run") == [0, 2, 3]
    assert store.read_manifest("run", 0)[1] == model.digest
    assert_holds(store, model.manifest, policy(0))
    publish(store, 4, policy(4), keep=1)
    assert store.versions("run") == [4]


def test_an_adapter_for_what_is_not_here_is_refused(store: WeightStore) -> None:
    """A version that is missing, has another digest, or is an adapter itself: nothing is published."""
    model = publish(store, 0, policy(0), keep=9)
    good = Adapter(model_version=0, model_digest=model.digest, config={})
    lora = [bf16("lora", 7, 64)]
    adapter = publish(store, 1, lora, keep=9, adapter=good)
    for version, digest, complaint in (
        (9, model.digest, "no such version"),
        (0, "0" * 64, "not the full policy that the adapter is for"),
        (1, adapter.digest, "not the full policy that the adapter is for"),
    ):
        with pytest.raises(WeightsError, match=complaint):
            publish(store, 2, lora, adapter=Adapter(model_version=version, model_digest=digest, config={}))
    assert store.versions("run") == [0, 1]


# Manifests


A, B = Chunk("a" * 64, 6), Chunk("b" * 64, 4)


def entry_of(**changes: object) -> TensorEntry:
    return TensorEntry(**{"name": "w", "dtype": "U8", "shape": (10,), "digest": "d" * 64, "chunks": (A, B), **changes})  # type: ignore[arg-type]


def manifest_of(entry: TensorEntry, **changes: object) -> bytes:
    whole = {"schema": "2.0", "run_id": "run", "version": 3, "step": 1, "created": 1.0, "tensors": (entry,), **changes}
    return manifests.encode(Manifest(**whole))  # type: ignore[arg-type]


BASE = Base(version=2, digest="c" * 64, chain=1)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (
            manifest_of(entry_of(offset=1)),
            r"'w' of shape \(10,\) U8 has 10 bytes, which are not those of its chunks \(10 from 1",
        ),
        (manifest_of(entry_of(shape=(6,), chunks=(A,), offset=1)), "6 bytes, which are not those of its chunks"),
        (manifest_of(entry_of(shape=(3,), chunks=(A,), offset=-1)), "not those of its chunks"),
        (manifest_of(entry_of(shape=(12,))), "12 bytes, which are not those of its chunks"),
        (manifest_of(entry_of(shape=(10, -1))), "has shape"),
        (manifest_of(entry_of(dtype="F7")), "unknown dtype 'F7'"),
        (manifest_of(entry_of(digest="../x")), "malformed digest '../x'"),
        (manifest_of(entry_of(delta=Delta(base="e" * 64, nbytes=2, chunks=(B,)))), "has a delta, but the manifest has no base"),
        (
            manifest_of(entry_of(delta=Delta(base="e" * 64, nbytes=5, chunks=(B,))), base=BASE),
            "the delta of tensor 'w' has 5 bytes, which are not those of its chunks",
        ),
        (
            manifest_of(entry_of(delta=Delta(base="e" * 64, nbytes=4, chunks=(Chunk("/etc", 4),))), base=BASE),
            "malformed chunk digest '/etc'",
        ),
        (manifest_of(entry_of(), base=Base(version=3, digest="c" * 64, chain=1)), "version 3 can't have"),
        (manifest_of(entry_of(), base=Base(version=2, digest="c" * 64, chain=0)), "version 3 can't have"),
        (manifest_of(entry_of(), adapter=Adapter(model_version=3, model_digest="c" * 64, config={})), "can't adapt version 3"),
        (manifest_of(entry_of(), schema="1.0"), "manifest schema 1.0, this reader knows 2"),
    ],
)
def test_a_manifest_that_can_not_be_is_refused(raw: bytes, complaint: str) -> None:
    """Offsets, deltas, bases and adapters that point nowhere give one error that names the place."""
    with pytest.raises(ManifestError, match=f"^here: .*{complaint}"):
        manifests.decode(raw, where="here")


def test_a_sound_manifest_comes_back_as_it_was() -> None:
    """Offset, delta, base and adapter are kept; a plain one does not mention them."""
    delta = Delta(base="e" * 64, nbytes=3, chunks=(B,), offset=1)
    raw = manifest_of(
        entry_of(shape=(2,), chunks=(A,), offset=4, delta=delta),
        base=BASE,
        adapter=Adapter(model_version=0, model_digest="c" * 64, config={"r": 8}),
    )
    manifest = manifests.decode(raw, where="here")
    assert manifests.encode(manifest) == raw
    assert [(piece.chunk, piece.start, piece.nbytes, piece.at) for piece in manifests.pieces(manifest.tensors[0])] == [
        (A, 4, 2, 0)
    ]
    assert list(manifests.pieces(delta)) == [(B, 1, 3, 0)]
    assert list(manifests.pieces(entry_of())) == [(A, 0, 6, 0), (B, 0, 4, 6)]
    plain = manifest_of(entry_of())
    assert not any(word in plain for word in (b"offset", b"delta", b"base", b"adapter"))
