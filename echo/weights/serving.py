"""What every server of chunks shares, the origin over its store and a peer over its memory: access, ranges, pacing, counting.

Refuses to know what a version is. A chunk is immutable and tagged with its digest, wherever it comes from.
"""

import asyncio
import hmac
import mmap
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from echo.http_guard import TRUSTED
from echo.weights.clock import TIME_HEADER
from echo.weights.urls import DIGEST_PATTERN, READING_HEADER, READING_PATTERN, check_token

PIECE_BYTES = 2**20
_YEAR_S = 365 * 86400
# A paced body goes out in pieces that take about so long, so that readers share the link evenly.
_PACED_PIECE_S = 0.02
_PACED_PIECE_BYTES_MIN = 4096
_CHUNKS = "/v1/chunks/"
_HEALTH = "/health"

Digest = Annotated[str, PathParameter(pattern=DIGEST_PATTERN, description="blake3 of the chunk, 64 lower-case hex digits")]
Reading = Annotated[
    str,
    Header(alias=READING_HEADER, pattern=READING_PATTERN, description="run/version that is being pulled: keeps it"),
]


class StoredChunk(NamedTuple):
    """A chunk's file, and what the system says of it."""

    path: Path
    stat: os.stat_result


Find = Callable[[str, str], StoredChunk | memoryview | None]
"""digest, run/version that is being pulled (or "") -> where the chunk's bytes are, None where they are not here."""


class Health(BaseModel):
    """The server answers."""

    status: str = "ok"


class FileChunk(FileResponse):
    """A chunk's file, where it can't be mapped. Large reads, and one range at most: several are answered with the whole."""

    chunk_size = PIECE_BYTES
    max_ranges = 1


class MemoryChunk(Response):
    """A chunk that is in memory, sent without a copy. Answers ranges as `FileChunk` does."""

    media_type = "application/octet-stream"

    def __init__(self, data: memoryview, headers: Mapping[str, str]) -> None:
        super().__init__(headers=dict(headers) | {"Accept-Ranges": "bytes", "Content-Length": str(len(data))})
        self._data = data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = Request(scope).headers
        data = self._data
        whole = asked.get("if-range", self.headers["etag"]) != self.headers["etag"]
        if "range" in asked and not whole:
            part = parse_range(asked["range"], len(data))
            if part is None:
                refusal: Response = PlainTextResponse("the Range header is malformed", status_code=400)
                return await refusal(scope, receive, send)
            begin, end = part
            if begin >= end:
                refusal = PlainTextResponse(status_code=416, headers={"Content-Range": f"bytes */{len(data)}"})
                return await refusal(scope, receive, send)
            if (begin, end) != (0, len(data)) or "," not in asked["range"]:
                self.status_code = 206
                self.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
                self.headers["Content-Length"] = str(end - begin)
                data = data[begin:end]
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        left = len(data) if scope["method"] != "HEAD" else 0
        begin = 0
        while begin < left:
            end = min(begin + PIECE_BYTES, left)
            await send({"type": "http.response.body", "body": data[begin:end], "more_body": end < left})
            begin = end
        if not left:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """The bytes [begin, end) that a Range header asks for of a body of `size` bytes.

    None: malformed. begin >= end: nothing of it is there. Several ranges are answered with the whole body.
    """
    unit, _, ranges = text.partition("=")
    if unit.strip().lower() != "bytes":
        return None
    found = []
    for one in ranges.split(","):
        match = re.fullmatch(r"\s*([0-9]{0,18})-([0-9]{0,18})\s*", one)
        if match is None or not (match[1] or match[2]):
            return None
        if not match[1]:
            found.append((max(size - int(match[2]), 0), size))
        else:
            begin, last = int(match[1]), int(match[2]) if match[2] else size - 1
            if match[2] and last < begin:
                return None
            found.append((begin, min(last + 1, size)))
    return found[0] if len(found) == 1 else (0, size)


class Pace:
    """A link of `bytes_per_s`: who sends first is through first. Used from one event loop."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.piece_bytes = max(int(bytes_per_s * _PACED_PIECE_S), _PACED_PIECE_BYTES_MIN)
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0

    def reserve(self, nbytes: int) -> float:
        """Take the link for `nbytes`. Returns the seconds until they are through."""
        now = self._clock()
        self._free_at = max(now, self._free_at) + nbytes / self._bytes_per_s
        return self._free_at - now


class Paced:
    """Bounds the bytes of chunk bodies per second, over all connections together. Health and manifests pass at once."""

    def __init__(self, app: ASGIApp, pace: Pace) -> None:
        self._app = app
        self._pace = pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_CHUNKS):
            await self._app(scope, receive, send)
            return

        async def paced(message: Message) -> None:
            body = message.get("body", b"")
            size = self._pace.piece_bytes
            if not body:
                await send(message)
                return
            for begin in range(0, len(body), size):
                piece = body[begin : begin + size]
                await asyncio.sleep(self._pace.reserve(len(piece)))
                more = message.get("more_body", False) or begin + size < len(body)
                await send({**message, "body": piece, "more_body": more})

        await self._app(scope, receive, paced)


class Measured:
    """Tells of each request: route template, status, seconds; and of chunk bytes as they go out.

    Pure ASGI, so that bodies pass by untouched.
    """

    def __init__(
        self, app: ASGIApp, *, sent: Callable[[int], None], answered: Callable[[str, int, float], None] = lambda *_: None
    ) -> None:
        self._app = app
        self._sent = sent
        self._answered = answered

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
            if message["type"] == "http.response.body" and scope["path"].startswith(_CHUNKS) and status in (200, 206):
                self._sent(len(message.get("body", b"")))

        try:
            await self._app(scope, receive, observed)
        finally:
            # Unknown paths share one label: a scanner must not make a series per guess.
            self._answered(getattr(scope.get("route"), "path", "unknown"), status, time.monotonic() - begun)


class Clocked:
    """Puts the server's time into each answer but chunks, which caches may keep: see `echo.weights.clock`."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float]) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[TIME_HEADER] = f"{self._clock():.6f}"
            await send(message)

        is_clocked = scope["type"] == "http" and not scope["path"].startswith(_CHUNKS)
        await self._app(scope, receive, stamped if is_clocked else send)


class Bearer:
    """Asks every request but those for /health for the token, before its path is looked up and its body is read."""

    def __init__(self, app: ASGIApp, token: SecretStr) -> None:
        self._app = app
        self._expected = token.get_secret_value().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != _HEALTH:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._expected):
                refusal = JSONResponse(
                    {"detail": "the bearer token is missing or wrong"},
                    status_code=401,
                    headers={"WWW-Authenticate": 'Bearer realm="echo-weights"'},
                )
                return await refusal(scope, receive, send)
            # Another server than ours has no such extension.
            if (trust := scope.get("extensions", {}).get(TRUSTED)) is not None:
                trust()
        await self._app(scope, receive, send)
        return None


class Routes:
    """Registers routes of an application, all but /health behind the token where one is set.

    Raises ConfigError for a token that can't travel in a header.
    """

    def __init__(self, app: FastAPI, token: SecretStr | None) -> None:
        self._app = app
        self._options: dict[str, Any] = {}
        self._refusals: dict[int | str, dict[str, Any]] = {}
        self._cache = "public" if token is None else "private"
        if token is not None:
            # Now, and not when the application is first asked.
            check_token(token)
            app.add_middleware(Bearer, token=token)
            # It checks nothing: the schema shall say what the middleware asks for.
            documented = HTTPBearer(auto_error=False, description="weights.token of the run file")
            self._options = {"dependencies": [Depends(documented)]}
            self._refusals = {401: {"description": "No or a wrong token"}}

        @app.get(_HEALTH, summary="Whether the server answers; open to everybody")
        async def health() -> Health:
            return Health()

    def get(self, path: str, *, responses: Mapping[int | str, Any] | None = None, **options: Any) -> Any:
        """GET and HEAD."""
        answers: dict[int | str, Any] = {**self._refusals, **(responses or {})}
        options = {**options, **self._options, "responses": answers}

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self._app.head(path, include_in_schema=False, **options)(function)
            return self._app.get(path, **options)(function)

        return register

    def post(self, path: str, **options: Any) -> Any:
        return self._app.post(path, **options, **self._options, responses=self._refusals)

    def chunks(self, find: Find, *, blocks: bool = True, accel_redirect: str | None = None) -> None:
        """The chunk route. blocks: `find` touches the disk. accel_redirect: a prefix that nginx in front maps to the files."""
        caching = f"{self._cache}, max-age={_YEAR_S}, immutable"

        @self.get(
            "/v1/chunks/{digest}",
            summary="A chunk's bytes",
            response_class=FileChunk,
            responses={
                200: {"content": {"application/octet-stream": {}}, "description": "The whole chunk"},
                206: {"content": {"application/octet-stream": {}}, "description": "The range that was asked for"},
                304: {"description": "As If-None-Match knows it"},
                400: {"content": {"text/plain": {}}, "description": "Malformed Range"},
                404: {"description": "No such chunk"},
                416: {"content": {"text/plain": {}}, "description": "The range begins behind the chunk's end"},
            },
        )
        async def chunk(digest: Digest, request: Request, reading: Reading = "") -> Response:
            # With TLS we would read it ourselves, see `_mapped`.
            is_mapped = request.method == "GET" and request.url.scheme == "http" and accel_redirect is None

            def locate() -> StoredChunk | memoryview | None:
                found = find(digest, reading)
                return _mapped(found) if is_mapped and isinstance(found, StoredChunk) else found

            place = await asyncio.to_thread(locate) if blocks else locate()
            if place is None:
                raise HTTPException(404, f"no chunk {digest} here")
            headers = {"ETag": f'"{digest}"', "Cache-Control": caching}
            if is_known(request, digest):
                return Response(status_code=304, headers=headers)
            if isinstance(place, memoryview):
                return MemoryChunk(place, headers)
            if accel_redirect is not None:
                headers["X-Accel-Redirect"] = f"{accel_redirect.rstrip('/')}/{digest[:2]}/{digest}"
                return Response(media_type="application/octet-stream", headers=headers)
            return FileChunk(place.path, stat_result=place.stat, media_type="application/octet-stream", headers=headers)


def _mapped(chunk: StoredChunk) -> StoredChunk | memoryview | None:
    """A chunk's file as memory, read from the disk now and not in the event loop. None where it is gone.

    The kernel alone reads it, on its way to the socket: half the CPU time of read and write, and a bad disk is an error there.
    (With TLS we would read it ourselves, and be killed by a bad disk.) What is mapped stays, also when the file is removed.
    """
    if not chunk.stat.st_size:
        return chunk
    try:
        with open(chunk.path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ))
    except FileNotFoundError:
        return None


def is_known(request: Request, digest: str) -> bool:
    """Whether If-None-Match names the digest."""
    tags = (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(","))
    return any(tag in (f'"{digest}"', "*") for tag in tags)
