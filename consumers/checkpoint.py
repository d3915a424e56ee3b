"""Checkpoints: model, optimiser and read positions as one atomic, verified unit on disk.

Refuses pickle: tensors are safetensors, everything else is JSON. Refuses to know what the learner's meta or the reader's part
mean. One folder belongs to one run, and one process writes it at a time (`held`).

    checkpoints/
      step-0000010/  state.safetensors   meta.json
      step-0000012/  ...
      .tmp-...       unfinished or on its way out: never read, removed by the next save
      .lock          held by the trainer at work, with its process id; the kernel frees it when that ends in any way

Atomic: everything is written and synced under a temporary name, then renamed; so a folder named `step-*` is whole, whatever was
killed when. Verified all the same on load: meta.json carries the blake3 digest of the tensor file and of itself.
A start from step s supersedes checkpoints of later steps (`supersede`): they are of a lineage that was abandoned (a damaged one
that the run went on without, or the run's earlier life when it was started over or set back). A save removes none of them: on a
file system without locks they may be of a trainer that took over.
"""

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from echo.errors import CheckpointError, StoppedError
from echo.waiting import Watch

log = structlog.get_logger("checkpoint")

FORMAT = 2
TENSORS = "state.safetensors"
META = "meta.json"
LOCK = ".lock"
_TEMPORARY = ".tmp-"
_LOOK_S = 0.05
_NAME = re.compile(r"^step-(\d{7,})(\.previous)?$")


class Loaded(NamedTuple):
    """A verified checkpoint. meta and reader are what `save` was given."""

    path: Path
    step: int
    policy_version: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    reader: dict[str, Any]


class _Meta(msgspec.Struct, kw_only=True):
    """meta.json. `checksum` is the digest of this struct's compact JSON with an empty checksum."""

    format: int
    run_id: str
    step: int
    policy_version: int
    created: float
    tensors_digest: str
    tensors_bytes: int
    meta: dict[str, Any]
    reader: dict[str, Any]
    checksum: str


class CheckpointStore:
    """The checkpoints of one run in one folder, the newest `keep` of them.

    save, newest, load: raise CheckpointError where the folder belongs to another run or can't be written or read.
    """

    def __init__(self, dir: Path, run_id: str, keep: int) -> None:
        self.dir = dir
        self.run_id = run_id
        self.keep = keep
        self._loaded: Path | None = None

    def check(self, resume: Path | str) -> None:
        """What can be said before anything is taken over. Raises CheckpointError: a foreign folder, a missing checkpoint."""
        self._refuse_foreign()
        if isinstance(resume, Path):
            self._check_named(resume)

    @contextmanager
    def held(self, *, stopping: Callable[[], bool], waiting_s: float) -> Iterator[None]:
        """Have the folder to ourselves. Waits for whom we have taken over from, and says so.

        Raises CheckpointError where the folder can't be made, StoppedError if a stop is asked for meanwhile.
        """
        lock = self.dir / LOCK
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CheckpointError(f"checkpoint.dir: {self.dir} can't be written: {error}: choose another folder") from None
        try:
            watch = Watch(f"{self.dir} to be free", lambda: _held_by(descriptor), limit_s=waiting_s)
            while not _locked(descriptor):
                if stopping():
                    raise StoppedError(f"stopped while waiting for {self.dir}: {_held_by(descriptor)}")
                watch.check()
                time.sleep(_LOOK_S)
            with suppress(OSError):
                # For people alone: on a full disk the lock holds all the same.
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        policy_version: int,
        reader: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint; when this returns it is durable. Then prune, sparing the one that was loaded.

        tensors: contiguous, none sharing memory with another. meta (the learner's) and reader (frontier per partition and
        resolved intervals) are JSON-able. A checkpoint of the same step is replaced.
        """
        target = self.dir / f"step-{step:07d}"
        temporary = self.dir / f"{_TEMPORARY}{target.name}-{secrets.token_hex(4)}"
        try:
            self._refuse_foreign()
            temporary.mkdir(parents=True)
            self._write(temporary, step, tensors, meta, policy_version, reader)
            self._put(temporary, target)
            self._prune()
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {target}: can't be written: {error}; the ones before it still stand: free space on its disk, or "
                "set checkpoint.dir to a copy of it on another one, and start again"
            ) from error
        return target

    def newest(self) -> Loaded | None:
        """The newest checkpoint that is whole; None where there is none at all.

        A damaged one is passed over with a warning. Raises CheckpointError where all are damaged, or for a foreign run.
        """
        self._refuse_foreign()
        damaged = []
        for _, _, path in self._finished():
            try:
                loaded = self._load(path)
            except CheckpointError as error:
                log.warning("checkpoint damaged, trying the one before it", path=str(path), error=str(error))
                damaged.append(str(error))
                continue
            self._loaded = path
            return loaded
        if damaged:
            raise CheckpointError(
                f"{self.dir}: no checkpoint is whole: {'; '.join(damaged)}. Restore one, or move the folder away to start over"
            )
        return None

    def load(self, path: Path) -> Loaded:
        """This very checkpoint, which may lie outside `dir` (a copy). Raises CheckpointError where it is missing or damaged."""
        self.check(path)
        loaded = self._load(path)
        self._loaded = path
        return loaded

    def _check_named(self, path: Path) -> None:
        if not (path / META).is_file():
            known = ", ".join(found.name for _, _, found in self._finished()) or "none"
            raise CheckpointError(
                f"{path}: there is no checkpoint: checkpoint.resume takes auto, never or a folder like "
                f"{self.dir / 'step-0000010'}; in {self.dir} there are: {known}"
            )
        owner = _read_meta(path).run_id
        if owner != self.run_id:
            raise CheckpointError(
                f"{path}: is a checkpoint of run {owner!r}, and this is run {self.run_id!r}: resume from one of its own"
            )

    def supersede(self, step: int | None) -> None:
        """The run goes on from `step` (None: from its beginning): remove the checkpoints after it.

        To be done before the journal is cut there: a later checkpoint that won the next resume would miss its lines.
        """
        try:
            for number, _, path in self._finished():
                if step is None or number > step:
                    log.warning("removing a checkpoint of an abandoned lineage", path=str(path), resumed_step=step)
                    self._discard(path)
        except OSError as error:
            raise CheckpointError(f"{self.dir}: a superseded checkpoint can't be removed: {error}") from error

    def _finished(self) -> list[tuple[int, bool, Path]]:
        """Folders with a final name as (step, is not `.previous`, path), newest first.

        `.previous` is a checkpoint that its namesake was replacing.
        """
        if not self.dir.is_dir():
            return []
        found = [(int(m[1]), m[2] is None, path) for path in self.dir.iterdir() if (m := _NAME.match(path.name))]
        return sorted(found, reverse=True)

    def _refuse_foreign(self) -> None:
        for _, _, path in self._finished():
            try:
                owner = _read_meta(path).run_id
            except CheckpointError:
                continue  # Damaged: whose it is can't be said, and it will not be loaded.
            if owner != self.run_id:
                raise CheckpointError(
                    f"{path}: belongs to run {owner!r}, not {self.run_id!r}: give checkpoint.dir a folder of its own"
                )

    def _write(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        policy_version: int,
        reader: Mapping[str, Any],
    ) -> None:
        file = folder / TENSORS
        save_file(dict(tensors), file)
        _sync(file)
        written = _Meta(
            format=FORMAT,
            run_id=self.run_id,
            step=step,
            policy_version=policy_version,
            created=round(time.time(), 3),
            tensors_digest=_digest(file),
            tensors_bytes=file.stat().st_size,
            meta=dict(meta),
            reader=dict(reader),
            checksum="",
        )
        # Through JSON once, so that the checksum is of what a reader will decode (tuples become lists, keys strings).
        written = msgspec.json.decode(msgspec.json.encode(written), type=_Meta)
        written.checksum = _checksum(written)
        (folder / META).write_bytes(msgspec.json.format(msgspec.json.encode(written), indent=1))
        _sync(folder / META)
        _sync(folder)

    def _put(self, temporary: Path, target: Path) -> None:
        if target.exists():
            # A folder can't be renamed over another one. Between these two renames the old one is still found.
            previous = target.with_name(f"{target.name}.previous")
            self._discard(previous)
            target.rename(previous)
        temporary.rename(target)
        _sync(self.dir)

    def _prune(self) -> None:
        kept = 0
        for _, current, path in self._finished():
            if current or not path.with_suffix("").exists():
                kept += 1
                if kept <= self.keep or path == self._loaded:
                    continue
            self._discard(path)
        for leftover in self.dir.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover)

    def _discard(self, path: Path) -> None:
        """Remove a folder so that a half-removed one is never taken for a checkpoint."""
        if not path.exists():
            return
        doomed = self.dir / f"{_TEMPORARY}{path.name}-{secrets.token_hex(4)}"
        path.rename(doomed)
        shutil.rmtree(doomed)

    def _load(self, path: Path) -> Loaded:
        found = _read_meta(path)
        file = path / TENSORS
        try:
            size = file.stat().st_size
            if size != found.tensors_bytes:
                raise CheckpointError(f"{file}: has {size} bytes, not {found.tensors_bytes}")
            digest = _digest(file)
            if digest != found.tensors_digest:
                raise CheckpointError(f"{file}: digest {digest} is not the recorded {found.tensors_digest}")
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: can't be read: {error}") from error
        return Loaded(path, found.step, found.policy_version, tensors, found.meta, found.reader)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _held_by(descriptor: int) -> str:
    holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
    return (
        f"another trainer of this run is at work there (process {holder} on its host); it is fenced and ends at its next "
        "message. If it hangs, end it"
    )


def _read_meta(path: Path) -> _Meta:
    file = path / META
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Meta)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: can't be read: {error}") from error
    if found.format != FORMAT:
        raise CheckpointError(f"{file}: format {found.format}, this version of Echo reads {FORMAT}")
    if _checksum(found) != found.checksum:
        raise CheckpointError(f"{file}: does not match its checksum")
    return found


def _checksum(meta: _Meta) -> str:
    return blake3(msgspec.json.encode(msgspec.structs.replace(meta, checksum=""))).hexdigest()


def _digest(file: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def _sync(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
