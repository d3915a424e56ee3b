"""What stands between strangers and a listening port of ours: bounds on connections, heads, bodies and waiting.

A connection counts from its acceptance on, before its TLS handshake and its first byte. At the limit, the connection that has
kept the server waiting longest gives its place to a new one, a connection without a token before one that has shown it. A
connection that is being answered keeps its place. Heads and bodies have a size and a time, and answers must be taken.

Refuses pipelining, upgrades, and to let strangers use up the process's descriptors. Built on uvicorn's protocol for httptools.
"""

import asyncio
import enum
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = structlog.get_logger("http.guard")

# An ASGI extension: the application calls what is under this key of scope["extensions"] when a request has shown the token.
TRUSTED = "echo.trusted"

# Bytes that the parser gets at once, so that a limit is noticed before more is parsed.
_SLICE_BYTES = 16 * 2**10
_TICK_S = 1.0
_CLOSING_S = 10.0
# What is accepted before anything else has its turn.
_ACCEPTED_AT_ONCE = 32
# How long nothing is accepted when the system has no descriptor, or no memory, for another connection.
_REST_S = 0.5
_SAY_EVERY_S = 60.0


class Limits(NamedTuple):
    """What a port bears. Times are in seconds, and up to two longer in effect."""

    connections: int
    """At the same time, those in their TLS handshake included."""
    head_bytes: int = 32 * 2**10
    body_bytes: int = 256 * 2**10
    """Of a request, with the framing of its chunks."""
    head_s: float = 10.0
    """From the acceptance of a connection, or the first byte of a further request, to the end of the head."""
    body_s: float = 10.0
    """From the end of the head to the end of the body."""
    idle_s: float = 30.0
    """Between two requests."""
    stalled_s: float = 60.0
    """How long a client may take none of an answer."""


class Stage(enum.Enum):
    """What a connection is at."""

    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()
    IDLE = enum.auto()
    CLOSING = enum.auto()


class Visit:
    """One connection, as the guard sees it."""

    def __init__(self, now: float, close: Callable[[], object]) -> None:
        self.stage = Stage.HEAD
        self.since = now
        """When the stage began."""
        self.received = 0
        """Bytes since then."""
        self.stalled_since: float | None = None
        """Since when the client takes nothing, while there is something to take."""
        self.is_trusted = False
        """Whether its last request had the token."""
        self.is_gone = False
        self.close: Callable[[], object] = close
        """Ends the connection at once."""
        self.is_closing: Callable[[], bool] = lambda: False


class Guard:
    """The connections of one port. Pure: `tick` moves its time, which stands still while the process does. Not thread safe."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.now = 0.0
        self.turned_away = 0
        """Connections that were closed for their number."""
        self.timed_out = 0
        """Connections that were closed for their slowness."""
        # Each in the order in which they began to wait, so that the first is the next to go.
        self._waiting: dict[Visit, None] = {}
        self._waiting_trusted: dict[Visit, None] = {}
        self._answered: dict[Visit, None] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._waiting_trusted) + len(self._answered)

    def __iter__(self) -> Iterator[Visit]:
        yield from self._waiting
        yield from self._waiting_trusted
        yield from self._answered

    def admit(self, close: Callable[[], object]) -> Visit | None:
        """A new connection, which `close` ends. None: there is no place, all others are being answered."""
        if len(self) >= self.limits.connections and not self.evict():
            self.turned_away += 1
            return None
        visit = Visit(self.now, close)
        self._file(visit)
        return visit

    def evict(self) -> bool:
        """Close the connection that is worth least: one that waits, without a token if there is one, and the longest."""
        for queue in (self._waiting, self._waiting_trusted):
            if queue:
                self.turned_away += 1
                self.drop(next(iter(queue)))
                return True
        return False

    def enter(self, visit: Visit, stage: Stage) -> None:
        visit.stage, visit.since, visit.received = stage, self.now, 0
        self._file(visit)

    def stalled(self, visit: Visit, is_stalled: bool) -> None:
        """The client does, or does not, take what is sent to it."""
        visit.stalled_since = self.now if is_stalled else None
        if visit.stage is Stage.IDLE:
            # Its time begins when it has taken the answer before.
            visit.since = self.now
        self._file(visit)

    def drop(self, visit: Visit) -> None:
        self.forget(visit)
        visit.close()

    def forget(self, visit: Visit) -> None:
        visit.is_gone = True
        self._file(visit)

    def tick(self, seconds: float) -> None:
        """So much time has passed: close those that are overdue."""
        self.now += seconds
        for visit in list(self):
            if visit.stage is not Stage.CLOSING and visit.is_closing():
                self.enter(visit, Stage.CLOSING)
            elif self._is_overdue(visit):
                self.timed_out += 1
                self.drop(visit)

    def _is_overdue(self, visit: Visit) -> bool:
        limits = self.limits
        if visit.stalled_since is not None and visit.stage not in (Stage.HEAD, Stage.BODY):
            return self.now - visit.stalled_since > limits.stalled_s
        if visit.stage is Stage.ANSWER:
            return False
        allowed = {
            Stage.HEAD: limits.head_s,
            Stage.BODY: limits.body_s,
            Stage.IDLE: limits.idle_s,
            Stage.CLOSING: _CLOSING_S,
        }[visit.stage]
        return self.now - visit.since > allowed

    def _file(self, visit: Visit) -> None:
        for queue in (self._waiting, self._waiting_trusted, self._answered):
            queue.pop(visit, None)
        if visit.is_gone:
            return
        if visit.stage is Stage.ANSWER and visit.stalled_since is None:
            self._answered[visit] = None
        elif visit.is_trusted:
            self._waiting_trusted[visit] = None
        else:
            self._waiting[visit] = None


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which tells the guard what its connection is at, and bounds what its parser gets."""

    guard: Guard
    visit: Visit

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.visit.close, self.visit.is_closing = transport.abort, transport.is_closing
        if self.visit.is_gone:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.forget(self.visit)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        visit, limits = self.visit, self.guard.limits
        if visit.stage is Stage.ANSWER:
            # No client of Echo's pipelines, and a stranger could have any number of answers made.
            self.transport.abort()
            return
        if visit.stage is Stage.IDLE:
            self.guard.enter(visit, Stage.HEAD)
        for begin in range(0, len(data), _SLICE_BYTES):
            if self.transport.is_closing():
                return
            piece = data[begin : begin + _SLICE_BYTES]
            super().data_received(piece)
            visit.received += len(piece)
            if visit.stage is Stage.HEAD and visit.received > limits.head_bytes:
                self._refuse(b"431 Request Header Fields Too Large")
            elif visit.stage is Stage.BODY and visit.received > limits.body_bytes + _SLICE_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        if self.visit.stage is Stage.ANSWER:
            self.transport.abort()
            raise _Refused("pipelined")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.guard.enter(self.visit, Stage.BODY)
        self.visit.is_trusted = False
        for name, value in self.headers:
            if name == b"content-length" and int(value) > self.guard.limits.body_bytes:
                self._refuse(b"413 Content Too Large")
                raise _Refused("body")
        cast("dict[str, Any]", self.scope)["extensions"] = {TRUSTED: self._trust}
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.guard.enter(self.visit, Stage.IDLE if self.cycle.response_complete else Stage.ANSWER)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Else the rest of the body is still to come, and is thrown away.
        if self.visit.stage is Stage.ANSWER:
            self.guard.enter(self.visit, Stage.IDLE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.guard.stalled(self.visit, True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.guard.stalled(self.visit, False)

    def _trust(self) -> None:
        self.visit.is_trusted = True

    def _refuse(self, status: bytes) -> None:
        self.transport.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.transport.close()


class _Refused(Exception):
    """Ends the parsing of what came; uvicorn takes it for a malformed request, whose connection is closed already."""


class Door:
    """Accepts connections of a listening socket for as long as the guard has room. Used from the event loop."""

    def __init__(
        self, listener: socket.socket, guard: Guard, make: Callable[[], GuardedProtocol], tls: ssl.SSLContext | None
    ) -> None:
        self._listener = listener
        self._guard = guard
        self._make = make
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[None]] = set()
        self._ticked = self._said = self._loop.time()
        self._said_count = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        listener.setblocking(False)
        self._open()
        self._tick()

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._loop.remove_reader(self._listener.fileno())
        for task in self._arriving:
            task.cancel()

    async def wait_closed(self) -> None:
        return

    def _open(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                arrived, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # Without descriptors or memory: what waits in the queue would wake us at once again.
                log.error("no connection can be accepted now", error=error.strerror)
                self._guard.evict()
                self._loop.remove_reader(self._listener.fileno())
                self._timers["rest"] = self._loop.call_later(_REST_S, self._open)
                return
            visit = self._guard.admit(partial(_shut_down, arrived))
            if visit is None:
                arrived.close()
                continue
            arrived.setblocking(False)
            task = self._loop.create_task(self._arrive(arrived, visit))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _arrive(self, arrived: socket.socket, visit: Visit) -> None:
        protocol = self._make()
        protocol.guard, protocol.visit = self._guard, visit
        timeout_s = None if self._tls is None else self._guard.limits.head_s
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, arrived, ssl=self._tls, ssl_handshake_timeout=timeout_s)
        except OSError:
            # The handshake failed, or was not over in time, and the socket is closed with its transport.
            self._guard.forget(visit)

    def _tick(self) -> None:
        now = self._loop.time()
        # A process that stood still has not waited for anybody: what was sent meanwhile is read before the next tick.
        self._guard.tick(min(now - self._ticked, 2 * _TICK_S))
        self._ticked = now
        self._say(now)
        self._timers["tick"] = self._loop.call_later(_TICK_S, self._tick)

    def _say(self, now: float) -> None:
        count = self._guard.turned_away
        if count > self._said_count and now - self._said >= _SAY_EVERY_S:
            self._said = now
            log.warning(
                "there are more connections than this port takes, those that waited longest were closed",
                closed=count - self._said_count,
                limit=self._guard.limits.connections,
            )
            self._said_count = count


def _shut_down(one: socket.socket) -> None:
    """End a connection whose transport is still being made: its other owner sees the end and closes it."""
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        # The client was first.
        return


class GuardedServer(uvicorn.Server):
    """uvicorn's server behind a door. The config is for `GuardedProtocol`; `listener` stays the caller's to close."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, limits: Limits) -> None:
        super().__init__(config)
        self._listener = listener
        self._limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()

        def make() -> GuardedProtocol:
            return GuardedProtocol(self.config, self.server_state, self.lifespan.state)

        door = Door(self._listener, Guard(self._limits), make, self.config.ssl)
        self.servers = cast("Any", [door])
        self.started = True
