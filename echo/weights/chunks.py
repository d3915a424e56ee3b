"""The files behind a store's chunks: written once, named by their content, durable before anybody names them.

Refuses to know what a chunk is part of.
"""

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from echo.errors import WeightsError
from echo.weights import manifest as manifests
from echo.weights.files import names, sync_folder
from echo.weights.manifest import Chunk, Delta, TensorEntry


class Put(NamedTuple):
    """A chunk that is in the store. new_bytes: what was written for it, 0 where it was there."""

    chunk: Chunk
    new_bytes: int


class ChunkFiles:
    """The chunks under one root, and its folder for files in the making. Thread safe. Creates no folder but chunks/ab."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.folder = root / "chunks"
        self.unfinished = root / "tmp"
        # Folders of which it is known that a crash won't take them away.
        self._durable: set[Path] = set()

    def path(self, digest: str) -> Path:
        """Where a chunk lies, or would lie. Raises WeightsError for a malformed digest."""
        if not manifests.is_digest(digest):
            raise WeightsError(f"{self._root}: {digest[:80]!r} is not a chunk digest")
        return self.folder / digest[:2] / digest

    def all(self) -> Iterator[tuple[Path, int]]:
        """Every chunk's file and its size."""
        for prefix in names(self.folder):
            for name in names(self.folder / prefix):
                path = self.folder / prefix / name
                with suppress(FileNotFoundError):
                    if manifests.is_digest(name):
                        yield path, path.stat().st_size

    def put(self, data: bytes | memoryview) -> Put:
        """Have these bytes in the store; `sync` makes them findable after a crash. Raises OSError."""
        chunk = Chunk(manifests.digest(data), len(data))
        # Read again before it is shared: a damaged chunk would make this version unusable as well.
        if self.damage(chunk) is None:
            return Put(chunk, 0)
        path = self.path(chunk.digest)
        path.parent.mkdir(exist_ok=True)
        self.write(data, path)
        return Put(chunk, len(data))

    def write(self, data: bytes | memoryview, path: Path) -> None:
        """A file that is there whole or not at all. Its folder is not synced. Raises OSError."""
        temporary = self.unfinished / uuid.uuid4().hex
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def sync(self, chunks: Iterable[Chunk]) -> None:
        """Make the names of chunks durable, with all folders above them. Raises OSError.

        Also of chunks that were there before: whoever wrote them may not have come to this point yet.
        """
        folders = {self.path(chunk.digest).parent for chunk in chunks}
        for folder in folders:
            sync_folder(folder)
        if folders - self._durable:
            sync_folder(self.folder)
            sync_folder(self._root)
            self._durable |= folders

    def damage(self, chunk: Chunk) -> str | None:
        """What is wrong with a chunk's file, if something is."""
        path = self.path(chunk.digest)
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


class StoredTensor:
    """A tensor of the store, or a delta, read from its chunks piece by piece and in order, never as a whole."""

    def __init__(self, files: ChunkFiles, extent: TensorEntry | Delta) -> None:
        self._files = files
        self._extent = extent
        self._hasher = blake3()

    def read(self, start: int, stop: int) -> bytearray:
        """Its bytes from `start` to `stop`, which is where the next call has to go on. Raises OSError."""
        data = bytearray(stop - start)
        for piece in manifests.pieces(self._extent):
            first, last = max(start, piece.at), min(stop, piece.at + piece.nbytes)
            if first < last:
                with open(self._files.path(piece.chunk.digest), "rb") as file:
                    file.seek(piece.start + first - piece.at)
                    # A file that is too short leaves zeros, which the digest shows.
                    file.readinto(memoryview(data)[first - start : last - start])
        self._hasher.update(data)
        return data

    def digest(self) -> str:
        """Of all that was read so far."""
        return self._hasher.hexdigest()
