"""The weight server: a store's manifests and chunks over HTTP, for producers that pull.

Refuses to write anything but the note that a version is being read. Chunks are immutable, resumable (single ranges) and
tagged with their digest. Everything but /health asks for the bearer token, where one is set.

Run it as `echo-weights serve run.yaml`; in a process that does more, `WeightServer` runs it in a thread.
"""

import os
import time
from collections.abc import Callable
from typing import Annotated

import structlog
from fastapi import FastAPI, HTTPException, Path, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, SecretStr

from echo.addresses import authority, http_url
from echo.errors import ManifestError, WeightsError
from echo.http_guard import Limits
from echo.http_server import HttpServer, Tls, check_tls, listen, reason
from echo.metrics import WeightsMetrics
from echo.weights.serving import Clocked, Measured, Pace, Paced, Routes, StoredChunk, is_known
from echo.weights.store import WeightStore
from echo.weights.tracker import BITMAP_CHARACTERS_MAX, Peer, Peers, Tracker
from echo.weights.urls import RUN_ID_PATTERN, VERSION_MAX, manifest_url

log = structlog.get_logger("weights.server")

# Every puller has about four. What it sends is small: the largest is what a peer tells of itself, two bitmaps.
_LIMITS = Limits(connections=1024, body_bytes=2 * BITMAP_CHARACTERS_MAX + 64 * 2**10)

RunId = Annotated[str, Path(pattern=RUN_ID_PATTERN, description="The run", examples=["gsm8k-7b"])]
Version = Annotated[int, Path(ge=0, le=VERSION_MAX, description="Policy version")]


class Latest(BaseModel):
    """The newest version of a run. `digest` is of its manifest, `url` the manifest's path on this server."""

    run_id: str
    version: int
    digest: str
    url: str


def create_app(
    store: WeightStore,
    *,
    token: SecretStr | None,
    metrics: WeightsMetrics,
    tracker: Tracker | None = None,
    max_egress_bytes_per_s: float | None = None,
    accel_redirect: str | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The origin's application. token: asked as `Authorization: Bearer`; None asks for nothing.

    max_egress_bytes_per_s: bound of all chunk bodies together. accel_redirect: prefix of an internal location of nginx over
    the store's `chunks` folder; chunks are then answered with X-Accel-Redirect, and nginx sends them. clock: seconds since the
    epoch.
    Raises ConfigError for a token that can't travel in a header.
    """
    app = FastAPI(
        title="Echo weights",
        version="1",
        description="Published policies of Echo runs: manifests and content-addressed chunks.",
        openapi_url="/v1/openapi.json",
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )

    def answered(route: str, status: int, seconds: float) -> None:
        metrics.requests.labels(route, str(status)).inc()
        metrics.request_seconds.labels(route).observe(seconds)

    # First, and so inside of the others: what is refused is counted, too.
    routes = Routes(app, token)
    app.add_middleware(Clocked, clock=clock)
    app.add_middleware(Measured, sent=metrics.sent_bytes.inc, answered=answered)
    if max_egress_bytes_per_s is not None:
        # Outside of the other: bytes are counted once they have been let out.
        app.add_middleware(Paced, pace=Pace(max_egress_bytes_per_s))

    @routes.get("/metrics", summary="Prometheus metrics", response_class=Response)
    def metrics_page() -> Response:
        metrics.newest_version.clear()
        for run in store.runs():
            newest = store.newest(run)
            if newest is not None:
                metrics.newest_version.labels(run).set(newest)
        metrics.stored_bytes.set(store.stored_bytes())
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/runs/{run}/latest", summary="The newest version", responses={404: {"description": "Nothing published"}})
    def latest(run: RunId, response: Response) -> Latest:
        newest = store.newest(run)
        if newest is None:
            raise HTTPException(404, f"run {run!r} has published nothing here")
        _, digest = _read_manifest(store, run, newest)
        response.headers["Cache-Control"] = "no-store"
        return Latest(run_id=run, version=newest, digest=digest, url=manifest_url("", run, newest))

    @routes.get(
        "/v1/runs/{run}/manifests/{version}",
        summary="A version's manifest",
        response_class=Response,
        responses={
            200: {"content": {"application/json": {}}, "description": "Its bytes have the announced blake3 digest"},
            304: {"description": "As If-None-Match knows it"},
            404: {"description": "No such version"},
        },
    )
    def manifest(run: RunId, version: Version, request: Request) -> Response:
        # Before it is read, so that retention sees the reader.
        store.hold(run, version)
        raw, digest = _read_manifest(store, run, version)
        # A run that starts anew in an emptied store reuses the URL: ask again, the tag answers.
        headers = {"ETag": f'"{digest}"', "Cache-Control": "no-cache"}
        if is_known(request, digest):
            return Response(status_code=304, headers=headers)
        return Response(raw, media_type="application/json", headers=headers)

    def find(digest: str, reading: str) -> StoredChunk | None:
        path = store.chunk_path(digest)
        try:
            found = StoredChunk(path, os.stat(path))
        except FileNotFoundError:
            return None
        if reading:
            run, _, version = reading.partition("/")
            if int(version) <= VERSION_MAX:
                store.hold(run, int(version))
        return found

    routes.chunks(find, accel_redirect=accel_redirect)
    _add_tracker(routes, tracker or Tracker())
    return app


def _add_tracker(routes: Routes, tracker: Tracker) -> None:
    """Routes over which peers find each other. Not in threads: the tracker is used from the event loop alone."""
    path = "/v1/runs/{run}/peers/{version}"

    @routes.get(path, summary="Who holds which chunks of a version")
    async def peers(run: RunId, version: Version, response: Response) -> Peers:
        response.headers["Cache-Control"] = "no-store"
        return Peers(peers=tracker.peers(run, version))

    @routes.post(path, summary="Tell what a peer holds, and hear of the others; forgotten soon unless told again")
    async def announce(run: RunId, version: Version, peer: Peer, response: Response) -> Peers:
        response.headers["Cache-Control"] = "no-store"
        if not tracker.announce(run, version, peer):
            # Not an error of the peer's: it hears of the others all the same.
            log.warning("too many peers, one is not remembered", run=run, version=version, peer=peer.url)
        return Peers(peers=[other for other in tracker.peers(run, version) if other.url != peer.url])


def _read_manifest(store: WeightStore, run: str, version: int) -> tuple[bytes, str]:
    try:
        return store.read_manifest(run, version)
    except ManifestError as error:
        if error.retriable:
            raise HTTPException(503, "the manifest can't be read now") from error
        raise HTTPException(404, f"run {run!r} has no version {version} here") from None


class WeightServer:
    """Runs an application on a socket of its own, in a thread. `url` and `port` are the real ones, also for port 0.

    Raises WeightsError where the address can't be had.
    """

    def __init__(self, app: FastAPI, *, host: str, port: int, tls: Tls | None = None, key: str = "weights.") -> None:
        """key: what the settings of host and port are called in the run file, up to these words.

        Raises ConfigError for `tls`.
        """
        if tls is not None:
            check_tls(tls)
        try:
            listener = listen(host, port)
        except OSError as error:
            raise WeightsError(
                f"{authority(host, port)}: {reason(error)}: choose another {key}host or {key}port (0 takes a free port)"
            ) from None
        self._server = HttpServer(app, listener, name="weight-server", limits=_LIMITS, tls=tls)
        self.port = self._server.port
        self.url = http_url(host, self.port, is_tls=tls is not None)

    def start(self) -> "WeightServer":
        self._server.start()
        return self

    def check(self) -> None:
        """Raise what ended it, if it died over and over: a server that dies is started again first."""
        self._server.check()

    def request_stop(self) -> None:
        """Have it finish what runs and end. May be called from a signal handler."""
        self._server.request_stop()

    def join(self) -> None:
        """Wait until it has ended. `check` says of what."""
        self._server.join()

    def stop(self) -> None:
        self._server.stop()
