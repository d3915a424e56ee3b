"""The weight server: a store's manifests and chunks over HTTP, for producers that pull.

Refuses to write anything but the note that a version is being read. Chunks are immutable, resumable (single ranges) and
tagged with their digest. Everything but /health asks for the bearer token, where one is set.

Run it as `echo-weights serve run.yaml`; in a process that does more, `WeightServer` runs it in a thread.
"""

import hmac
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Path, Request, Response
from fastapi.responses import FileResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from echo.errors import ManifestError, WeightsError
from echo.metrics import WeightsMetrics
from echo.weights.store import WeightStore
from echo.weights.urls import (
    DIGEST_PATTERN,
    READING_HEADER,
    READING_PATTERN,
    RUN_ID_PATTERN,
    VERSION_MAX,
    check_token,
    manifest_url,
)

# How long a stopping server lets running responses finish.
_DRAIN_S = 5
_YEAR_S = 365 * 86400

RunId = Annotated[str, Path(pattern=RUN_ID_PATTERN, description="The run", examples=["gsm8k-7b"])]
Version = Annotated[int, Path(ge=0, le=VERSION_MAX, description="Policy version")]
Digest = Annotated[str, Path(pattern=DIGEST_PATTERN, description="blake3 of the chunk, 64 lower-case hex digits")]


class Latest(BaseModel):
    """The newest version of a run. `digest` is of its manifest, `url` the manifest's path on this server."""

    run_id: str
    version: int
    digest: str
    url: str


class Health(BaseModel):
    """The server answers."""

    status: str = "ok"


class ChunkResponse(FileResponse):
    """A chunk's file. Large reads and one range at most: several are answered with the whole chunk, as HTTP allows."""

    chunk_size = 2**20
    max_ranges = 1


class _Measure:
    """Counts requests, seconds and bytes by route template. Pure ASGI, so that bodies pass by untouched."""

    def __init__(self, app: ASGIApp, metrics: WeightsMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        status = 500

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and scope["path"].startswith("/v1/chunks/") and status in (200, 206):
                self._metrics.sent_bytes.inc(len(message.get("body", b"")))

        try:
            await self._app(scope, receive, observed)
        finally:
            # Unknown paths share one label: a scanner must not make a series per guess.
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.request_seconds.labels(route).observe(time.monotonic() - begun)


def create_app(store: WeightStore, *, token: SecretStr | None, metrics: WeightsMetrics) -> FastAPI:
    """The server's application. token: asked as `Authorization: Bearer`; None asks for nothing.

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
    app.add_middleware(_Measure, metrics=metrics)
    guarded: dict[str, Any] = {}
    if token is not None:
        guarded = {"dependencies": [Depends(_bearer(token))], "responses": {401: {"description": "No or a wrong token"}}}
    caching = f"{'public' if token is None else 'private'}, max-age={_YEAR_S}, immutable"

    def both(path: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        options["responses"] = {**guarded.get("responses", {}), **options.get("responses", {})}
        options["dependencies"] = guarded.get("dependencies")

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            app.head(path, include_in_schema=False, **options)(function)
            return app.get(path, **options)(function)

        return register

    @app.get("/health", summary="Whether the server answers; open to everybody")
    async def health() -> Health:
        return Health()

    @both("/metrics", summary="Prometheus metrics", response_class=Response)
    def metrics_page() -> Response:
        metrics.newest_version.clear()
        for run in store.runs():
            newest = store.newest(run)
            if newest is not None:
                metrics.newest_version.labels(run).set(newest)
        metrics.stored_bytes.set(store.stored_bytes())
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @both("/v1/runs/{run}/latest", summary="The newest version", responses={404: {"description": "Nothing published"}})
    def latest(run: RunId, response: Response) -> Latest:
        newest = store.newest(run)
        if newest is None:
            raise HTTPException(404, f"run {run!r} has published nothing here")
        _, digest = _read_manifest(store, run, newest)
        response.headers["Cache-Control"] = "no-store"
        return Latest(run_id=run, version=newest, digest=digest, url=manifest_url("", run, newest))

    @both(
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
        if _is_known(request, digest):
            return Response(status_code=304, headers=headers)
        return Response(raw, media_type="application/json", headers=headers)

    @both(
        "/v1/chunks/{digest}",
        summary="A chunk's bytes",
        response_class=ChunkResponse,
        responses={
            200: {"content": {"application/octet-stream": {}}, "description": "The whole chunk"},
            206: {"content": {"application/octet-stream": {}}, "description": "The range that was asked for"},
            304: {"description": "As If-None-Match knows it"},
            400: {"description": "Malformed Range"},
            404: {"description": "No such chunk"},
            416: {"description": "The range begins behind the chunk's end"},
        },
    )
    def chunk(
        digest: Digest,
        request: Request,
        reading: Annotated[
            str | None,
            Header(alias=READING_HEADER, pattern=READING_PATTERN, description="run/version that is being pulled: keeps it"),
        ] = None,
    ) -> Response:
        path = store.chunk_path(digest)
        try:
            stat = os.stat(path)
        except FileNotFoundError:
            raise HTTPException(404, f"no chunk {digest} here") from None
        if reading is not None:
            run, _, version = reading.partition("/")
            if int(version) <= VERSION_MAX:
                store.hold(run, int(version))
        headers = {"ETag": f'"{digest}"', "Cache-Control": caching}
        if _is_known(request, digest):
            return Response(status_code=304, headers=headers)
        return ChunkResponse(path, stat_result=stat, media_type="application/octet-stream", headers=headers)

    return app


def _bearer(token: SecretStr) -> Callable[..., None]:
    check_token(token)
    expected = token.get_secret_value().encode()
    scheme = HTTPBearer(auto_error=False, description="weights.token of the run file")

    def check(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(scheme)]) -> None:
        given = credentials.credentials.encode() if credentials is not None else b""
        if not hmac.compare_digest(given, expected):
            raise HTTPException(
                401, "the bearer token is missing or wrong", {"WWW-Authenticate": 'Bearer realm="echo-weights"'}
            )

    return check


def _read_manifest(store: WeightStore, run: str, version: int) -> tuple[bytes, str]:
    try:
        return store.read_manifest(run, version)
    except ManifestError as error:
        if error.retriable:
            raise HTTPException(503, "the manifest can't be read now") from error
        raise HTTPException(404, f"run {run!r} has no version {version} here") from None


def _is_known(request: Request, digest: str) -> bool:
    tags = (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(","))
    return any(tag in (f'"{digest}"', "*") for tag in tags)


def _reason(error: OSError) -> str:
    # Without what the socket module adds to it; a name that can't be resolved has no errno of the system.
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)


class WeightServer:
    """Runs an application on a socket of its own, in a thread. `url` and `port` are the real ones, also for port 0.

    Raises WeightsError where the address can't be had.
    """

    def __init__(self, app: FastAPI, *, host: str, port: int) -> None:
        ipv6 = ":" in host
        try:
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ipv6 else socket.AF_INET, backlog=1024)
        except OSError as error:
            raise WeightsError(
                f"{host}:{port}: {_reason(error)}: choose another weights.host or weights.port (0 takes a free port)"
            ) from None
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{self.port}" if ipv6 else f"http://{host}:{self.port}"
        config = uvicorn.Config(
            app,
            # Whatever else the process logs is its own business; errors still reach standard error.
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_DRAIN_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="weight-server", daemon=True)

    def start(self) -> "WeightServer":
        self._thread.start()
        return self

    def request_stop(self) -> None:
        """Have it finish what runs and end. May be called from a signal handler."""
        self._server.should_exit = True

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def stop(self) -> None:
        self.request_stop()
        self.join()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
