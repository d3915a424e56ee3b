"""The folder of published policies: chunks named by their content, shared by versions and runs, and one manifest a version.

    root/chunks/ab/<digest>             the bytes; written once
    root/runs/<run>/<version>.json      the manifest; its appearance is the publication
    root/runs/<run>/<version>.reading   its age tells when a puller last asked for this version
    root/tmp/                           files in the making

A crash at any point leaves a valid store: whatever a manifest names was durable before the manifest appeared, and what no
manifest names is garbage that the next collection removes. Several processes and runs may share one folder: publishers
hold a shared lock on it, the collector an exclusive one, so a chunk that is about to be named is never collected.

What is being read stays: a version beyond `keep` is retired only when nobody has asked for it for `reading_s`, and a chunk
is collected only when no manifest names it. (A chunk that is being sent in that moment is an open file, which lives on.)

Refuses to overwrite a version, to go back, to take tensors that change meanwhile (their bytes are read more than once),
and to collect anything while a manifest can't be read.
"""

import os
import shutil
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import structlog
from blake3 import blake3

from echo.errors import ManifestError, WeightsError
from echo.weights import manifest as manifests
from echo.weights.files import BusyError, locked, names, sync_folder
from echo.weights.manifest import DTYPE_BYTES, Chunk, HostTensor, Manifest, TensorEntry
from echo.weights.urls import VERSION_MAX, is_run_id

log = structlog.get_logger("weights.store")

# Threads that hash, write and fsync: the waits for the disk overlap.
_WRITERS = 4
# Bytes of tensors that may be in the writers' hands: bounds memory where the tensors come from a generator.
_WINDOW_BYTES = 64 * 2**20
# Left free on the disk: for the manifest and for whoever else writes there.
_RESERVE_BYTES = 16 * 2**20
_LOCK_WAIT_S = 60.0


class Published(NamedTuple):
    """A durable version. new_bytes: what it added to the store; the rest it shares. digest: of the manifest's bytes."""

    manifest: Manifest
    digest: str
    path: Path
    new_bytes: int


class Collected(NamedTuple):
    """What a collection removed. postponed: a publisher was at work, so nothing was; the next collection will."""

    chunks: int
    nbytes: int
    postponed: bool = False


class Problem(NamedTuple):
    """Something that `verify` found: the file, and what is wrong with it."""

    path: Path
    text: str


class WeightStore:
    """One folder. Creates nothing before the first `publish`, so a server may start on it earlier.

    reading_s: a version stays this long after a puller last asked for its manifest or one of its chunks. Longer than a
    puller's waits between chunks; not much longer, because a fast loop publishes many versions meanwhile.
    """

    def __init__(self, root: Path, *, reading_s: float = 30.0) -> None:
        self.root = root
        self._reading_s = reading_s

    # Reading

    def runs(self) -> list[str]:
        """Runs that have a version."""
        return [name for name in names(self.root / "runs") if is_run_id(name) and self.versions(name)]

    def versions(self, run_id: str) -> list[int]:
        """Published versions of a run, ascending."""
        stems = (name.removesuffix(".json") for name in names(self._run(run_id)) if name.endswith(".json"))
        return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit())

    def newest(self, run_id: str) -> int | None:
        return max(self.versions(run_id), default=None)

    def read_manifest(self, run_id: str, version: int) -> tuple[bytes, str]:
        """The stored bytes of a manifest and their digest. Raises ManifestError where there is none."""
        path = self.manifest_path(run_id, version)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise ManifestError(f"{path}: no such version; the store has {self._span(run_id)}") from None
        except OSError as error:
            raise ManifestError(f"{path}: {error.strerror}", retriable=True) from None
        return raw, manifests.digest(raw)

    def manifest_path(self, run_id: str, version: int) -> Path:
        if not 0 <= version <= VERSION_MAX:
            raise WeightsError(f"{self.root}: version {version} is not between 0 and {VERSION_MAX}")
        return self._run(run_id) / f"{version}.json"

    def chunk_path(self, digest: str) -> Path:
        """Where a chunk lies, or would lie. Raises WeightsError for a malformed digest."""
        if not manifests.is_digest(digest):
            raise WeightsError(f"{self.root}: {digest[:80]!r} is not a chunk digest")
        return self.root / "chunks" / digest[:2] / digest

    def stored_bytes(self) -> int:
        return sum(size for _, size in self._chunks())

    # Readers

    def hold(self, run_id: str, version: int) -> None:
        """A puller wants this version: keep it for a while. Without effect where the version is gone."""
        path = self.manifest_path(run_id, version)
        if path.exists():
            try:
                path.with_suffix(".reading").touch()
            except OSError as error:
                log.warning("readers can't be noted, so retention won't wait for them", path=str(path), error=error.strerror)

    def is_being_read(self, run_id: str, version: int) -> bool:
        try:
            asked = self.manifest_path(run_id, version).with_suffix(".reading").stat().st_mtime
        except FileNotFoundError:
            return False
        return time.time() - asked < self._reading_s

    # Publishing

    def publish(
        self,
        run_id: str,
        version: int,
        step: int,
        tensors: Iterable[HostTensor],
        *,
        chunk_bytes: int,
        keep: int,
        created: float,
    ) -> Published:
        """Make a policy durable and servable, then retire versions beyond the `keep` newest of this run.

        tensors: may be a generator; about 64 MiB beside the current tensor are held. They must not change until the call
        returns. created: seconds since the epoch. Raises WeightsError, with the store as it was, where the version is not
        above all others of the run, a tensor's bytes don't fit its dtype and shape, or the disk is full.
        """
        if chunk_bytes < 1 or keep < 1:
            raise WeightsError(f"{self.root}: chunk_bytes is {chunk_bytes} and keep is {keep}; both are 1 at least")
        path = self.manifest_path(run_id, version)
        try:
            for folder in (path.parent, self.root / "chunks", self.root / "tmp"):
                folder.mkdir(parents=True, exist_ok=True)
            self._make_room(run_id, tensors)
            with self._publishing(run_id):
                newest = self.newest(run_id)
                if newest is not None and version <= newest:
                    raise WeightsError(
                        f"{path}: version {newest} of run {run_id!r} is published already; the next is {newest + 1}"
                    )
                entries, new_bytes = self._write_tensors(tensors, chunk_bytes)
                manifest = Manifest(
                    schema=manifests.MANIFEST_SCHEMA,
                    run_id=run_id,
                    version=version,
                    step=step,
                    created=created,
                    tensors=entries,
                )
                raw = manifests.encode(manifest)
                self._write(raw, path)
                for folder in (path.parent, path.parent.parent, self.root):
                    sync_folder(folder)
                self._retire(run_id, keep)
        except OSError as error:
            raise WeightsError(
                f"{error.filename or self.root}: {error.strerror}: version {version} of run {run_id!r} is not published",
                retriable=True,
            ) from error
        finally:
            self._tidy()
        return Published(manifest, manifests.digest(raw), path, new_bytes)

    def _make_room(self, run_id: str, tensors: Iterable[HostTensor]) -> None:
        """Check that a whole version fits, before anything is written; what it will share is not known yet."""
        need = 0
        newest = self.newest(run_id)
        if isinstance(tensors, Collection):
            need = sum(tensor.data.nbytes for tensor in tensors)
        elif newest is not None:
            # From a generator: as much as last time. A first version is checked tensor by tensor.
            need = self._decode(run_id, newest).nbytes
        try:
            self._check_space(need)
        except WeightsError:
            self.gc(wait_s=_LOCK_WAIT_S)
            self._check_space(need)

    def _check_space(self, need: int) -> None:
        free = shutil.disk_usage(self.root).free
        if free < need + _RESERVE_BYTES:
            raise WeightsError(
                f"{self.root}: {free:,} bytes free, up to {need:,} needed (and {_RESERVE_BYTES:,} in reserve): "
                "free the disk, or keep fewer versions",
                retriable=True,
            )

    def _write_tensors(self, tensors: Iterable[HostTensor], chunk_bytes: int) -> tuple[tuple[TensorEntry, ...], int]:
        entries: list[TensorEntry] = []
        seen: set[str] = set()
        folders: set[Path] = set()
        pending: deque[tuple[HostTensor, memoryview, list[Future[tuple[Chunk, int]]]]] = deque()
        held = new_bytes = 0

        def finish_oldest() -> None:
            nonlocal held, new_bytes
            tensor, data, writes = pending.popleft()
            results = [write.result() for write in writes]
            chunks = tuple(chunk for chunk, _ in results)
            whole = chunks[0].digest if len(chunks) == 1 else blake3(data, max_threads=blake3.AUTO).hexdigest()
            entries.append(TensorEntry(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, digest=whole, chunks=chunks))
            folders.update(self.chunk_path(chunk.digest).parent for chunk in chunks)
            new_bytes += sum(added for _, added in results)
            held -= len(data)

        with ThreadPoolExecutor(_WRITERS, thread_name_prefix="weights-store") as pool:
            for tensor in tensors:
                data = _bytes_of(tensor)
                if tensor.name in seen:
                    raise WeightsError(f"{self.root}: two tensors are named {tensor.name!r}")
                seen.add(tensor.name)
                self._check_space(len(data))
                pieces = (data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes))
                pending.append((tensor, data, [pool.submit(self._put, piece) for piece in pieces]))
                held += len(data)
                while held > _WINDOW_BYTES:
                    finish_oldest()
            while pending:
                finish_oldest()
        # Also the folders of chunks that were there: another publisher may not have come to this point yet.
        for folder in (*folders, self.root / "chunks", self.root):
            sync_folder(folder)
        return tuple(entries), new_bytes

    def _put(self, data: memoryview) -> tuple[Chunk, int]:
        """Have a chunk in the store; returns it and the bytes that were added for it."""
        chunk = Chunk(manifests.digest(data), len(data))
        path = self.chunk_path(chunk.digest)
        # Read again before it is shared: a damaged chunk would make this version unusable as well.
        if _damage(path, chunk) is None:
            return chunk, 0
        path.parent.mkdir(exist_ok=True)
        self._write(data, path)
        return chunk, len(data)

    def _write(self, data: bytes | memoryview, path: Path) -> None:
        temporary = self.root / "tmp" / uuid.uuid4().hex
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    # Retention

    def retire(self, run_id: str, keep: int) -> list[int]:
        """Remove manifests beyond the `keep` newest of the run, except of versions being read. Returns what went."""
        if keep < 1:
            raise WeightsError(f"{self.root}: keep is {keep}, it is 1 at least")
        if not self._run(run_id).is_dir():
            return []
        with self._publishing(run_id):
            return self._retire(run_id, keep)

    def _retire(self, run_id: str, keep: int) -> list[int]:
        gone = []
        for version in self.versions(run_id)[:-keep]:
            if self.is_being_read(run_id, version):
                continue
            # A server notes the reader before it opens the manifest: who still got it is seen by the second look.
            path = self.manifest_path(run_id, version)
            aside = path.with_suffix(".retired")
            os.replace(path, aside)
            if self.is_being_read(run_id, version):
                os.replace(aside, path)
            else:
                aside.unlink()
                gone.append(version)
        present = set(self.versions(run_id))
        for name in names(self._run(run_id)):
            stem, _, kind = name.rpartition(".")
            if kind in ("reading", "retired") and stem.isdigit() and int(stem) not in present:
                (self._run(run_id) / name).unlink(missing_ok=True)
        return gone

    def gc(self, *, wait_s: float = 0.0) -> Collected:
        """Remove chunks that no manifest names and unfinished files; waits up to `wait_s` for publishers to finish.

        Raises ManifestError, with nothing removed, while a manifest of any run can't be read.
        """
        if not self.root.is_dir():
            return Collected(0, 0)
        try:
            with locked(self.root / ".lock", exclusive=True, wait_s=wait_s):
                named = {
                    chunk.digest for _, manifest in self._manifests() for tensor in manifest.tensors for chunk in tensor.chunks
                }
                for name in names(self.root / "tmp"):
                    (self.root / "tmp" / name).unlink(missing_ok=True)
                chunks = nbytes = 0
                for path, size in self._chunks():
                    if path.name not in named:
                        path.unlink(missing_ok=True)
                        chunks, nbytes = chunks + 1, nbytes + size
                return Collected(chunks, nbytes)
        except BusyError:
            return Collected(0, 0, postponed=True)

    def _tidy(self) -> None:
        """Collect after a publication; what can't be collected now is no reason to lose a published version."""
        try:
            self.gc()
        except (OSError, WeightsError) as error:
            log.warning("garbage not collected", store=str(self.root), error=str(error))

    def verify(self) -> list[Problem]:
        """Read everything again. Empty: every manifest is well-formed and every byte that it names is there and right."""
        problems: list[Problem] = []
        checked: dict[Chunk, str | None] = {}
        for run_id in self.runs():
            for version in self.versions(run_id):
                path = self.manifest_path(run_id, version)
                try:
                    manifest = self._decode(run_id, version)
                except ManifestError as error:
                    if path.exists():
                        problems.append(Problem(path, str(error)))
                    continue
                for tensor in manifest.tensors:
                    for chunk in tensor.chunks:
                        if chunk not in checked:
                            checked[chunk] = damage = _damage(self.chunk_path(chunk.digest), chunk)
                            # It may have been retired and collected since its manifest was read.
                            if damage is not None and path.exists():
                                where = f"{damage} (tensor {tensor.name!r}, version {version} of run {run_id!r})"
                                problems.append(Problem(self.chunk_path(chunk.digest), where))
                    if not any(checked[chunk] for chunk in tensor.chunks) and not self._is_whole(tensor) and path.exists():
                        problems.append(Problem(path, f"tensor {tensor.name!r} does not match its digest"))
        return problems

    def _is_whole(self, tensor: TensorEntry) -> bool:
        if len(tensor.chunks) == 1:
            return tensor.chunks[0].digest == tensor.digest
        hasher = blake3()
        for chunk in tensor.chunks:
            with suppress(FileNotFoundError):
                hasher.update_mmap(self.chunk_path(chunk.digest))
        return hasher.hexdigest() == tensor.digest

    # The folder

    def _run(self, run_id: str) -> Path:
        if not is_run_id(run_id):
            raise WeightsError(f"{self.root}: {run_id[:80]!r} is not a run id")
        return self.root / "runs" / run_id

    def _span(self, run_id: str) -> str:
        versions = self.versions(run_id)
        return f"{versions[0]} to {versions[-1]}" if versions else f"none of run {run_id!r}"

    def _decode(self, run_id: str, version: int) -> Manifest:
        raw, _ = self.read_manifest(run_id, version)
        path = self.manifest_path(run_id, version)
        manifest = manifests.decode(raw, where=str(path), run_id=run_id)
        if manifest.version != version:
            raise ManifestError(f"{path}: says that it is version {manifest.version}")
        return manifest

    def _manifests(self) -> Iterator[tuple[Path, Manifest]]:
        for run_id in self.runs():
            for version in self.versions(run_id):
                yield self.manifest_path(run_id, version), self._decode(run_id, version)

    def _chunks(self) -> Iterator[tuple[Path, int]]:
        for prefix in names(self.root / "chunks"):
            for name in names(self.root / "chunks" / prefix):
                path = self.root / "chunks" / prefix / name
                with suppress(FileNotFoundError):
                    if manifests.is_digest(name):
                        yield path, path.stat().st_size

    @contextmanager
    def _publishing(self, run_id: str) -> Iterator[None]:
        """One publisher a run, several runs at once, and no collector."""
        with locked(self._run(run_id) / ".lock", exclusive=True, wait_s=_LOCK_WAIT_S):
            with locked(self.root / ".lock", exclusive=False, wait_s=_LOCK_WAIT_S):
                yield


def _damage(path: Path, chunk: Chunk) -> str | None:
    """What is wrong with a chunk's file, if something is."""
    try:
        size = path.stat().st_size
        if size != chunk.nbytes:
            return f"has {size} bytes instead of {chunk.nbytes}"
        found = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"can't be read: {error.strerror}"
    return None if found == chunk.digest else f"has digest {found}"


def _bytes_of(tensor: HostTensor) -> memoryview:
    where = f"tensor {tensor.name!r} of shape {tensor.shape} {tensor.dtype}"
    size = DTYPE_BYTES.get(tensor.dtype)
    if size is None or any(extent < 0 for extent in tensor.shape):
        raise WeightsError(f"{where}: dtypes are {', '.join(DTYPE_BYTES)}, extents are 0 or more")
    for extent in tensor.shape:
        size *= extent
    if tensor.data.nbytes != size or not tensor.data.c_contiguous:
        raise WeightsError(f"{where}: needs {size} contiguous bytes, has {tensor.data.nbytes}")
    # A view with a zero in its shape can't be cast.
    return tensor.data.cast("B") if size else memoryview(b"")
