"""Pulls a whole policy over HTTP into host memory: verified, resumable, all or nothing.

The manifest must have the announced digest, run and version; every chunk is checked while it arrives, straight into the
memory of its tensor. A broken transfer goes on where it ended. Refuses to return anything partial or unverified.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from blake3 import blake3
from pydantic import SecretStr

from echo.errors import ChunkError, ManifestError, PullCancelled, WeightsError
from echo.weights import manifest as manifests
from echo.weights.manifest import Chunk, HostTensor, Manifest, Piece, TensorEntry
from echo.weights.transport import Abort, Access, Retries, Session, trusting
from echo.weights.urls import READING_HEADER, base_of, check_token, check_url, chunk_url, latest_url, manifest_url

T = TypeVar("T")

# What is read and hashed at once: large enough for speed, and the most that is fetched again after a reset.
_PIECE_BYTES = 2**20
_MANIFEST_BYTES_MAX = 256 * 2**20
# How often the waiting caller looks whether the pull is cancelled or late.
_LOOK_S = 0.05


class Pulled(NamedTuple):
    """A verified policy. received_bytes: of chunks, over the network, repeats included. retries: attempts that failed."""

    manifest: Manifest
    tensors: dict[str, HostTensor]
    received_bytes: int
    seconds: float
    retries: int


class Latest(NamedTuple):
    """The newest version that a server has: its manifest's digest and URL."""

    version: int
    digest: str
    url: str


class WeightClient:
    """Pulls from weight servers. Holds no connection between pulls; may be used from several threads.

    token: sent to every server whose URL is given. attempts: for each chunk, over all servers; with the default waits of
    0.1 s to 5 s a server may be away for about 10 s. connections: chunks that are fetched at the same time.
    Raises ConfigError for a token that can't travel in a header.
    """

    def __init__(
        self,
        *,
        token: SecretStr | None = None,
        tls_ca: Path | None = None,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 60.0,
        connections: int = 4,
        attempts: int = 8,
        first_wait_s: float = 0.1,
        longest_wait_s: float = 5.0,
    ) -> None:
        tls = trusting(tls_ca) if tls_ca is not None else None
        self._access = Access(check_token(token), connect_timeout_s, read_timeout_s, tls)
        self._connections = connections
        self._attempts = attempts
        self._first_wait_s = first_wait_s
        self._longest_wait_s = longest_wait_s

    def pull(
        self,
        manifest_urls: Sequence[str],
        *,
        run_id: str,
        version: int,
        manifest_digest: str,
        deadline_s: float,
        cancelled: Callable[[], bool] = lambda: False,
        have: Mapping[str, HostTensor] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Pulled:
        """Pull one version from the servers behind `manifest_urls`, the first preferred.

        have: tensors of another version; chunks that they hold already are not fetched, and a tensor without any change is
        returned as it was given. They must not change meanwhile. cancelled: asked about 20 times a second, in the calling
        thread; also a blocked transfer ends then. progress: told (bytes present, bytes in all), in the calling thread.

        Raises ManifestError, ChunkError, PullCancelled; WeightsError for the deadline. `have` is then as it was.
        """
        bases = list(dict.fromkeys(base_of(url, run_id, version) for url in manifest_urls))
        if not bases:
            raise ManifestError(f"version {version} of run {run_id!r} was announced without a URL")
        abort = Abort()
        pull = _Pull(
            bases,
            run_id,
            version,
            manifest_digest,
            have or {},
            sessions=lambda: self._session(abort),
            retries=self._retries(abort),
            abort=abort,
        )
        return pull.run(self._connections, deadline_s, cancelled, progress)

    def latest(self, base_url: str, run_id: str) -> Latest:
        """Ask the server at `base_url` for the newest version of a run. Raises ManifestError."""
        url = latest_url(base_url, run_id)
        check_url(url)
        abort = Abort()
        session = self._session(abort)

        def fetch(url: str) -> bytes:
            with session.ask(url, ManifestError) as response:
                return response.read(2**16)

        try:
            raw = self._retries(abort).run([url], fetch)
            answer = json.loads(raw)
            version, digest = int(answer["version"]), str(answer["digest"])
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestError(f"{url}: not the answer of a weight server: {error}") from None
        finally:
            session.close()
        return Latest(version, digest, manifest_url(base_url, run_id, version))

    def _session(self, abort: Abort) -> Session:
        return Session(self._access, abort)

    def _retries(self, abort: Abort) -> Retries:
        return Retries(attempts=self._attempts, first_s=self._first_wait_s, longest_s=self._longest_wait_s, abort=abort)


class _Tensor:
    """A tensor that arrives: its memory, and how many of its chunks are missing."""

    def __init__(self, entry: TensorEntry, missing: int, data: memoryview) -> None:
        self.entry = entry
        self.data = data
        self._missing = missing
        self._lock = threading.Lock()

    def is_complete_with_one_more(self) -> bool:
        with self._lock:
            self._missing -= 1
            return self._missing == 0


class _Place(NamedTuple):
    """Where bytes of a chunk belong, from `start` of the chunk on."""

    tensor: _Tensor
    data: memoryview
    start: int


class _Wanted(NamedTuple):
    """A chunk to fetch, and every place where its bytes belong."""

    chunk: Chunk
    places: list[_Place]


class _Part:
    """A chunk that arrives: what came so far survives a broken connection."""

    def __init__(self, chunk: Chunk, place: memoryview) -> None:
        self.chunk = chunk
        self.place = place
        self.restart()

    def restart(self) -> None:
        self.got = 0
        self.hasher = blake3()


class _Pull:
    """One pull. `run` waits and watches in the calling thread, everything else happens in workers."""

    def __init__(
        self,
        bases: list[str],
        run_id: str,
        version: int,
        manifest_digest: str,
        have: Mapping[str, HostTensor],
        *,
        sessions: Callable[[], Session],
        retries: Retries,
        abort: Abort,
    ) -> None:
        self._bases = bases
        self._run_id = run_id
        self._version = version
        self._manifest_digest = manifest_digest
        self._have = have
        self._open_session = sessions
        self._idle_sessions: deque[Session] = deque()
        self._retries = retries
        self._abort = abort
        self._lock = threading.Lock()
        self._received = 0
        self._present = 0
        self._total = 0

    def run(
        self,
        connections: int,
        deadline_s: float,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None] | None,
    ) -> Pulled:
        begun = time.monotonic()

        def look() -> None:
            if progress is not None and self._total:
                progress(self._present, self._total)
            if cancelled():
                raise PullCancelled(f"{self._where()}: cancelled after {self._state()}")
            if time.monotonic() - begun > deadline_s:
                raise WeightsError(
                    f"{self._where()}: not done within {deadline_s:g} s, {self._state()}: "
                    "is the link too slow for weights.pull_deadline_s?",
                    retriable=True,
                )

        pool = ThreadPoolExecutor(connections, thread_name_prefix="weights-pull")
        try:
            (manifest,) = _wait_for([pool.submit(self._fetch_manifest)], look)
            self._total = manifest.nbytes
            prepared = _wait_for([pool.submit(self._prepare, entry) for entry in manifest.tensors], look)
            wanted = _merge(missing for _, missing in prepared)
            workers = min(connections, len(wanted))
            queue = deque(wanted)
            _wait_for([pool.submit(self._work, queue) for _ in range(workers)], look)
            if progress is not None:
                progress(self._present, self._total)
        finally:
            # Done, this changes nothing; otherwise it ends what still runs.
            self._abort.set()
            pool.shutdown(cancel_futures=True)
            for session in self._idle_sessions:
                session.close()
        tensors = {tensor.name: tensor for tensor, _ in prepared}
        return Pulled(manifest, tensors, self._received, time.monotonic() - begun, self._retries.count)

    def _where(self) -> str:
        return manifest_url(self._bases[0], self._run_id, self._version)

    def _state(self) -> str:
        return f"{self._present:,} of {self._total:,} bytes" if self._total else "no manifest yet"

    def _fetch_manifest(self) -> Manifest:
        session = self._open_session()

        def fetch(url: str) -> Manifest:
            with session.ask(url, ManifestError) as response:
                raw = response.read(_MANIFEST_BYTES_MAX + 1)
                if len(raw) > _MANIFEST_BYTES_MAX:
                    raise ManifestError(f"{url}: larger than {_MANIFEST_BYTES_MAX:,} bytes, so not a manifest")
                if response.length:
                    raise ManifestError(f"{url}: the connection ended {response.length:,} bytes early", retriable=True)
            manifest = manifests.decode(raw, where=url, run_id=self._run_id, expected_digest=self._manifest_digest)
            if manifest.version != self._version:
                raise ManifestError(f"{url}: is version {manifest.version}, not {self._version}")
            return manifest

        try:
            return self._retries.run([manifest_url(base, self._run_id, self._version) for base in self._bases], fetch)
        finally:
            self._idle_sessions.append(session)

    def _prepare(self, entry: TensorEntry) -> tuple[HostTensor, list[tuple[Chunk, _Place]]]:
        """A tensor's memory, filled as far as `have` goes, and the chunks that are missing with their places."""
        if self._abort.is_set():
            raise PullCancelled(self._where())
        held = self._held(entry)
        pieces = list(manifests.pieces(entry))
        known = [held is not None and self._is_known(entry, piece, held) for piece in pieces]
        if held is not None and all(known):
            self._count(present=entry.nbytes)
            return self._have[entry.name], []
        try:
            data = np.empty(entry.nbytes, np.uint8).data
        except MemoryError:
            raise WeightsError(f"{self._where()}: no memory for the {entry.nbytes:,} bytes of tensor {entry.name!r}") from None
        tensor = _Tensor(entry, known.count(False), data)
        missing = []
        for piece, is_known in zip(pieces, known, strict=True):
            place = data[piece.at : piece.at + piece.nbytes]
            if held is not None and is_known:
                place[:] = held[piece.at : piece.at + piece.nbytes]
                self._count(present=piece.nbytes)
            else:
                missing.append((piece.chunk, _Place(tensor, place, piece.start)))
        return HostTensor(entry.name, entry.dtype, entry.shape, data), missing

    def _is_known(self, entry: TensorEntry, piece: Piece, held: memoryview) -> bool:
        # A chunk that is shared with other tensors has one part of this tensor: all of it.
        wanted = piece.chunk.digest if piece.nbytes == piece.chunk.nbytes else entry.digest
        return manifests.digest(held[piece.at : piece.at + piece.nbytes]) == wanted

    def _held(self, entry: TensorEntry) -> memoryview | None:
        held = self._have.get(entry.name)
        if held is None or (held.dtype, tuple(held.shape), held.data.nbytes) != (entry.dtype, entry.shape, entry.nbytes):
            return None
        return held.data.cast("B") if entry.nbytes else memoryview(b"")

    def _work(self, queue: deque[_Wanted]) -> None:
        try:
            session = self._idle_sessions.popleft()
        except IndexError:
            session = self._open_session()
        try:
            while not self._abort.is_set():
                try:
                    chunk, places = queue.popleft()
                except IndexError:
                    return
                whole = next((place.data for place in places if len(place.data) == chunk.nbytes), None)
                data = whole if whole is not None else memoryview(bytearray(chunk.nbytes))
                self._fetch_chunk(session, chunk, data)
                self._count(present=-chunk.nbytes)
                for tensor, place, start in places:
                    if place is not data:
                        place[:] = data[start : start + len(place)]
                    self._count(present=len(place))
                    if tensor.is_complete_with_one_more():
                        self._check_whole(tensor)
        finally:
            session.close()

    def _fetch_chunk(self, session: Session, chunk: Chunk, place: memoryview) -> None:
        part = _Part(chunk, place)
        urls = [chunk_url(base, chunk.digest) for base in self._bases]
        self._retries.run(urls, lambda url: self._fetch_rest(session, url, part))

    def _fetch_rest(self, session: Session, url: str, part: _Part) -> None:
        chunk = part.chunk
        headers = {READING_HEADER: f"{self._run_id}/{self._version}"}
        if part.got:
            headers |= {"Range": f"bytes={part.got}-", "If-Range": f'"{chunk.digest}"'}
        with session.ask(url, ChunkError, headers=headers, allowed=(200, 206, 416)) as response:
            resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {part.got}-")
            if not resumed:
                self._give_back(part)
            left = chunk.nbytes - part.got
            if response.status != 200 and not resumed:
                raise ChunkError(f"{url}: {response.status} {response.reason} does not go on where it ended", retriable=True)
            if response.length is not None and response.length != left:
                self._give_back(part)
                raise ChunkError(f"{url}: offers {response.length:,} bytes where {left:,} are missing", retriable=True)
            while part.got < chunk.nbytes:
                count = response.readinto(part.place[part.got : part.got + _PIECE_BYTES])
                if not count:
                    raise ChunkError(
                        f"{url}: the connection ended after {part.got:,} of {chunk.nbytes:,} bytes", retriable=True
                    )
                part.hasher.update(part.place[part.got : part.got + count])
                part.got += count
                self._count(present=count, received=count)
        if (found := part.hasher.hexdigest()) != chunk.digest:
            self._give_back(part)
            raise ChunkError(f"{url}: its bytes have digest {found}: the chunk is damaged there", retriable=True)

    def _check_whole(self, tensor: _Tensor) -> None:
        entry = tensor.entry
        # A chunk that is the whole tensor was checked when it came.
        is_checked = len(entry.chunks) == 1 and entry.chunks[0].nbytes == entry.nbytes
        found = entry.chunks[0].digest if is_checked else blake3(tensor.data, max_threads=blake3.AUTO).hexdigest()
        if found != entry.digest:
            raise ManifestError(f"{self._where()}: the chunks of tensor {entry.name!r} don't make up its digest {entry.digest}")

    def _give_back(self, part: _Part) -> None:
        self._count(present=-part.got)
        part.restart()

    def _count(self, *, present: int, received: int = 0) -> None:
        with self._lock:
            self._present += present
            self._received += received


def _merge(missing: Iterable[list[tuple[Chunk, _Place]]]) -> list[_Wanted]:
    """Bytes that belong in several places are fetched once."""
    wanted: dict[Chunk, _Wanted] = {}
    for places in missing:
        for chunk, place in places:
            wanted.setdefault(chunk, _Wanted(chunk, [])).places.append(place)
    return list(wanted.values())


def _wait_for(futures: list[Future[T]], look: Callable[[], None]) -> list[T]:
    """The results, in order. Raises the first error, and what `look` raises meanwhile."""
    pending = set(futures)
    while pending:
        look()
        done, pending = wait(pending, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    return [future.result() for future in futures]
