"""What a pull has to fetch and where each byte goes, given the manifest and the version that is held. No I/O.

A tensor that did not change is the held one. A changed one is made of the held one and its deltas, where they lead to it and
are fewer bytes; else of its chunks, of which those are copied that the held one has. Small tensors share chunks: their deltas
are weighed together against the chunk, and where it comes anyway, for a tensor without deltas, it brings the others too.

Refuses to write to held tensors.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from echo.errors import DeltaError
from echo.weights import delta as deltas
from echo.weights.manifest import Chunk, Delta, HostTensor, Manifest, Piece, TensorEntry, deltas_between, pieces

Allocate = Callable[[int], memoryview]


class Held(Protocol):
    """A version in host memory, verified, whose bytes do not change: what an earlier pull gave."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def manifest_digest(self) -> str: ...
    @property
    def tensors(self) -> Mapping[str, HostTensor]: ...


class Target:
    """Something that is complete when all of its pieces have come."""

    def __init__(self, pieces_missing: int) -> None:
        self._missing = pieces_missing
        self._lock = threading.Lock()

    def is_complete_with_one_more(self) -> bool:
        with self._lock:
            self._missing -= 1
            return self._missing == 0

    def finish(self) -> list["Want"]:
        """Make what the pieces are for. Returns what is wanted in their stead, where they were no good.

        A tensor made of chunks is done: its bytes are those that the manifest's chunk digests name, as they were checked when
        they came, and the manifest is the announced one. Hashing it again as a whole would add two thirds to a pull's CPU time.
        """
        return []


class Fill(NamedTuple):
    """Where a part of a chunk goes: `place` has as many bytes as the part, which begins at `start` of the chunk."""

    start: int
    place: memoryview
    target: Target


class Want:
    """A chunk to fetch, and every place where bytes of it belong."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.fills: list[Fill] = []

    def room(self) -> memoryview:
        """Memory to fetch it into: where it belongs, if that is one piece."""
        place = self.whole()
        return place if place is not None else np.empty(self.chunk.nbytes, np.uint8).data

    def whole(self) -> memoryview | None:
        """A place that all of it belongs to."""
        return next((fill.place for fill in self.fills if len(fill.place) == self.chunk.nbytes), None)

    def without_it(self, error: str) -> list["Want"] | None:
        """What is wanted where this chunk can't be had; None where nothing makes up for it."""
        targets = [fill.target for fill in self.fills]
        if not all(isinstance(target, Patched) for target in targets):
            return None
        return [want for target in targets if isinstance(target, Patched) for want in target.give_up(error)]

    def spread(self, room: memoryview) -> list[Target]:
        """Copy the chunk to wherever it belongs. Returns the targets that are complete now."""
        for fill in self.fills:
            if fill.place is not room:
                fill.place[:] = room[fill.start : fill.start + len(fill.place)]
        return [fill.target for fill in self.fills if fill.target.is_complete_with_one_more()]


class Patched(Target):
    """A tensor made of the held one and deltas, in their order."""

    def __init__(
        self,
        entry: TensorEntry,
        held: memoryview,
        data: memoryview,
        path: Sequence[Delta],
        where: str,
        failed: Callable[[str], None],
    ) -> None:
        super().__init__(sum(len(one.chunks) for one in path))
        self._entry, self._held, self._data, self._where, self._failed = entry, held, data, where, failed
        self._is_given_up = False
        self._deltas = [np.empty(one.nbytes, np.uint8).data for one in path]

    def rooms(self) -> list[memoryview]:
        """Memory for each delta's bytes."""
        return self._deltas

    def finish(self) -> list[Want]:
        entry, digest = self._entry, ""
        self._data[:] = self._held
        try:
            for one in self._deltas:
                digest = deltas.patch(self._data, one, where=f"{self._where}: the delta of tensor {entry.name!r}")
            if digest != entry.digest:
                raise DeltaError(f"{self._where}: the deltas of tensor {entry.name!r} lead to {digest}, not to {entry.digest}")
        except DeltaError as error:
            return self.give_up(str(error))
        finally:
            self._deltas = []
        return []

    def give_up(self, error: str) -> list[Want]:
        """What is wanted in the deltas' stead: the tensor's chunks. Nothing where they were given up before."""
        with self._lock:
            if self._is_given_up:
                return []
            self._is_given_up = True
        self._failed(error)
        wants: dict[Chunk, Want] = {}
        _want_pieces(wants, pieces(self._entry), self._data, Target(len(self._entry.chunks)))
        return list(wants.values())


class Plan(NamedTuple):
    """tensors: as the manifest names them, whole once everything in `wants` has come and its targets are finished.

    patched: how many of them are made from deltas.
    """

    tensors: dict[str, HostTensor]
    wants: list[Want]
    patched: int


def make(
    manifest: Manifest,
    *,
    held: Held | None,
    chain: Sequence[Manifest],
    allocate: Allocate,
    where: str,
    failed: Callable[[str], None],
) -> Plan:
    """chain: the manifest, its base's, and so on, as far as they are needed and known. failed: told of deltas that are no good.

    Raises MemoryError.
    """
    changes: list[_Change] = []
    named = [{entry.name: entry for entry in one.tensors} for one in chain]
    before = {entry.name: entry for entry in held.manifest.tensors} if held is not None else {}
    tensors: dict[str, HostTensor] = {}
    for entry in manifest.tensors:
        old = _fitting(entry, before.get(entry.name), held)
        if old is not None and before[entry.name].digest == entry.digest:
            tensors[entry.name] = old
            continue
        data = allocate(entry.nbytes)
        tensors[entry.name] = HostTensor(entry.name, entry.dtype, entry.shape, data)
        known = _known(before[entry.name], old) if old is not None else {}
        missing = [piece for piece in pieces(entry) if piece.chunk not in known]
        path = (deltas_between(before[entry.name].digest, entry.name, named) if old is not None else None) or []
        changes.append(_Change(entry, old, data, known, missing, path))
    saved = _chunks_that_deltas_save(changes)
    wants: dict[Chunk, Want] = {}
    patched = 0
    for entry, old, data, known, missing, steps in changes:
        if old is not None and steps and not saved.isdisjoint(piece.chunk for piece in missing):
            made = Patched(entry, _flat(old), data, steps, where, failed)
            for one, room in zip(steps, made.rooms(), strict=True):
                _want_pieces(wants, pieces(one), room, made)
            patched += 1
            continue
        for piece in pieces(entry):
            if piece.chunk in known:
                data[piece.at : piece.at + piece.nbytes] = known[piece.chunk]
        if missing:
            _want_pieces(wants, missing, data, Target(len(missing)))
    return Plan(tensors, list(wants.values()), patched)


class _Change(NamedTuple):
    """A tensor to be made. known: chunks that the held one has, whole. path: deltas that lead to it from there, or none."""

    entry: TensorEntry
    old: HostTensor | None
    data: memoryview
    known: dict[Chunk, memoryview]
    missing: list[Piece]
    path: Sequence[Delta]


def _chunks_that_deltas_save(changes: Iterable[_Change]) -> set[Chunk]:
    """Those that need not come, since the deltas of all the tensors that lack them are fewer bytes together."""
    coming: set[Chunk] = set()
    delta_bytes: dict[frozenset[Chunk], int] = {}
    for change in changes:
        lacked = frozenset(piece.chunk for piece in change.missing)
        if change.path:
            delta_bytes[lacked] = delta_bytes.get(lacked, 0) + sum(one.nbytes for one in change.path)
        else:
            coming |= lacked
    saved: set[Chunk] = set()
    for lacked, nbytes in delta_bytes.items():
        if nbytes < sum(chunk.nbytes for chunk in lacked - coming):
            saved |= lacked - coming
    return saved


def _want_pieces(wants: dict[Chunk, Want], missing: Iterable[Piece], data: memoryview, target: Target) -> None:
    for piece in missing:
        place = data[piece.at : piece.at + piece.nbytes]
        wants.setdefault(piece.chunk, Want(piece.chunk)).fills.append(Fill(piece.start, place, target))


def _fitting(entry: TensorEntry, before: TensorEntry | None, held: Held | None) -> HostTensor | None:
    """The held tensor of the same name, dtype and shape."""
    if before is None or held is None or (before.dtype, before.shape) != (entry.dtype, entry.shape):
        return None
    return held.tensors.get(entry.name)


def _known(before: TensorEntry, old: HostTensor) -> dict[Chunk, memoryview]:
    """The chunks that the held tensor has, whole."""
    data = _flat(old)
    return {
        piece.chunk: data[piece.at : piece.at + piece.nbytes] for piece in pieces(before) if piece.nbytes == piece.chunk.nbytes
    }


def _flat(tensor: HostTensor) -> memoryview:
    # A view with a zero in its shape can't be cast.
    return tensor.data.cast("B") if tensor.data.nbytes else memoryview(b"")
