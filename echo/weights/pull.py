"""One pull of one version: manifest, plan, chunks from many sources at once, checks; watched by the thread that asked for it.

Refuses to return anything partial or unverified. Every byte is checked while it arrives, straight into the memory of its
tensor. Nothing outlives the pull: whatever ends it wakes sleepers and shuts blocked sockets down.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from random import Random
from typing import NamedTuple, TypeVar

import structlog

from echo.errors import ChunkError, ManifestError, PullCancelled, WeightsError
from echo.weights import manifest as manifests
from echo.weights import plan as plans
from echo.weights.buffers import Buffers
from echo.weights.clock import ServerClock
from echo.weights.manifest import Base, HostTensor, Manifest
from echo.weights.peers import PeerNode, unique_chunks
from echo.weights.plan import Held, Plan, Want
from echo.weights.sources import Choice, Job, Queue, Reputations
from echo.weights.transport import Abort, Retries, Session
from echo.weights.urls import READING_HEADER, chunk_url, manifest_url

log = structlog.get_logger("weights.pull")

T = TypeVar("T")

# What is read and hashed at once: large enough for speed, and the most that is fetched again after a reset.
_PIECE_BYTES = 2**20
_MANIFEST_BYTES_MAX = 256 * 2**20
# How often the waiting caller looks whether the pull is cancelled or late.
_LOOK_S = 0.05
# A peer that does not answer is given up long before a server would be: there are others.
_PEER_TIMEOUT_S = 5.0
# Between questions to the tracker: at least this for each peer, so that its load does not grow with the square of them.
_EXCHANGE_S_PER_PEER = 0.0125
_EXCHANGE_S_MIN, _EXCHANGE_S_MAX = 0.05, 2.0


class Pulled(NamedTuple):
    """A verified policy. manifest_digest: of the manifest's bytes.

    received_bytes: over the network, repeats included, peer_bytes of them from peers. retries: attempts that failed.
    patched: tensors that were made from deltas.
    """

    manifest: Manifest
    manifest_digest: str
    tensors: dict[str, HostTensor]
    received_bytes: int
    seconds: float
    retries: int
    peer_bytes: int = 0
    patched: int = 0


class Wanted(NamedTuple):
    """Which version, and the servers that have it, the first preferred."""

    bases: list[str]
    run_id: str
    version: int
    manifest_digest: str

    @property
    def where(self) -> str:
        return manifest_url(self.bases[0], self.run_id, self.version)


class Pull:
    """`run` waits and watches in the calling thread, everything else happens in workers."""

    def __init__(
        self,
        wanted: Wanted,
        have: Held | None,
        *,
        sessions: Callable[[], Session],
        retries: Retries,
        abort: Abort,
        buffers: Buffers,
        reputations: Reputations,
        node: PeerNode | None,
        clock: ServerClock,
    ) -> None:
        self._wanted = wanted
        self._have = have
        self._open_session = sessions
        self._idle_sessions: deque[Session] = deque()
        self._retries = retries
        self._abort = abort
        self._buffers = buffers
        self._reputations = reputations
        self._node = node
        self._clock = clock
        self._lock = threading.Lock()
        self._received = self._from_peers = self._peer_failures = 0
        self._present = 0
        self._total: int | None = None

    def run(
        self,
        connections: int,
        deadline_s: float,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None] | None,
    ) -> Pulled:
        begun = time.monotonic()

        def look() -> None:
            if progress is not None and self._total is not None:
                progress(self._present, self._total)
            if cancelled():
                raise PullCancelled(f"{self._wanted.where}: cancelled after {self._state()}")
            if time.monotonic() - begun > deadline_s:
                raise WeightsError(
                    f"{self._wanted.where}: not done within {deadline_s:g} s, {self._state()}: "
                    "is the link too slow for weights.pull_deadline_s?",
                    retriable=True,
                )

        # Twice as many with peers: half of them fill our link, half of them wait for others. One more asks the tracker.
        workers = connections if self._node is None else 2 * connections
        pool = ThreadPoolExecutor(workers + 1, thread_name_prefix="weights-pull")
        settled = False
        try:
            ((manifest, plan),) = _wait_for([pool.submit(self._prepare)], look)
            self._fetch_all(pool, workers, manifest, plan, look)
            if progress is not None:
                progress(self._present, self._total or 0)
            if self._node is not None:
                self._node.settle(self._wanted.bases[0], manifest, plan.tensors.values())
            settled = True
        finally:
            # Done, this changes nothing; otherwise it ends what still runs.
            self._abort.set()
            pool.shutdown(cancel_futures=True)
            for session in self._idle_sessions:
                session.close()
            if self._node is not None and not settled:
                self._node.give_up(set(unique_chunks(self._have.manifest)) if self._have is not None else ())
        return Pulled(
            manifest,
            self._wanted.manifest_digest,
            plan.tensors,
            self._received,
            time.monotonic() - begun,
            self._retries.count + self._peer_failures,
            self._from_peers,
            plan.patched,
        )

    def _state(self) -> str:
        return f"{self._present:,} of {self._total:,} bytes" if self._total is not None else "no manifest yet"

    # Manifest and plan

    def _prepare(self) -> tuple[Manifest, Plan]:
        wanted = self._wanted
        session = self._open_session()
        try:
            manifest = self._fetch_manifest(session, wanted.version, wanted.manifest_digest)
            chain = self._fetch_chain(session, manifest)
        finally:
            self._idle_sessions.append(session)
        # As much memory as a version has comes back later, when it is not used any more.
        self._buffers.idle_bytes_max = manifest.nbytes
        try:
            plan = plans.make(
                manifest,
                held=self._have,
                chain=chain,
                allocate=self._allocate,
                where=wanted.where,
                failed=lambda error: log.warning("a delta is no good, its tensor is pulled whole", error=error),
            )
        except MemoryError:
            raise WeightsError(f"{wanted.where}: no memory for its {manifest.nbytes:,} bytes") from None
        self._total = sum(want.chunk.nbytes for want in plan.wants)
        return manifest, plan

    def _allocate(self, nbytes: int) -> memoryview:
        if self._abort.is_set():
            raise PullCancelled(self._wanted.where)
        return self._buffers.take(nbytes)

    def _fetch_manifest(self, session: Session, version: int, digest: str) -> Manifest:
        def fetch(url: str) -> Manifest:
            with session.ask(url, ManifestError, clock=self._clock) as response:
                raw = response.read(_MANIFEST_BYTES_MAX + 1)
                if len(raw) > _MANIFEST_BYTES_MAX:
                    raise ManifestError(f"{url}: larger than {_MANIFEST_BYTES_MAX:,} bytes, so not a manifest")
                if response.length:
                    raise ManifestError(f"{url}: the connection ended {response.length:,} bytes early", retriable=True)
            manifest = manifests.decode(raw, where=url, run_id=self._wanted.run_id, expected_digest=digest)
            if manifest.version != version:
                raise ManifestError(f"{url}: is version {manifest.version}, not {version}")
            return manifest

        urls = [manifest_url(base, self._wanted.run_id, version) for base in self._wanted.bases]
        return self._retries.run(urls, fetch)

    def _fetch_chain(self, session: Session, manifest: Manifest) -> list[Manifest]:
        """The manifests from the wanted version back to the one above ours, where deltas lead from ours to it."""
        chain = [manifest]
        have = self._have
        if have is None or have.manifest.run_id != manifest.run_id:
            return chain
        base: Base | None = manifest.base
        # As many as are promised to be there, and no more: each is a request.
        longest = base.chain if base is not None else 0
        while base is not None and base.version > have.manifest.version and len(chain) < longest:
            try:
                chain.append(self._fetch_manifest(session, base.version, base.digest))
            except WeightsError as error:
                if self._abort.is_set():
                    raise
                log.info("no deltas from so far back, changed tensors are pulled whole", error=str(error))
                return chain[:1]
            base = chain[-1].base
        return chain if base is not None and base.digest == have.manifest_digest else chain[:1]

    # Chunks

    def _fetch_all(
        self, pool: ThreadPoolExecutor, workers: int, manifest: Manifest, plan: Plan, look: Callable[[], None]
    ) -> None:
        node = self._node
        if node is not None and (self._total or 0) < node.min_bytes:
            node = None
        # Each puller in an order of its own, so that they soon have different chunks to give.
        queue = Queue(
            plan.wants,
            self._reputations,
            origin_lanes=workers,
            shuffle=Random() if node is not None else None,
            me=node.url if node is not None else "",
        )
        order = unique_chunks(manifest) if self._node is not None else []
        shared = frozenset(order)
        if node is not None and plan.wants:
            # Once before the first choice.
            _wait_for([pool.submit(self._exchange, node, queue, order, True)], look)
            pool.submit(self._exchange, node, queue, order, False).add_done_callback(_tell_of_failure)
        count = min(workers, max(len(plan.wants), 1))
        try:
            _wait_for([pool.submit(self._work, queue, shared) for _ in range(count)], look)
        finally:
            queue.end()

    def _exchange(self, node: PeerNode, queue: Queue, order: Sequence[str], once: bool) -> None:
        session = self._open_session()
        wanted = self._wanted
        try:
            while not self._abort.is_set() and not queue.is_over:
                peers = node.exchange(session, wanted.bases[0], wanted.run_id, wanted.version, order, queue.pending)
                queue.saw(peers)
                if once:
                    return
                pause_s = max(_EXCHANGE_S_MIN, _EXCHANGE_S_PER_PEER * len(peers), queue.typical_s / 4)
                self._abort.sleep(min(pause_s, _EXCHANGE_S_MAX))
        finally:
            session.close()

    def _work(self, queue: Queue, shared: frozenset[str]) -> None:
        try:
            session = self._idle_sessions.popleft()
        except IndexError:
            session = self._open_session()
        try:
            while not self._abort.is_set() and (choice := queue.take()) is not None:
                job, begun = choice.job, time.monotonic()
                try:
                    if choice.peer is None:
                        self._fetch_from_origin(session, job)
                    elif not self._fetch_from_peer(session, choice, choice.peer):
                        queue.failed(choice)
                        continue
                except ChunkError as error:
                    instead = None if self._abort.is_set() else job.want.without_it(str(error))
                    if instead is None:
                        raise
                    self._want(queue, instead)
                    queue.finished(choice, time.monotonic() - begun)
                    continue
                seconds = time.monotonic() - begun
                if self._node is not None and job.want.chunk.digest in shared:
                    self._node.holdings.add(job.want.chunk.digest, job.room)
                for target in job.want.spread(job.room):
                    self._want(queue, target.finish())
                queue.finished(choice, seconds)
        finally:
            session.close()

    def _want(self, queue: Queue, wants: Sequence[Want]) -> None:
        if wants:
            with self._lock:
                self._total = (self._total or 0) + sum(want.chunk.nbytes for want in wants)
            queue.add(wants)

    def _fetch_from_origin(self, session: Session, job: Job) -> None:
        urls = [chunk_url(base, job.want.chunk.digest) for base in self._wanted.bases]
        self._retries.run(urls, lambda url: self._fetch_rest(session, url, job))

    def _fetch_from_peer(self, session: Session, choice: Choice, peer: str) -> bool:
        """One try. A failure costs what was received, so that bytes of two sources never mix, and the peer its reputation."""
        job, nbytes = choice.job, choice.job.want.chunk.nbytes
        begun = time.monotonic()
        until = begun + self._reputations.patience_s(nbytes)
        try:
            self._fetch_rest(session, chunk_url(peer, job.want.chunk.digest), job, until=until)
        except ChunkError as error:
            self._give_back(job)
            if self._abort.is_set():
                return False
            with self._lock:
                self._peer_failures += 1
            if isinstance(error, MissingChunk):
                self._reputations.lacked(peer)
                log.info("a peer let go of a chunk, another source is tried", peer=peer, error=str(error))
            else:
                self._reputations.failed(peer, lied=isinstance(error, DamagedChunk))
                log.warning("a peer failed, another source is tried", peer=peer, error=str(error))
            return False
        self._reputations.succeeded(peer, nbytes, time.monotonic() - begun)
        with self._lock:
            self._from_peers += nbytes
        return True

    def _fetch_rest(self, session: Session, url: str, job: Job, *, until: float | None = None) -> None:
        """until: when a peer has had its time."""
        chunk = job.want.chunk
        headers = {READING_HEADER: f"{self._wanted.run_id}/{self._wanted.version}"}
        if job.got:
            # No If-Range: what a digest names does not change, and a server in front may have tags of its own.
            headers["Range"] = f"bytes={job.got}-"
        timeout_s = _PEER_TIMEOUT_S if until is not None else None
        with session.ask(url, ChunkError, headers=headers, allowed=(200, 206, 404, 416), timeout_s=timeout_s) as response:
            if response.status == 404:
                raise MissingChunk(f"{url}: {response.status} {response.reason}: the server does not have it (any more)")
            resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {job.got}-")
            if not resumed:
                self._give_back(job)
            left = chunk.nbytes - job.got
            if response.status != 200 and not resumed:
                raise ChunkError(f"{url}: {response.status} {response.reason} does not go on where it ended", retriable=True)
            if response.length is not None and response.length != left:
                self._give_back(job)
                raise ChunkError(f"{url}: offers {response.length:,} bytes where {left:,} are missing", retriable=True)
            while job.got < chunk.nbytes:
                count = response.readinto(job.room[job.got : job.got + _PIECE_BYTES])
                if not count:
                    raise ChunkError(f"{url}: the connection ended after {job.got:,} of {chunk.nbytes:,} bytes", retriable=True)
                job.hasher.update(job.room[job.got : job.got + count])
                job.got += count
                self._count(present=count, received=count)
                if until is not None and time.monotonic() > until:
                    raise ChunkError(f"{url}: too slow, {job.got:,} of {chunk.nbytes:,} bytes came", retriable=True)
        if (found := job.hasher.hexdigest()) != chunk.digest:
            self._give_back(job)
            raise DamagedChunk(f"{url}: its bytes have digest {found}: the chunk is damaged there", retriable=True)

    def _give_back(self, job: Job) -> None:
        self._count(present=-job.got)
        job.restart()

    def _count(self, *, present: int, received: int = 0) -> None:
        with self._lock:
            self._present += present
            self._received += received


def _tell_of_failure(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("nobody asks for peers any more", error=repr(error))


class MissingChunk(ChunkError):
    """The source does not have it, or not any more."""


class DamagedChunk(ChunkError):
    """All of it came, and it was not what its digest names."""


def _wait_for(futures: list[Future[T]], look: Callable[[], None]) -> list[T]:
    """The results, in order. Raises the first error, and what `look` raises meanwhile."""
    pending = set(futures)
    while pending:
        look()
        done, pending = wait(pending, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    return [future.result() for future in futures]
