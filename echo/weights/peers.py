"""A producer's part in spreading a version: it serves the chunks that it holds, from memory, and tells the origin which.

Refuses to serve what was not verified, and to fail a pull: without peers, or without a tracker, everything comes from the
origin. The token is asked for and sent as the origin does; a peer without https is not asked where the origin has it.
"""

import threading
from collections.abc import Callable, Collection, Sequence

import structlog
from fastapi import FastAPI
from pydantic import ValidationError

from echo.background import Background
from echo.errors import ManifestError, WeightsError
from echo.http_server import Tls
from echo.weights.manifest import HostTensor, Manifest, pieces
from echo.weights.server import WeightServer
from echo.weights.serving import Measured, Pace, Paced, Routes
from echo.weights.sources import PeerView
from echo.weights.tracker import Peer, Peers, decode_bitmap, encode_bitmap
from echo.weights.transport import Abort, Access, Session
from echo.weights.urls import check_url, peers_url

log = structlog.get_logger("weights.peers")

# Well below the time after which the tracker forgets.
_ANNOUNCE_S = 5.0
_TRACKER_TIMEOUT_S = 2.0
_ANSWER_BYTES_MAX = 64 * 2**20


class Holdings:
    """Verified chunks in memory, by digest. Thread safe. A view that is held, or being sent, keeps its memory as it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[str, memoryview] = {}

    def add(self, digest: str, data: memoryview) -> None:
        with self._lock:
            self._chunks[digest] = data

    def get(self, digest: str) -> memoryview | None:
        with self._lock:
            return self._chunks.get(digest)

    def keep(self, digests: Collection[str]) -> None:
        """Let go of all others."""
        with self._lock:
            self._chunks = {digest: data for digest, data in self._chunks.items() if digest in digests}

    def digests(self) -> set[str]:
        with self._lock:
            return set(self._chunks)


def unique_chunks(manifest: Manifest) -> list[str]:
    """The digests of a manifest's chunks, deltas included, each once, in their order: what bitmaps are over."""
    return list(dict.fromkeys(chunk.digest for chunk in manifest.chunks()))


def create_peer_app(
    holdings: Holdings, access: Access, *, max_egress_bytes_per_s: float | None, sent: Callable[[int], None]
) -> FastAPI:
    """Chunks and health, as the origin serves them. sent: told of chunk bytes as they go out."""
    app = FastAPI(title="Echo weights, a peer", version="1", openapi_url="/v1/openapi.json", docs_url=None, redoc_url=None)
    Routes(app, access.token).chunks(lambda digest, _reading: holdings.get(digest), blocks=False)
    app.add_middleware(Measured, sent=sent)
    if max_egress_bytes_per_s is not None:
        app.add_middleware(Paced, pace=Pace(max_egress_bytes_per_s))
    return app


class PeerNode:
    """Serves this process' chunks, and keeps telling the tracker of the newest version that it holds.

    url: where others reach it. min_bytes: pulls of less than that don't ask for peers; they are over sooner.
    Raises WeightsError where the address can't be had, ConfigError for the token or the certificate.
    """

    def __init__(
        self,
        access: Access,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        url: str | None = None,
        tls: Tls | None = None,
        max_egress_bytes_per_s: float | None = None,
        min_bytes: int = 2**20,
        sent: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.holdings = Holdings()
        self.min_bytes = min_bytes
        self._access = access
        app = create_peer_app(self.holdings, access, max_egress_bytes_per_s=max_egress_bytes_per_s, sent=sent)
        self._server = WeightServer(app, host=host, port=port, tls=tls, key="weights.peer_")
        self.url = url or self._server.url
        self._changed = threading.Condition()
        self._settled: tuple[str, Peer] | None = None
        self._abort = Abort()
        self._announcing = Background("weights-peer", self._announce, wake=self._notify)

    def start(self) -> "PeerNode":
        self._server.start()
        self._announcing.start()
        return self

    def check(self) -> None:
        """Raise what ended the server or the announcing, if anything did."""
        self._server.check()
        self._announcing.check()

    def close(self) -> None:
        self._abort.set()
        self._announcing.stop()
        self._leave()
        self._server.stop()

    def exchange(
        self, session: Session, base: str, run_id: str, version: int, order: Sequence[str], pending: Collection[str]
    ) -> dict[str, PeerView]:
        """Tell the tracker at `base` what is held and under way of a version, and hear of the others.

        Empty where the tracker can't be asked.
        """
        peer = Peer(
            url=self.url,
            have=encode_bitmap(order, self.holdings.digests()),
            pending=encode_bitmap(order, pending),
        )
        try:
            others = _tell(session, peers_url(base, run_id, version), peer)
        except WeightsError as error:
            if not session.is_aborted:
                log.info("no word of peers", error=str(error))
            return {}
        return {
            other.url: PeerView(frozenset(decode_bitmap(order, other.have)), frozenset(decode_bitmap(order, other.pending)))
            for other in others
            if _may_be_asked(other.url, base)
        }

    def settle(self, base: str, manifest: Manifest, tensors: Collection[HostTensor]) -> None:
        """From now on this is the version that is held; chunks of none but it are let go."""
        by_name = {tensor.name: tensor for tensor in tensors}
        for entry in manifest.tensors:
            for piece in pieces(entry):
                if piece.nbytes == piece.chunk.nbytes:
                    data = by_name[entry.name].data.cast("B")
                    self.holdings.add(piece.chunk.digest, data[piece.at : piece.at + piece.nbytes])
        order = unique_chunks(manifest)
        self.holdings.keep(set(order))
        peer = Peer(url=self.url, have=encode_bitmap(order, self.holdings.digests()))
        with self._changed:
            self._settled = (peers_url(base, manifest.run_id, manifest.version), peer)
            self._changed.notify_all()

    def give_up(self, held: Collection[str]) -> None:
        """A pull has failed: what came of it is let go, as far as it is not of the version that is held (these digests)."""
        self.holdings.keep(held)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _announce(self) -> None:
        session = Session(self._access, self._abort)
        told: tuple[str, Peer] | None = None
        try:
            while not self._announcing.stopping.is_set():
                with self._changed:
                    if self._settled is told and not self._announcing.stopping.is_set():
                        self._changed.wait(_ANNOUNCE_S)
                    told = self._settled
                if told is not None and not self._announcing.stopping.is_set():
                    try:
                        _tell(session, *told)
                    except WeightsError as error:
                        log.info("the tracker does not hear us", error=str(error))
        finally:
            session.close()

    def _leave(self) -> None:
        """So that nobody asks in vain until the tracker forgets."""
        with self._changed:
            settled = self._settled
        if settled is not None:
            session = Session(self._access, Abort())
            try:
                _tell(session, settled[0], Peer(url=self.url, leaving=True))
            except WeightsError as error:
                log.info("left without a word", error=str(error))
            finally:
                session.close()


def _tell(session: Session, url: str, peer: Peer) -> list[Peer]:
    body = peer.model_dump_json().encode()
    with session.ask(url, ManifestError, body=body, timeout_s=_TRACKER_TIMEOUT_S) as response:
        raw = response.read(_ANSWER_BYTES_MAX)
    try:
        return Peers.model_validate_json(raw).peers
    except ValidationError as error:
        raise ManifestError(f"{url}: not the answer of a tracker: {error.error_count()} errors") from None


def _may_be_asked(url: str, base: str) -> bool:
    try:
        check_url(url)
    except ManifestError:
        return False
    return url.startswith("https://") or not base.startswith("https://")
