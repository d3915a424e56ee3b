"""The folder of published policies: chunks named by their content, shared by versions and runs, and one manifest a version.

    root/chunks/ab/<digest>             the bytes, of tensors and of deltas; written once
    root/runs/<run>/<version>.json      the manifest; its appearance is the publication
    root/runs/<run>/<version>.reading   its age tells when a puller last asked for this version
    root/tmp/                           files in the making

A crash at any point leaves a valid store: whatever a manifest names was durable before the manifest appeared, and what no
manifest names is garbage that the next collection removes. Several processes and runs may share one folder: publishers
hold a shared lock on it, the collector an exclusive one, so a chunk that is about to be named is never collected.

What is needed stays: the `keep` newest versions, those that the newest one's deltas lead back to, the full policy that a kept
adapter belongs to, and what is being read: a version is retired only when nobody has asked for it for `reading_s`. A chunk
is collected only when no manifest names it. (A chunk that is being sent in that moment is an open file, which lives on.)

Refuses to overwrite a version, to go back, to take tensors that change meanwhile (their bytes are read more than once),
and to collect anything while a manifest can't be read.
"""

import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import structlog

from echo.errors import ManifestError, WeightsError
from echo.weights import manifest as manifests
from echo.weights.chunks import ChunkFiles, StoredTensor
from echo.weights.files import BusyError, locked, names, sync_folder
from echo.weights.manifest import Adapter, Base, Canary, Chunk, HostTensor, Manifest, TensorEntry
from echo.weights.urls import VERSION_MAX, is_run_id
from echo.weights.writing import flat, write_tensors

log = structlog.get_logger("weights.store")

# Left free on the disk: for the manifest and for whoever else writes there.
_RESERVE_BYTES = 16 * 2**20
_LOCK_WAIT_S = 60.0
_READ_BYTES = 4 * 2**20


class Published(NamedTuple):
    """A durable version. new_bytes: what it added to the store, deltas included; the rest it shares. digest: of the
    manifest's bytes."""

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
        self._files = ChunkFiles(root)
        # Folders of runs that a crash won't take away any more.
        self._durable: set[Path] = set()

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
        return self._files.path(digest)

    def stored_bytes(self) -> int:
        return sum(size for _, size in self._files.all())

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
        delta_chain: int = 0,
        adapter: Adapter | None = None,
        canary: Canary | None = None,
    ) -> Published:
        """Make a policy durable and servable, then retire versions of this run that nobody needs any more.

        tensors: may be a generator; about 128 MiB beside the current tensor are held. They must not change until the call
        returns. created: seconds since the epoch. keep: how many of the newest versions stay. delta_chain: how many versions
        back deltas are to lead, one for each version; 0 makes none. adapter: the tensors are one, of that full version.
        canary: goes into the manifest.

        Raises WeightsError, with the store as it was, where the version is not above all others of the run, a tensor's bytes
        don't fit its dtype and shape, the adapter's full version is not here, or the disk is full.
        """
        if chunk_bytes < 1 or keep < 1 or delta_chain < 0:
            raise WeightsError(
                f"{self.root}: chunk_bytes is {chunk_bytes} and keep is {keep}, both are 1 at least; "
                f"delta_chain is {delta_chain}, 0 at least"
            )
        path = self.manifest_path(run_id, version)
        try:
            for folder in (path.parent, self._files.folder, self._files.unfinished):
                folder.mkdir(parents=True, exist_ok=True)
            self._make_room(run_id, tensors)
            with self._publishing(run_id):
                newest = self.newest(run_id)
                if newest is not None and version <= newest:
                    raise WeightsError(
                        f"{path}: version {newest} of run {run_id!r} is published already; the next is {newest + 1}"
                    )
                if adapter is not None:
                    self._check_adapter(run_id, adapter)
                base, base_digest = self._base(run_id)
                written = write_tensors(
                    self._files,
                    tensors,
                    chunk_bytes=chunk_bytes,
                    base=base,
                    with_deltas=delta_chain > 0,
                    check_space=self._check_space,
                )
                manifest = Manifest(
                    schema=manifests.MANIFEST_SCHEMA,
                    run_id=run_id,
                    version=version,
                    step=step,
                    created=created,
                    tensors=written.tensors,
                    base=_link(base, base_digest, written.tensors, delta_chain),
                    adapter=adapter,
                    canary=canary,
                )
                raw = manifests.encode(manifest)
                self._files.write(raw, path)
                sync_folder(path.parent)
                if path.parent not in self._durable:
                    sync_folder(path.parent.parent)
                    sync_folder(self.root)
                    self._durable.add(path.parent)
                self._retire(run_id, keep)
        except OSError as error:
            raise WeightsError(
                f"{error.filename or self.root}: {error.strerror}: version {version} of run {run_id!r} is not published",
                retriable=True,
            ) from error
        finally:
            self._tidy()
        return Published(manifest, manifests.digest(raw), path, written.new_bytes)

    def _base(self, run_id: str) -> tuple[Manifest | None, str]:
        """The version whose chunks the next one shares, and its manifest's digest."""
        newest = self.newest(run_id)
        if newest is None:
            return None, ""
        try:
            return self._read(run_id, newest)
        except ManifestError as error:
            log.warning("the next version shares nothing with this one, and has no deltas", error=str(error))
            return None, ""

    def _check_adapter(self, run_id: str, adapter: Adapter) -> None:
        model, digest = self._read(run_id, adapter.model_version)
        if digest != adapter.model_digest or model.adapter is not None:
            raise WeightsError(
                f"{self.manifest_path(run_id, adapter.model_version)}: not the full policy that the adapter is for "
                f"(digest {digest}, wanted {adapter.model_digest})"
            )

    def _make_room(self, run_id: str, tensors: Iterable[HostTensor]) -> None:
        """Check that a whole version fits, before anything is written; what it will share is not known yet."""
        base, _ = self._base(run_id)
        if isinstance(tensors, Collection):
            need = sum(tensor.data.nbytes for tensor in tensors)
        else:
            # From a generator: as much as last time. A first version is checked tensor by tensor.
            need = base.nbytes if base is not None else 0
        need += base.delta_bytes if base is not None else 0
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

    def find_full(self, run_id: str, tensors: Iterable[HostTensor]) -> tuple[int, str] | None:
        """The newest full version of exactly these tensors, and its manifest's digest; None where there is none."""
        wanted = {(one.name, one.dtype, one.shape, manifests.digest(flat(one))) for one in tensors}
        for version in reversed(self.versions(run_id)):
            try:
                manifest, digest = self._read(run_id, version)
            except ManifestError as error:
                log.warning("version passed over", error=str(error))
                continue
            if manifest.adapter is None and wanted == {
                (one.name, one.dtype, one.shape, one.digest) for one in manifest.tensors
            }:
                return version, digest
        return None

    # Retention

    def retire(self, run_id: str, keep: int) -> list[int]:
        """Remove manifests beyond the `keep` newest of the run, except of versions that are needed. Returns what went."""
        if keep < 1:
            raise WeightsError(f"{self.root}: keep is {keep}, it is 1 at least")
        if not self._run(run_id).is_dir():
            return []
        with self._publishing(run_id):
            return self._retire(run_id, keep)

    def _retire(self, run_id: str, keep: int) -> list[int]:
        try:
            needed = self._needed(run_id, keep)
        except ManifestError as error:
            log.warning("no version retired: it is not known which are needed", error=str(error))
            return []
        gone = []
        for version in self.versions(run_id):
            if version in needed or self.is_being_read(run_id, version):
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

    def _needed(self, run_id: str, keep: int) -> set[int]:
        """The newest versions, those that deltas lead back to from the very newest, and the full policies of their adapters."""
        present = self.versions(run_id)
        needed = set(present[-keep:])
        link = self._decode(run_id, present[-1]).base if present else None
        for _ in range(link.chain if link is not None else 0):
            if link is None or link.version not in present:
                break
            needed.add(link.version)
            link = self._decode(run_id, link.version).base
        adapters = [manifest.adapter for manifest in (self._decode(run_id, version) for version in needed)]
        return needed | {adapter.model_version for adapter in adapters if adapter is not None}

    def gc(self, *, wait_s: float = 0.0) -> Collected:
        """Remove chunks that no manifest names and unfinished files; waits up to `wait_s` for publishers to finish.

        Raises ManifestError, with nothing removed, while a manifest of any run can't be read.
        """
        if not self.root.is_dir():
            return Collected(0, 0)
        try:
            with locked(self.root / ".lock", exclusive=True, wait_s=wait_s):
                named = {chunk.digest for _, manifest in self._manifests() for chunk in manifest.chunks()}
                for name in names(self._files.unfinished):
                    (self._files.unfinished / name).unlink(missing_ok=True)
                chunks = nbytes = 0
                for path, size in self._files.all():
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
                    named = [*tensor.chunks, *(tensor.delta.chunks if tensor.delta is not None else ())]
                    for chunk in named:
                        if chunk not in checked:
                            checked[chunk] = damage = self._files.damage(chunk)
                            # It may have been retired and collected since its manifest was read.
                            if damage is not None and path.exists():
                                where = f"{damage} (tensor {tensor.name!r}, version {version} of run {run_id!r})"
                                problems.append(Problem(self.chunk_path(chunk.digest), where))
                    if not any(checked[chunk] for chunk in named) and not self._is_whole(tensor) and path.exists():
                        problems.append(Problem(path, f"tensor {tensor.name!r} does not match its digest"))
        return problems

    def _is_whole(self, tensor: TensorEntry) -> bool:
        if len(tensor.chunks) == 1 and tensor.chunks[0].nbytes == tensor.nbytes:
            return tensor.chunks[0].digest == tensor.digest
        stored = StoredTensor(self._files, tensor)
        with suppress(FileNotFoundError):
            for start in range(0, tensor.nbytes, _READ_BYTES):
                stored.read(start, min(start + _READ_BYTES, tensor.nbytes))
        return stored.digest() == tensor.digest

    # The folder

    def _run(self, run_id: str) -> Path:
        if not is_run_id(run_id):
            raise WeightsError(f"{self.root}: {run_id[:80]!r} is not a run id")
        return self.root / "runs" / run_id

    def _span(self, run_id: str) -> str:
        versions = self.versions(run_id)
        return f"{versions[0]} to {versions[-1]}" if versions else f"none of run {run_id!r}"

    def _read(self, run_id: str, version: int) -> tuple[Manifest, str]:
        """A manifest and its digest."""
        raw, digest = self.read_manifest(run_id, version)
        path = self.manifest_path(run_id, version)
        manifest = manifests.decode(raw, where=str(path), run_id=run_id)
        if manifest.version != version:
            raise ManifestError(f"{path}: says that it is version {manifest.version}")
        return manifest, digest

    def _decode(self, run_id: str, version: int) -> Manifest:
        return self._read(run_id, version)[0]

    def _manifests(self) -> Iterator[tuple[Path, Manifest]]:
        for run_id in self.runs():
            for version in self.versions(run_id):
                yield self.manifest_path(run_id, version), self._decode(run_id, version)

    @contextmanager
    def _publishing(self, run_id: str) -> Iterator[None]:
        """One publisher a run, several runs at once, and no collector."""
        with locked(self._run(run_id) / ".lock", exclusive=True, wait_s=_LOCK_WAIT_S):
            with locked(self.root / ".lock", exclusive=False, wait_s=_LOCK_WAIT_S):
                yield


def _link(base: Manifest | None, digest: str, tensors: Sequence[TensorEntry], delta_chain: int) -> Base | None:
    """What leads from new tensors back to the version before; None where no tensor can go this way."""
    if base is None or not delta_chain:
        return None
    before = {tensor.name: tensor.digest for tensor in base.tensors}
    if not any(tensor.delta is not None or before.get(tensor.name) == tensor.digest for tensor in tensors):
        return None
    chain = min(base.base.chain + 1 if base.base is not None else 1, delta_chain)
    return Base(version=base.version, digest=digest, chain=chain)
