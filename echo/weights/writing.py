"""One publication's tensors on their way into the store: cut into chunks, small ones together, with deltas beside them where
those are smaller than the chunks that a puller of the version before lacks. Who shares a chunk has a delta with all, or none.

The version before is read back from the store, block by block, and not kept in memory: it needs none of the trainer's memory
(the pages were just written, so they mostly come from the system's cache), and there are deltas also after a restart.
What is read is held against its digest; a damaged or missing file means no delta, never a wrong one.

Refuses to hold more than a window of tensors, and to name anything: that is the manifest's business.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import structlog
from blake3 import blake3

from echo.errors import WeightsError
from echo.weights.chunks import ChunkFiles, Put, StoredTensor
from echo.weights.delta import encode_from
from echo.weights.manifest import DTYPE_BYTES, Chunk, Delta, HostTensor, Manifest, TensorEntry

log = structlog.get_logger("weights.store")

# Threads that hash, compare, write and fsync: the waits for the disk overlap.
_WRITERS = 4
# Bytes of tensors that may be in the writers' hands: bounds memory where the tensors come from a generator.
_WINDOW_BYTES = 64 * 2**20
# A tensor of up to this share of a chunk goes into a chunk with others.
_SMALL_SHARE = 16
# The same for deltas, which nobody shares with a later version.
_SMALL_DELTA_SHARE = 2


class Written(NamedTuple):
    """Tensors whose chunks are durable. new_bytes: what they added to the store, deltas included."""

    tensors: tuple[TensorEntry, ...]
    new_bytes: int


class _Studied(NamedTuple):
    """A tensor's digest, whether the version before has the same bytes, and a delta against others, where it can be made."""

    digest: str
    is_unchanged: bool
    delta: bytes | None


class _Member(NamedTuple):
    """A tensor in work: its place among the tensors, its bytes, and what is found out about them."""

    number: int
    tensor: HostTensor
    data: memoryview
    studied: Future[_Studied]


class _Place(NamedTuple):
    """Where a small tensor lies. is_new: it was written for this version."""

    chunk: Chunk
    offset: int
    is_new: bool


def write_tensors(
    files: ChunkFiles,
    tensors: Iterable[HostTensor],
    *,
    chunk_bytes: int,
    base: Manifest | None,
    with_deltas: bool,
    check_space: Callable[[int], None],
) -> Written:
    """Have the tensors in the store, durably.

    base: the version before, whose chunks are shared. with_deltas: make deltas against it. check_space: raises where the disk
    has no room for so many bytes more. Raises WeightsError for tensors that don't fit their description, and OSError.
    """
    seen: set[str] = set()
    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="weights-store") as pool:
        writer = _Writer(files, pool, chunk_bytes, base, with_deltas)
        for tensor in tensors:
            data = flat(tensor)
            if tensor.name in seen:
                raise WeightsError(f"two tensors are named {tensor.name!r}")
            seen.add(tensor.name)
            check_space(len(data))
            writer.add(tensor, data)
        return writer.finish()


class _Writer:
    """Hands work to the pool and takes its results in order, in the calling thread. Jobs wait only for earlier ones."""

    def __init__(
        self, files: ChunkFiles, pool: ThreadPoolExecutor, chunk_bytes: int, base: Manifest | None, with_deltas: bool
    ) -> None:
        self._files = files
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._with_deltas = with_deltas
        self._base = {tensor.name: tensor for tensor in base.tensors} if base is not None else {}
        self._base_chunks = frozenset(base.chunks()) if base is not None else frozenset()
        self._entries: list[TensorEntry] = []
        self._new_bytes = 0
        # What is in the pool's hands: its bytes, and how to take the result.
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self._held = 0
        self._small: list[_Member] = []
        self._small_bytes = 0
        self._small_deltas: list[tuple[int, bytes]] = []
        self._small_delta_bytes = 0

    def add(self, tensor: HostTensor, data: memoryview) -> None:
        is_small = 0 < len(data) <= self._chunk_bytes // _SMALL_SHARE
        # A small tensor's delta may be larger than itself, and still save the chunk: by a byte for each word, and a hundred.
        studied = self._pool.submit(self._study, tensor, data, None if is_small else len(data))
        member = _Member(len(self._entries), tensor, data, studied)
        self._entries.append(TensorEntry(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, digest="", chunks=()))
        if is_small:
            if self._small_bytes + len(data) > self._chunk_bytes:
                self._close_small()
            self._small.append(member)
            self._small_bytes += len(data)
        else:
            writes = [self._pool.submit(self._files.put, piece) for piece in self._pieces(data)]
            self._enqueue(len(data), lambda: self._finish_own(member, writes))
        self._take_results(_WINDOW_BYTES)

    def finish(self) -> Written:
        self._close_small()
        self._take_results(-1)
        self._close_small_deltas()
        self._take_results(-1)
        named = {chunk for entry in self._entries for chunk in entry.chunks}
        named |= {chunk for entry in self._entries if entry.delta is not None for chunk in entry.delta.chunks}
        # What a published version names is durable already.
        self._files.sync(named - self._base_chunks)
        return Written(tuple(self._entries), self._new_bytes)

    def _enqueue(self, nbytes: int, finish: Callable[[], None]) -> None:
        self._jobs.append((nbytes, finish))
        self._held += nbytes

    def _take_results(self, most: int) -> None:
        while self._jobs and self._held > most:
            nbytes, finish = self._jobs.popleft()
            self._held -= nbytes
            finish()

    def _pieces(self, data: memoryview) -> list[memoryview]:
        return [data[start : start + self._chunk_bytes] for start in range(0, len(data), self._chunk_bytes)]

    def _study(self, tensor: HostTensor, data: memoryview, limit: int | None) -> _Studied:
        """limit: a delta of so many bytes is none."""
        digest = blake3(data, max_threads=blake3.AUTO).hexdigest()
        old = self._base.get(tensor.name)
        if old is None or (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
            return _Studied(digest, False, None)
        if old.digest == digest or not self._with_deltas:
            return _Studied(digest, old.digest == digest, None)
        stored = StoredTensor(self._files, old)
        try:
            delta = encode_from(stored.read, data, DTYPE_BYTES[tensor.dtype], digest=digest, limit=limit)
        except OSError as error:
            log.warning("no delta: the version before can't be read", tensor=tensor.name, error=str(error))
            return _Studied(digest, False, None)
        if delta is not None and stored.digest() != old.digest:
            log.warning("no delta: the version before is damaged in the store", tensor=tensor.name)
            return _Studied(digest, False, None)
        return _Studied(digest, False, delta)

    def _finish_own(self, member: _Member, writes: list[Future[Put]]) -> None:
        puts = [write.result() for write in writes]
        self._new_bytes += sum(put.new_bytes for put in puts)
        chunks = tuple(put.chunk for put in puts)
        missing = sum(chunk.nbytes for chunk in chunks if chunk not in self._base_chunks)
        delta = member.studied.result().delta
        self._enter(member, chunks, 0, delta if delta is not None and len(delta) < missing else None)

    def _close_small(self) -> None:
        if self._small:
            members, self._small = self._small, []
            nbytes, self._small_bytes = self._small_bytes, 0
            placed = self._pool.submit(self._place_small, members)
            self._enqueue(nbytes, lambda: self._finish_small(members, placed))

    def _place_small(self, members: list[_Member]) -> tuple[list[_Place], int]:
        """Put small tensors into one chunk, except for those that lie unchanged in one of the base, if that is used well."""
        unchanged: dict[Chunk, list[int]] = {}
        for number, member in enumerate(members):
            old = self._base.get(member.tensor.name)
            if old is not None and len(old.chunks) == 1 and old.digest == member.studied.result().digest:
                unchanged.setdefault(old.chunks[0], []).append(number)
        places: dict[int, _Place] = {}
        for chunk, numbers in unchanged.items():
            # Less than half of it in use: late pullers would fetch mostly what nobody needs.
            if 2 * sum(len(members[number].data) for number in numbers) >= chunk.nbytes and self._files.damage(chunk) is None:
                for number in numbers:
                    places[number] = _Place(chunk, self._base[members[number].tensor.name].offset, False)
        fresh = [number for number in range(len(members)) if number not in places]
        put = self._files.put(b"".join(members[number].data for number in fresh)) if fresh else None
        offset = 0
        for number in fresh:
            assert put is not None
            places[number] = _Place(put.chunk, offset, True)
            offset += len(members[number].data)
        return [places[number] for number in range(len(members))], put.new_bytes if put is not None else 0

    def _finish_small(self, members: list[_Member], placed: Future[tuple[list[_Place], int]]) -> None:
        places, new_bytes = placed.result()
        self._new_bytes += new_bytes
        deltas = [member.studied.result().delta for member in members if not member.studied.result().is_unchanged]
        missing = sum(len(member.data) for member, place in zip(members, places, strict=True) if place.is_new)
        # Where one has none, the new chunk is fetched whole, and brings the others.
        deltas_pay = None not in deltas and sum(len(delta) for delta in deltas if delta is not None) < missing
        for member, place in zip(members, places, strict=True):
            self._enter(member, (place.chunk,), place.offset, member.studied.result().delta if deltas_pay else None)

    def _enter(self, member: _Member, chunks: tuple[Chunk, ...], offset: int, delta: bytes | None) -> None:
        """Note where a tensor lies. delta: to be stored beside it."""
        self._entries[member.number] = msgspec.structs.replace(
            self._entries[member.number], digest=member.studied.result().digest, chunks=chunks, offset=offset
        )
        if delta is None:
            return
        if len(delta) <= self._chunk_bytes // _SMALL_DELTA_SHARE:
            if self._small_delta_bytes + len(delta) > self._chunk_bytes:
                self._close_small_deltas()
            self._small_deltas.append((member.number, delta))
            self._small_delta_bytes += len(delta)
        else:
            writes = [self._pool.submit(self._files.put, piece) for piece in self._pieces(memoryview(delta))]
            self._enqueue(len(delta), lambda: self._finish_deltas([(member.number, delta)], writes))

    def _close_small_deltas(self) -> None:
        if self._small_deltas:
            deltas, self._small_deltas = self._small_deltas, []
            self._small_delta_bytes = 0
            data = b"".join(delta for _, delta in deltas)
            writes = [self._pool.submit(self._files.put, data)]
            self._enqueue(len(data), lambda: self._finish_deltas(deltas, writes))

    def _finish_deltas(self, deltas: list[tuple[int, bytes]], writes: list[Future[Put]]) -> None:
        puts = [write.result() for write in writes]
        self._new_bytes += sum(put.new_bytes for put in puts)
        chunks = tuple(put.chunk for put in puts)
        offset = 0
        for index, delta in deltas:
            entry = self._entries[index]
            named = Delta(base=self._base[entry.name].digest, nbytes=len(delta), chunks=chunks, offset=offset)
            self._entries[index] = msgspec.structs.replace(entry, delta=named)
            offset += len(delta)


def flat(tensor: HostTensor) -> memoryview:
    """Its bytes. Raises WeightsError where they don't fit its dtype and shape."""
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
