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
from echo.weights.attempts import Attempt, DamagedChunk, MissingChunk, receive
from echo.weights.buffers import Buffers
from echo.weights.clock import ServerClock
from echo.weights.manifest import Base, HostTensor, Manifest
from echo.weights.peers import PeerNode, unique_chunks
from echo.weights.plan import Held, Plan, Want
from echo.weights.reputations import Reputations
from echo.weights.sources import Queue
from echo.weights.transport import Abort, Retries, Session
from echo.weights.urls import chunk_url, manifest_url

log = structlog.get_logger("weights.pull")

T = TypeVar("T")

_MANIFEST_BYTES_MAX = 256 * 2**20
# How often the waiting caller looks whether the pull is cancelled or late, and how far each source is.
_LOOK_S = 0.05
# A peer that does not answer is given up long before a server would be, also if nothing else gives anything.
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
        self._queue: Queue | None = None
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
            if self._queue is not None:
                self._queue.look()
            if progress is not None and self._total is not None:
                progress(self._present, self._total)
            if cancelled():
                raise PullCancelled(f"{self._wanted.where}: cancelled after {self._state()}")
            if time.monotonic() - begun > deadline_s:
                raise WeightsError(
                    f"{self._wanted.where}: not done within {deadline_s:g} s, {self._state()}{self._missing()}: "
                    "is the link too slow for weights.pull_deadline_s?",
                    retriable=True,
                )

        # One more asks the tracker.
        pool = ThreadPoolExecutor(self._workers(connections) + 1, thread_name_prefix="weights-pull")
        settled = False
        try:
            ((manifest, plan),) = _wait_for([pool.submit(self._prepare)], look)
            self._fetch_all(pool, connections, manifest, plan, look)
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

    @property
    def _present(self) -> int:
        return self._queue.present_bytes if self._queue is not None else 0

    def _missing(self) -> str:
        return f"; {self._queue.report()}" if self._queue is not None else ""

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
        self, pool: ThreadPoolExecutor, connections: int, manifest: Manifest, plan: Plan, look: Callable[[], None]
    ) -> None:
        node = self._node
        if node is not None and (self._total or 0) < node.min_bytes:
            node = None
        # Each puller in an order of its own, so that they soon have different chunks to give.
        queue = self._queue = Queue(
            plan.wants,
            self._reputations,
            origin_lanes=connections if self._node is None else 2 * connections,
            connections=connections,
            abort=self._abort,
            shuffle=Random() if node is not None else None,
            me=node.url if node is not None else "",
        )
        order = unique_chunks(manifest) if self._node is not None else []
        shared = frozenset(order)
        if node is not None and plan.wants:
            pool.submit(self._exchange, node, queue, order).add_done_callback(_log_failure)
        count = min(self._workers(connections), max(2 * len(plan.wants), 1))
        try:
            _wait_for([pool.submit(self._work, queue, shared) for _ in range(count)], look)
        finally:
            queue.end()

    def _workers(self, connections: int) -> int:
        """With peers, twice as many ask them, some of which wait for others; the rest stays free for the origin."""
        return connections if self._node is None else 3 * connections

    def _exchange(self, node: PeerNode, queue: Queue, order: Sequence[str]) -> None:
        session = self._open_session()
        wanted = self._wanted
        try:
            while not self._abort.is_set() and not queue.is_over:
                peers = node.exchange(session, wanted.bases[0], wanted.run_id, wanted.version, order, queue.pending)
                queue.saw(peers)
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
            while not self._abort.is_set() and (attempt := queue.take()) is not None:
                verified = self._fetch(session, queue, attempt)
                if verified is not None:
                    self._spread(queue, verified, shared)
        finally:
            session.close()

    def _fetch(self, session: Session, queue: Queue, attempt: Attempt) -> Attempt | None:
        """Returns the attempt whose chunk this worker is to spread, if there is one now."""
        try:
            if attempt.peer is None:
                self._fetch_from_origin(session, attempt)
            elif not self._fetch_from_peer(session, attempt, attempt.peer):
                return queue.left(attempt, failed=True)
        except ChunkError as error:
            if attempt.stop.is_set() or not queue.give_up(attempt):
                return queue.left(attempt)
            instead = attempt.job.want.without_it(str(error))
            if instead is None:
                raise
            self._want(queue, instead)
            queue.done(attempt.job)
            return None
        return queue.finished(attempt)

    def _spread(self, queue: Queue, verified: Attempt, shared: frozenset[str]) -> None:
        want = verified.job.want
        complete = want.spread(verified.room)
        if self._node is not None and want.chunk.digest in shared:
            self._node.holdings.add(want.chunk.digest, verified.room if (place := want.whole()) is None else place)
        for target in complete:
            self._want(queue, target.finish())
        queue.done(verified.job)

    def _want(self, queue: Queue, wants: Sequence[Want]) -> None:
        if wants:
            with self._lock:
                self._total = (self._total or 0) + sum(want.chunk.nbytes for want in wants)
            queue.add(wants)

    def _fetch_from_origin(self, session: Session, attempt: Attempt) -> None:
        urls = [chunk_url(base, attempt.digest) for base in self._wanted.bases]
        self._retries.run(urls, lambda url: self._receive(session, url, attempt), attempt.stop)

    def _fetch_from_peer(self, session: Session, attempt: Attempt, peer: str) -> bool:
        """One try. A failure costs what was received, so that bytes of two sources never mix, and the peer its reputation.

        Raises ChunkError if another source was first, or the pull ended.
        """
        begun = time.monotonic()
        try:
            self._receive(session, chunk_url(peer, attempt.digest), attempt, timeout_s=_PEER_TIMEOUT_S)
        except ChunkError as error:
            if attempt.stop.is_set() and not attempt.is_too_slow:
                raise
            with self._lock:
                self._peer_failures += 1
            if attempt.is_too_slow:
                # The queue has seen to its reputation.
                came = f"{attempt.got:,} of {attempt.nbytes:,} bytes came in {time.monotonic() - begun:.1f} s"
                log.warning("a peer is far slower than others and is avoided for a while", peer=peer, error=came)
            elif isinstance(error, MissingChunk):
                self._reputations.lacked(peer)
                log.info("a peer let go of a chunk, another source is tried", peer=peer, error=str(error))
            else:
                self._reputations.failed(peer, lied=isinstance(error, DamagedChunk))
                log.warning("a peer failed, another source is tried", peer=peer, error=str(error))
            return False
        self._reputations.succeeded(peer, attempt.nbytes, time.monotonic() - begun)
        with self._lock:
            self._from_peers += attempt.nbytes
        return True

    def _receive(self, session: Session, url: str, attempt: Attempt, timeout_s: float | None = None) -> None:
        reading = f"{self._wanted.run_id}/{self._wanted.version}"
        receive(session, url, attempt, reading=reading, timeout_s=timeout_s, count=self._count)

    def _count(self, received: int) -> None:
        with self._lock:
            self._received += received


def _log_failure(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("nobody asks for peers any more", error=repr(error))


def _wait_for(futures: list[Future[T]], look: Callable[[], None]) -> list[T]:
    """The results, in order. Raises the first error, and what `look` raises meanwhile."""
    pending = set(futures)
    while pending:
        look()
        done, pending = wait(pending, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    return [future.result() for future in futures]
