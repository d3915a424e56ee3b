"""An ASGI application on a port, in a thread of its own: what all of Echo's listening ports are, behind `http_guard`.

A server that dies is started again on the socket that it had, and says so; one that dies over and over is an error. Refuses to
share a port, and to take more connections than leave the process descriptors for its own files.
"""

import os
import resource
import socket
import ssl
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import uvicorn

from echo.addresses import is_wildcard
from echo.background import Background
from echo.errors import ConfigError, EchoError
from echo.http_guard import GuardedProtocol, GuardedServer, Limits
from echo.restarts import Restarts

log = structlog.get_logger("http.server")

# How long a stopping server lets running responses finish.
_DRAIN_S = 5
# Of the descriptors that the process may have: a connection may need a second one, for a file that is being sent.
_SHARE_OF_DESCRIPTORS = 4
_DESCRIPTORS_MAX = 8192


class Tls(NamedTuple):
    """PEM files: the certificate (with its chain) and its private key."""

    certificate: Path
    key: Path


def reason(error: OSError) -> str:
    """What the system says, without what the socket module adds to it; a name that can't be resolved has no errno of it."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)


def check_tls(tls: Tls) -> None:
    """Raises ConfigError, naming the settings, where the files can't be used."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.certificate, tls.key)
    except ssl.SSLError:
        why = "not a PEM certificate and its key"
    except OSError as error:
        why = reason(error)
    else:
        return
    raise ConfigError(f"weights.tls_cert {tls.certificate}, weights.tls_key {tls.key}: {why}")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: on an address of IPv4 where the name has one, on all addresses of both kinds for `::`.

    Raises OSError.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    both = family == socket.AF_INET6 and is_wildcard(host) and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=1024, dualstack_ipv6=both)


def connections_allowed(wanted: int) -> int:
    """At most `wanted`, and a part of the descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(min(wanted, soft // _SHARE_OF_DESCRIPTORS), 1)


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as it may, within what we ever need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpServer:
    """Serves `app` on `listener`, which it owns, from `start` to `stop`.

    name: of its thread and in its log lines. Raises ConfigError for `tls`.
    """

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        *,
        name: str,
        limits: Limits,
        tls: Tls | None = None,
        restarts: Restarts | None = None,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self._app = app
        self._listener = listener
        self._name = name
        self._limits = limits._replace(connections=connections_allowed(limits.connections))
        self._tls = tls
        self._restarts = restarts or Restarts()
        self._pause_s = 0.0
        self._stopping = False
        self._gave_up = False
        self._server: GuardedServer | None = None
        self._life = self._new_life()

    def start(self) -> "HttpServer":
        self._life.start()
        return self

    def check(self) -> None:
        """Raise what ended it, if it died over and over."""
        if self._gave_up:
            self._life.check()

    def request_stop(self) -> None:
        """Have it finish what runs and end. May be called from a signal handler."""
        self._stopping = True
        self._life.stopping.set()
        server = self._server
        if server is not None:
            server.should_exit = True

    def join(self) -> None:
        """Wait until it has ended, and free its port. `check` says of what."""
        life = None
        while life is not self._life:
            life = self._life
            life.join()
        self._listener.close()

    def stop(self) -> None:
        self.request_stop()
        self.join()

    def _new_life(self) -> Background:
        return Background(self._name, self._serve, wake=self._revive)

    def _serve(self) -> None:
        self._life.stopping.wait(self._pause_s)
        config = uvicorn.Config(
            self._app,
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            # Whatever else the process logs is its own business. Errors reach standard error; a malformed request is none.
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(self._limits.idle_s),
            timeout_graceful_shutdown=_DRAIN_S,
            ssl_certfile=self._tls.certificate if self._tls is not None else None,
            ssl_keyfile=self._tls.key if self._tls is not None else None,
        )
        # A copy: the port is ours, and connections queue up, also between two lives.
        with self._listener.dup() as listener:
            self._server = GuardedServer(config, listener, self._limits)
            if self._stopping:
                self._server.should_exit = True
            self._server.run()

    def _revive(self) -> None:
        """Called in the thread that died, as the last thing of it."""
        if self._stopping or not self._life.failed:
            return
        try:
            self._life.check()
        except EchoError as error:
            why = str(error)
        pause_s = self._restarts.died()
        if pause_s is None:
            log.error("a server died too often and is not started again", server=self._name, port=self.port, error=why)
            self._gave_up = True
            return
        log.error("a server died and is started again", server=self._name, port=self.port, error=why)
        self._pause_s = pause_s
        self._life = self._new_life().start()
