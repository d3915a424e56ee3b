"""The store: what it promises about content, crashes, sharing, retention, and several runs in one folder."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import namedtuple
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo.errors import ManifestError, WeightsError
from echo.weights import manifest as manifests
from echo.weights import writing
from echo.weights.manifest import DTYPE_BYTES, HostTensor
from echo.weights.store import Published, WeightStore
from tests.helpers import full_disk

KIB = 1024


def tensor(name: str, seed: int, nbytes: int = 4 * KIB) -> HostTensor:
    return HostTensor(name, "U8", (nbytes,), memoryview(np.random.default_rng(seed).bytes(nbytes)))


def publish(
    store: WeightStore, version: int, tensors: list[HostTensor] | Iterator[HostTensor], *, run: str = "run", keep: int = 2
) -> Published:
    return store.publish(run, version, version * 10, tensors, chunk_bytes=KIB, keep=keep, created=1.5)


def content(store: WeightStore, run: str, version: int) -> dict[str, bytes]:
    raw, _ = store.read_manifest(run, version)
    manifest = manifests.decode(raw, where="test", run_id=run)
    return {
        entry.name: b"".join(
            store.chunk_path(piece.chunk.digest).read_bytes()[piece.start : piece.start + piece.nbytes]
            for piece in manifests.pieces(entry)
        )
        for entry in manifest.tensors
    }


def chunk_files(store: WeightStore) -> set[str]:
    return {path.name for path in (store.root / "chunks").glob("*/*")}


def named_chunks(store: WeightStore) -> set[str]:
    found = set()
    for run in store.runs():
        for version in store.versions(run):
            manifest = manifests.decode(store.read_manifest(run, version)[0], where="test")
            found |= {chunk.digest for chunk in manifest.chunks()}
    return found


def litter(store: WeightStore) -> list[str]:
    return os.listdir(store.root / "tmp")


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


@st.composite
def policies(draw: st.DrawFn) -> list[HostTensor]:
    names = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), unique=True, max_size=4))
    made = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        size = prod(shape) * DTYPE_BYTES[dtype]
        # Repeating bytes, so that chunks of a tensor and of several tensors come out equal.
        made.append(HostTensor(name, dtype, shape, memoryview(draw(st.binary(min_size=1, max_size=9)) * size)[:size]))
    return made


@settings(max_examples=60, deadline=None)
@given(policies(), st.integers(1, 64))
def test_what_is_published_is_what_is_stored(tensors: list[HostTensor], chunk_bytes: int) -> None:
    """Any dtype, shape (also empty and 0-d) and chunk size: bytes, shapes and digests come back exactly."""
    with tempfile.TemporaryDirectory() as folder:
        store = WeightStore(Path(folder))
        published = store.publish("run", 3, 7, tensors, chunk_bytes=chunk_bytes, keep=2, created=2.5)
        raw, digest = store.read_manifest("run", 3)
        manifest = manifests.decode(raw, where="test", run_id="run", expected_digest=published.digest)
        assert digest == published.digest
        assert manifest == published.manifest
        assert (manifest.version, manifest.step, manifest.created) == (3, 7, 2.5)
        stored = content(store, "run", 3)
        for given_tensor, entry in zip(tensors, manifest.tensors, strict=True):
            assert (entry.name, entry.dtype, entry.shape) == given_tensor[:3]
            assert stored[entry.name] == bytes(given_tensor.data)
            assert entry.digest == manifests.digest(given_tensor.data)
            assert all(chunk.nbytes <= chunk_bytes for chunk in entry.chunks)
        assert store.stored_bytes() <= published.new_bytes <= manifest.nbytes
        assert store.verify() == []


def test_arrays_of_any_item_size_are_taken_as_bytes(store: WeightStore) -> None:
    """A view of float32 values, a 0-d one and one with a zero in its shape are stored as their bytes."""
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    scalar, empty = np.array(7, np.int64), np.empty((0, 3), np.float32)
    tensors = [
        HostTensor("matrix", "F32", (2, 3), matrix.data),
        HostTensor("scalar", "I64", (), scalar.data),
        HostTensor("empty", "F32", (0, 3), empty.data),
    ]
    publish(store, 0, tensors)
    assert content(store, "run", 0) == {"matrix": matrix.tobytes(), "scalar": scalar.tobytes(), "empty": b""}


def test_unchanged_chunks_are_shared(store: WeightStore) -> None:
    """A version adds only the bytes of chunks that changed; both versions read back whole."""
    same, changing = tensor("same", 1), bytearray(tensor("changing", 2).data)
    first = [same, HostTensor("changing", "U8", (len(changing),), memoryview(bytes(changing)))]
    assert publish(store, 0, first).new_bytes == 8 * KIB
    changing[2 * KIB + 5] ^= 1
    second = [same, HostTensor("changing", "U8", (len(changing),), memoryview(bytes(changing)))]
    assert publish(store, 1, second).new_bytes == KIB
    assert store.stored_bytes() == 9 * KIB
    for version, tensors in ((0, first), (1, second)):
        assert content(store, "run", version) == {one.name: bytes(one.data) for one in tensors}


def test_a_damaged_chunk_is_not_shared_but_mended(store: WeightStore) -> None:
    """Content that is published again replaces a file that went bad since, for the older version too."""
    published = publish(store, 0, [tensor("a", 1)])
    path = store.chunk_path(published.manifest.tensors[0].chunks[1].digest)
    raw = bytearray(path.read_bytes())
    raw[3] ^= 1
    path.write_bytes(raw)
    assert [problem.path for problem in store.verify()] == [path]
    assert publish(store, 1, [tensor("a", 1)]).new_bytes == KIB
    assert store.verify() == []


# In a process of its own, because a fork of a process with threads is not safe. Each fork publishes version 3 on a copy of
# the store and is killed before its nth step; the last one gets through.
CRASHES = """
import os, shutil, signal, sys
from pathlib import Path
from echo.weights.manifest import HostTensor
from echo.weights.store import WeightStore

template, out = Path(sys.argv[1]), Path(sys.argv[2])
point = 0
while True:
    root = out / str(point)
    shutil.copytree(template, root)
    child = os.fork()
    if not child:
        steps = 0
        def deadly(function):
            def call(*arguments, **options):
                global steps
                steps += 1
                if steps > point:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)
            return call
        for name in ("fsync", "replace", "unlink", "mkdir"):
            setattr(os, name, deadly(getattr(os, name)))
        tensors = [HostTensor(name, "U8", (2048,), memoryview(bytes([65 + i]) * 1024 + bytes([75 + i]) * 1024))
                   for i, name in enumerate("abc")]
        # Small ones share a chunk.
        tensors += [HostTensor(name, "U8", (2,), memoryview(name.encode() * 2)) for name in "de"]
        WeightStore(root).publish("run", 3, 30, tensors, chunk_bytes=1024, keep=2, created=1.5, delta_chain=1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    point += 1
    if status == 0:
        print(point)
        break
    assert os.WIFSIGNALED(status), status
"""


def test_a_crash_at_any_point_leaves_a_valid_store(tmp_path: Path) -> None:
    """kill -9 before every fsync, rename, removal and mkdir of a publication: the old versions stay, the new one is whole or
    absent, and the next publication leaves no litter."""
    template = WeightStore(tmp_path / "template")
    shared = HostTensor("a", "U8", (2048,), memoryview(b"A" * 1024 + b"K" * 1024))
    # The version that is killed has a delta against this one.
    near = HostTensor("c", "U8", (2048,), memoryview(b"C" * 1023 + b"x" + b"M" * 1024))
    for version in range(3):
        publish(template, version, [shared, tensor("b", version), near])
    publish(template, 0, [tensor("x", 9)], run="other")
    out = tmp_path / "out"
    out.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", CRASHES, str(template.root), str(out)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    points = int(ran.stdout)
    assert points > 20, "the publication took fewer steps than it has to"
    newest = []
    for point in range(points):
        store = WeightStore(out / str(point))
        assert store.verify() == []
        versions = store.versions("run")
        assert versions[-1] in (2, 3)
        assert set(versions) >= ({1, 2} if versions[-1] == 2 else {2, 3})
        newest.append(versions[-1])
        has_delta = b'"delta"' in store.read_manifest("run", versions[-1])[0]
        assert has_delta == (versions[-1] == 3), "the newest version is not whole"
        publish(store, versions[-1] + 1, [tensor("b", 77)])
        assert store.verify() == []
        assert len(store.versions("run")) == 2
        assert (litter(store), chunk_files(store)) == ([], named_chunks(store))
        assert content(store, "other", 0) == content(template, "other", 0)
    assert newest == sorted(newest), "a version that was there was lost by dying later"
    assert {2, 3} == set(newest)


def test_what_a_manifest_names_is_durable_before_it_appears(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are synced before their rename, folders of chunks before the manifest's rename, its folder after it."""
    events: list[tuple[str, str]] = []
    lock = threading.Lock()
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor: int) -> None:
        fsync(descriptor)
        with lock:
            events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def seen_replace(source: Path, target: Path) -> None:
        with lock:
            assert ("fsync", str(source)) in events, f"{target} renamed before it was synced"
            replace(source, target)
            events.append(("replace", str(target)))

    publish(store, 0, [tensor("a", 1)], run="other")
    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    # One tensor shares its chunks with the other run, whose publisher might not have synced their folders yet.
    published = publish(store, 0, [tensor("a", 1), tensor("b", 2)])
    at = events.index(("replace", str(published.path)))
    for entry in published.manifest.tensors:
        for chunk in entry.chunks:
            path = store.chunk_path(chunk.digest)
            renamed = max((i for i, event in enumerate(events) if event == ("replace", str(path))), default=-1)
            assert any(renamed < i < at for i, event in enumerate(events) if event == ("fsync", str(path.parent)))
    assert ("fsync", str(store.root / "chunks")) in events[:at]
    assert ("fsync", str(published.path.parent)) in events[at:]


@pytest.mark.parametrize("version", [3, 5])
def test_versions_only_grow(store: WeightStore, version: int) -> None:
    """A version that exists, or is below the newest, is refused and changes nothing."""
    publish(store, 5, [tensor("a", 1)])
    before = content(store, "run", 5)
    with pytest.raises(WeightsError, match=r"version 5 of run 'run' is published already; the next is 6"):
        publish(store, version, [tensor("a", 2)])
    assert (store.versions("run"), content(store, "run", 5)) == ([5], before)


def test_two_publishers_of_one_version_do_not_both_succeed(store: WeightStore) -> None:
    """Two trainers of the same run, one of them not fenced yet: exactly one version 0 exists, and it is whole."""
    start = threading.Barrier(2)
    outcomes: list[str] = []

    def one(seed: int) -> None:
        start.wait(10)
        try:
            publish(WeightStore(store.root), 0, [tensor("a", seed, 64 * KIB)])
            outcomes.append("published")
        except WeightsError:
            outcomes.append("refused")

    threads = [threading.Thread(target=one, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == ["published", "refused"]
    assert store.verify() == []


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (HostTensor("a", "U8", (3,), memoryview(b"xx")), "needs 3 contiguous bytes, has 2"),
        (HostTensor("a", "F7", (1,), memoryview(b"x")), "dtypes are"),
        (HostTensor("a", "U8", (-1, -1), memoryview(b"x")), "extents are 0 or more"),
        (HostTensor("a", "U8", (2,), memoryview(b"xxxx")[::2]), "needs 2 contiguous bytes"),
        (HostTensor("twice", "U8", (1,), memoryview(b"x")), "two tensors are named 'twice'"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(store: WeightStore, bad: HostTensor, complaint: str) -> None:
    """The error names the tensor, and nothing is published or left behind."""
    with pytest.raises(WeightsError, match=complaint):
        publish(store, 0, [HostTensor("twice", "U8", (1,), memoryview(b"y")), bad])
    assert (store.versions("run"), chunk_files(store), litter(store)) == ([], set(), [])


@pytest.mark.parametrize("run", ["", "..", "../x", "a/b", ".hidden", "a\n", "x" * 65, "ä"])
def test_a_run_id_is_never_a_path(store: WeightStore, run: str) -> None:
    """Anything but a plain name is refused, for reading and for writing."""
    for action in (lambda: publish(store, 0, [], run=run), lambda: store.versions(run), lambda: store.read_manifest(run, 0)):
        with pytest.raises(WeightsError, match="not a run id"):
            action()
    assert not store.root.exists()


@pytest.mark.parametrize("digest", ["", "..", "/etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_a_digest_is_never_a_path(store: WeightStore, digest: str) -> None:
    """Only 64 lower-case hex digits name a chunk."""
    with pytest.raises(WeightsError, match="not a chunk digest"):
        store.chunk_path(digest)


def test_retention_keeps_the_newest_of_each_run(store: WeightStore) -> None:
    """Each run keeps its own newest versions; a chunk goes with the last manifest that names it, of whichever run."""
    common = tensor("common", 1)
    publish(store, 0, [common, tensor("old", 2)], run="left", keep=1)
    for version in range(3):
        publish(store, version, [common, tensor("own", 10 + version)], run="right", keep=2)
    assert (store.versions("left"), store.versions("right")) == ([0], [1, 2])
    assert content(store, "left", 0)["common"] == bytes(common.data)
    publish(store, 1, [tensor("new", 3)], run="left", keep=1)
    assert (store.versions("left"), store.versions("right")) == ([1], [1, 2])
    assert store.verify() == []
    assert chunk_files(store) == named_chunks(store)
    publish(store, 3, [tensor("own", 13)], run="right", keep=1)
    assert manifests.digest(common.data[:KIB]) not in chunk_files(store)


def test_a_version_that_is_being_read_stays(store: WeightStore) -> None:
    """Retention passes over a version that a puller asked for lately, and takes it when the puller was not heard for long."""
    publish(store, 0, [tensor("a", 0)])
    store.hold("run", 0)
    for version in (1, 2, 3):
        publish(store, version, [tensor("a", version)])
    assert store.versions("run") == [0, 2, 3]
    assert content(store, "run", 0) == {"a": bytes(tensor("a", 0).data)}
    os.utime(store.manifest_path("run", 0).with_suffix(".reading"), (1, 1))
    publish(store, 4, [tensor("a", 4)])
    assert store.versions("run") == [3, 4]
    assert chunk_files(store) == named_chunks(store)
    assert sorted(path.name for path in store.manifest_path("run", 0).parent.iterdir()) == [".lock", "3.json", "4.json"]


def test_a_puller_that_comes_while_a_version_is_retired_keeps_it(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server notes the reader before it opens the manifest; retention looks again after it took the manifest away."""
    for version in range(2):
        publish(store, version, [tensor("a", version)])
    replace = os.replace

    def with_a_puller(source: Path, target: Path) -> None:
        if target.suffix == ".retired":
            store.hold("run", 0)
        replace(source, target)

    monkeypatch.setattr(os, "replace", with_a_puller)
    publish(store, 2, [tensor("a", 2)])
    assert store.versions("run") == [0, 1, 2]
    assert store.verify() == []


def test_a_reader_of_a_missing_version_leaves_no_trace(store: WeightStore) -> None:
    """Noting a reader of what was never published creates nothing."""
    store.hold("run", 0)
    assert not store.root.exists()


def test_a_collector_spares_what_another_run_is_about_to_name(store: WeightStore) -> None:
    """While one run is in the middle of publishing, another may publish and collect, and neither loses a chunk."""
    other = WeightStore(store.root)
    first, second = tensor("first", 1, 64 * KIB), tensor("second", 2)
    in_between = []

    def tensors() -> Iterator[HostTensor]:
        yield first
        publish(other, 0, [tensor("x", 3)], run="other", keep=1)
        publish(other, 1, [tensor("x", 4)], run="other", keep=1)
        in_between.append(other.gc())
        yield second

    publish(store, 0, tensors())
    assert in_between[0].postponed
    assert store.verify() == []
    assert content(store, "run", 0) == {"first": bytes(first.data), "second": bytes(second.data)}
    assert chunk_files(store) == named_chunks(store), "the last publication has to collect what the others could not"


def test_a_failing_source_of_tensors_publishes_nothing(store: WeightStore) -> None:
    """An error in mid-publication goes through, its chunks are collected, and the version can be published after all."""

    def tensors() -> Iterator[HostTensor]:
        yield tensor("a", 1)
        raise ValueError("the learner died")

    with pytest.raises(ValueError, match="the learner died"):
        publish(store, 0, tensors())
    assert (store.versions("run"), chunk_files(store), litter(store)) == ([], set(), [])
    publish(store, 0, [tensor("a", 1)])
    assert store.verify() == []


def test_memory_is_bounded_when_tensors_are_generated(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only about a window of tensors lives at a time, however many there are."""
    monkeypatch.setattr(writing, "_WINDOW_BYTES", 100 * KIB)
    alive: set[int] = set()
    most = 0

    def tensors() -> Iterator[HostTensor]:
        nonlocal most
        for number in range(40):
            array = np.full(50 * KIB, number, np.uint8)
            alive.add(number)
            weakref.finalize(array, alive.discard, number)
            most = max(most, len(alive))
            yield HostTensor(str(number), "U8", array.shape, array.data)
            del array

    assert len(publish(store, 0, tensors()).manifest.tensors) == 40
    assert most <= 5


def test_a_write_that_fails_publishes_nothing(store: WeightStore) -> None:
    """The file system refuses in the middle of a chunk: a retriable error names the place, the old version stays whole."""
    publish(store, 0, [tensor("a", 1)])
    refused = pytest.raises(WeightsError, match=r"File too large: version 1 of run 'run' is not published")
    with full_disk(64 * KIB), refused as caught:
        store.publish("run", 1, 1, [tensor("b", 2, 256 * KIB)], chunk_bytes=128 * KIB, keep=2, created=1.0)
    assert caught.value.retriable
    assert (store.versions("run"), store.verify(), litter(store)) == ([0], [], [])
    assert chunk_files(store) == named_chunks(store)


Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_is_noticed_before_anything_is_written(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a whole version can't fit it is refused at once, from a list as from a generator, which is judged by its
    predecessor."""
    publish(store, 0, [tensor("a", 1)])
    before = chunk_files(store)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 16 * 2**20 + 4 * KIB - 1))
    with pytest.raises(WeightsError, match=r"bytes free, up to 4,096 needed"):
        publish(store, 1, [tensor("a", 2)])

    def never() -> Iterator[HostTensor]:
        pytest.fail("a tensor was asked for")
        yield tensor("a", 2)

    with pytest.raises(WeightsError, match=r"bytes free, up to 4,096 needed"):
        publish(store, 1, never())
    assert (store.versions("run"), chunk_files(store)) == ([0], before)


def test_garbage_makes_room(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crashed publisher left is collected before a full disk is complained about."""
    publish(store, 0, [tensor("a", 1)])
    garbage = store.chunk_path("0" * 64)
    garbage.parent.mkdir()
    garbage.write_bytes(bytes(8 * KIB))
    capacity = 16 * 2**20 + 9 * KIB
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: Usage(capacity, store.stored_bytes(), capacity - store.stored_bytes())
    )
    publish(store, 1, [tensor("a", 2)])
    assert not garbage.exists()


def test_verify_finds_every_kind_of_damage(store: WeightStore) -> None:
    """A missing chunk, a shortened one, a flipped bit, a truncated manifest, one of another run or version."""
    published = publish(store, 0, [tensor("a", 1)], keep=9)
    for version in range(1, 4):
        publish(store, version, [tensor("a", version + 1)], keep=9)
    paths = [store.chunk_path(chunk.digest) for chunk in published.manifest.tensors[0].chunks]
    paths[0].unlink()
    paths[1].write_bytes(b"short")
    paths[2].write_bytes(bytes(KIB))
    one, two, three = (store.manifest_path("run", version) for version in (1, 2, 3))
    one.write_bytes(one.read_bytes()[:-9])
    two.write_bytes(two.read_bytes().replace(b'"run_id":"run"', b'"run_id":"ruin"'))
    three.write_bytes(three.read_bytes().replace(b'"version":3', b'"version":4'))
    found = {problem.path: problem.text for problem in store.verify()}
    assert list(found) == [*paths[:3], one, two, three]
    expected = [
        "is missing",
        "has 5 bytes instead of 1024",
        "has digest",
        "not a manifest",
        "belongs to run 'ruin'",
        "version 4",
    ]
    for text, part in zip(found.values(), expected, strict=True):
        assert part in text
    assert "tensor 'a', version 0 of run 'run'" in found[paths[0]]


def test_verify_notices_chunks_that_do_not_make_up_their_tensor(store: WeightStore) -> None:
    """Right chunks in the wrong order are caught by the tensor's own digest."""
    published = publish(store, 0, [tensor("a", 1)])
    raw = json.loads(published.path.read_bytes())
    raw["tensors"][0]["chunks"].reverse()
    published.path.write_text(json.dumps(raw))
    assert [problem.text for problem in store.verify()] == ["tensor 'a' does not match its digest"]


def test_nothing_is_collected_while_a_manifest_is_unreadable(store: WeightStore) -> None:
    """What a damaged manifest names is unknown: the collector says so and removes nothing; publishing goes on."""
    published = publish(store, 0, [tensor("a", 1)], run="other")
    publish(store, 0, [tensor("b", 2)], keep=1)
    whole = published.path.read_bytes()
    published.path.write_bytes(whole[:50])
    publish(store, 1, [tensor("b", 3)], keep=1)
    with pytest.raises(ManifestError, match=r"other/0\.json: not a manifest"):
        store.gc()
    published.path.write_bytes(whole)
    assert store.verify() == []
    assert store.gc().nbytes == 4 * KIB


def test_a_missing_version_is_named_with_those_that_exist(store: WeightStore) -> None:
    """The error says where it looked and what there is."""
    with pytest.raises(ManifestError, match=r"none of run 'run'"):
        store.read_manifest("run", 0)
    for version in (4, 5):
        publish(store, version, [])
    with pytest.raises(ManifestError, match=r"runs/run/3\.json: no such version; the store has 4 to 5"):
        store.read_manifest("run", 3)


def test_files_that_are_not_ours_are_left_alone(store: WeightStore) -> None:
    """Notes beside manifests and chunks are neither versions nor garbage."""
    published = publish(store, 0, [tensor("a", 1)])
    strange = [published.path.with_name("README.json"), store.root / "chunks" / "notes.txt"]
    for path in strange:
        path.write_text("mine")
    publish(store, 1, [tensor("a", 2)], keep=1)
    assert store.versions("run") == [1]
    assert all(path.read_text() == "mine" for path in strange)
