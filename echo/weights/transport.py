"""How a puller talks to weight servers: keep-alive connections that can be given up at once, and bounded retries.

Refuses redirects, proxies and cookies: the token goes to the servers that were named and nowhere else. Built on
http.client, because its `readinto` fills the tensors' own memory: half the CPU time of httpx for the same bytes.
"""

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

import structlog
import tenacity
from pydantic import SecretStr

from echo.errors import ConfigError, WeightsError
from echo.weights.clock import TIME_HEADER, ServerClock

log = structlog.get_logger("weights.client")

T = TypeVar("T")

_RETRIABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class Abort:
    """Ends every wait of a pull, or of one of its requests, at once, from another thread: sleepers wake, blocked sockets are
    shut down, also those that are still connecting.

    parent: what ends it, ends this as well, until `forget` is called there.
    """

    def __init__(self, parent: "Abort | None" = None) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._watched: set[socket.socket | Abort] = set()
        if parent is not None:
            parent.watch(self)

    def set(self) -> None:
        self._event.set()
        with self._lock:
            for watched in self._watched:
                _end(watched)

    def is_set(self) -> bool:
        return self._event.is_set()

    def sleep(self, seconds: float) -> None:
        self._event.wait(seconds)

    def watch(self, watched: "socket.socket | Abort") -> None:
        with self._lock:
            self._watched.add(watched)
            if self._event.is_set():
                _end(watched)

    def forget(self, watched: "socket.socket | Abort") -> None:
        """Once this has returned, the socket is left alone."""
        with self._lock:
            self._watched.discard(watched)


def _end(one: "socket.socket | Abort") -> None:
    if isinstance(one, Abort):
        one.set()
        return
    try:
        # Not the method: that of a TLS socket takes away the session under the reader's hands.
        socket.socket.shutdown(one, socket.SHUT_RDWR)
    except OSError:
        # Never connected, or closed by the other side already.
        return


class Access(NamedTuple):
    """How servers are talked to: the token, deadlines in seconds, and whom to trust over https."""

    token: SecretStr | None
    connect_timeout_s: float
    read_timeout_s: float
    tls: ssl.SSLContext | None = None


def trusting(ca: Path | None) -> ssl.SSLContext:
    """A context that trusts the PEM certificates of `ca`, or the system's. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError:
        raise ConfigError(f"weights.tls_ca {ca}: holds no PEM certificate") from None
    except OSError as error:
        raise ConfigError(f"weights.tls_ca {ca}: {error.strerror}") from None


class Session:
    """The connections of one worker, one for each server. Not to be shared between threads."""

    def __init__(self, access: Access, abort: Abort) -> None:
        self._access = access
        self._abort = abort
        self._connections: dict[str, http.client.HTTPConnection] = {}

    @property
    def is_aborted(self) -> bool:
        """What it reports from now on may be its own end."""
        return self._abort.is_set()

    @contextmanager
    def ask(
        self,
        url: str,
        error: type[WeightsError],
        *,
        headers: Mapping[str, str] | None = None,
        allowed: Sequence[int] = (200,),
        body: bytes | None = None,
        timeout_s: float | None = None,
        clock: ServerClock | None = None,
        abort: Abort | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """GET `url`, or POST a JSON `body` to it; the answer is read within the context. Read whole, the connection is kept.

        timeout_s: for connecting and for each read, where the usual ones are too long; the first of a connection holds.
        clock: learns from the answer.
        abort: ends this request, in any of its phases; the session's own if none is given.

        Raises `error`, naming the URL, for another status than `allowed`, and for what goes wrong within the context.
        """
        parts = urlsplit(url)
        server = f"{parts.scheme}://{parts.netloc}"
        sent = {"Accept-Encoding": "identity", "User-Agent": "echo-weights", **(headers or {})}
        if self._access.token is not None:
            sent["Authorization"] = f"Bearer {self._access.token.get_secret_value()}"
        if body is not None:
            sent["Content-Type"] = "application/json"
        abort = abort or self._abort
        keep = False
        response: http.client.HTTPResponse | None = None
        with ExitStack() as watched:
            try:
                connection = self._connections.get(server)
                if connection is None:
                    connection = self._connect(server, parts, timeout_s, abort, watched)
                else:
                    _watch(connection.sock, abort, watched)
                asked = time.time()
                connection.request("GET" if body is None else "POST", parts.path, body, sent)
                response = connection.getresponse()
                if clock is not None:
                    clock.saw(asked, response.getheader(TIME_HEADER), time.time())
                if response.status not in allowed:
                    raise self._refusal(url, response, error)
                yield response
                keep = response.length == 0 and not response.will_close
            except (OSError, http.client.HTTPException) as problem:
                raise error(f"{url}: {type(problem).__name__}: {problem}".rstrip(": "), retriable=True) from problem
            finally:
                if response is not None:
                    response.close()
                # Only a socket that can't be shut down any more is good for the next request.
                watched.close()
                if not keep or abort.is_set():
                    self._drop(server)

    def close(self) -> None:
        for server in list(self._connections):
            self._drop(server)

    def _connect(
        self, server: str, parts: SplitResult, timeout_s: float | None, abort: Abort, watched: ExitStack
    ) -> http.client.HTTPConnection:
        host, connect_s = parts.hostname or "", timeout_s or self._access.connect_timeout_s
        connection: http.client.HTTPConnection
        context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            context = self._access.tls or trusting(None)
            connection = http.client.HTTPSConnection(host, parts.port, context=context)
        else:
            connection = http.client.HTTPConnection(host, parts.port)
        self._connections[server] = connection
        connection.sock = _open_socket(host, connection.port, connect_s, abort, watched)
        if context is not None:
            # The handshake comes after the wrapped socket is watched, so that it can be given up as well.
            connection.sock = context.wrap_socket(connection.sock, server_hostname=host, do_handshake_on_connect=False)
            _watch(connection.sock, abort, watched)
            connection.sock.do_handshake()
        connection.sock.settimeout(timeout_s or self._access.read_timeout_s)
        return connection

    def _drop(self, server: str) -> None:
        if (connection := self._connections.pop(server, None)) is not None:
            connection.close()

    def _refusal(self, url: str, response: http.client.HTTPResponse, error: type[WeightsError]) -> WeightsError:
        status = f"{response.status} {response.reason}"
        if response.status in (401, 403):
            what = "refuses the token" if self._access.token is not None else "asks for a token"
            return error(f"{url}: {status}: the server {what}; weights.token must be the same on both sides")
        if response.status == 404:
            return error(f"{url}: {status}: the server does not have it (any more)")
        if 300 <= response.status < 400:
            return error(f"{url}: {status}: redirects are not followed, the token would travel along: announce the final URL")
        return error(f"{url}: {status}", retriable=response.status in _RETRIABLE_STATUS)


def _open_socket(host: str, port: int, timeout_s: float, abort: Abort, watched: ExitStack) -> socket.socket:
    """A connected one, watched from before it connects. Tries all addresses of the host, within `timeout_s` together."""
    until = time.monotonic() + timeout_s
    problem: OSError = OSError(f"{host} has no address")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError(f"{host} can't be the name of a host") from None
    for family, kind, protocol, _, address in addresses:
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(max(until - time.monotonic(), 0.001))
            _watch(made, abort, watched)
            made.connect(address)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            made.close()
            problem = error
        else:
            return made
    raise problem


def _watch(one: socket.socket, abort: Abort, watched: ExitStack) -> None:
    abort.watch(one)
    watched.callback(abort.forget, one)


class Retries:
    """Bounded attempts with exponential waits and jitter, over the sources of one thing. Counts over all threads."""

    def __init__(self, *, attempts: int, first_s: float, longest_s: float, abort: Abort) -> None:
        self._attempts = attempts
        self._first_s = first_s
        self._longest_s = longest_s
        self._abort = abort
        self._lock = threading.Lock()
        self.count = 0

    def run(self, urls: Sequence[str], fetch: Callable[[str], T], abort: Abort | None = None) -> T:
        """Try the URLs in turn, `attempts` times in all, and each at least once where an error is not retriable.

        abort: ends the attempts and the waits between them; that of all of them if none is given.

        Raises the last WeightsError.
        """
        abort = abort or self._abort

        def again(state: tenacity.RetryCallState) -> bool:
            problem = state.outcome.exception() if state.outcome is not None else None
            if not isinstance(problem, WeightsError) or abort.is_set():
                return False
            return problem.retriable or state.attempt_number < len(urls)

        tries = tenacity.Retrying(
            retry=again,
            stop=tenacity.stop_after_attempt(max(self._attempts, 1)),
            wait=tenacity.wait_exponential(multiplier=self._first_s, max=self._longest_s)
            + tenacity.wait_random(0, self._first_s),
            # tenacity and not stamina, because this sleep ends when the pull is given up.
            sleep=abort.sleep,
            before_sleep=self._note,
            reraise=True,
        )
        number = 0
        try:
            for attempt in tries:
                number = attempt.retry_state.attempt_number
                with attempt:
                    return fetch(urls[(number - 1) % len(urls)])
        except WeightsError as problem:
            if number == 1:
                raise
            raise type(problem)(f"{problem} (attempt {number} of {self._attempts})", retriable=problem.retriable) from problem
        raise AssertionError("tenacity returns or raises")

    def _note(self, state: tenacity.RetryCallState) -> None:
        with self._lock:
            self.count += 1
        log.warning(
            "trying again",
            error=str(state.outcome.exception() if state.outcome is not None else ""),
            attempt=state.attempt_number,
            wait_s=round(state.upcoming_sleep, 3),
        )
