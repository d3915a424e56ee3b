"""The port on which a trainer or a producer shows its metrics to Prometheus, and to anybody else who asks.

Refuses to take anything in: a request has no body, and needs no token.
"""

import socket
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from echo.addresses import authority, http_url, is_wildcard
from echo.errors import ConfigError
from echo.http_guard import Limits
from echo.http_server import HttpServer, listen, reason

# Of Prometheus one or two, and of people.
_LIMITS = Limits(connections=64, body_bytes=0)


class MetricsServer:
    """Serves a registry until closed. `port` is the real one, also where 0 was asked for; `url` is where others find it.

    key: where the run file names the port. Raises ConfigError naming it where nothing can listen there.
    """

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int, key: str) -> None:
        try:
            listener = listen(host, port)
        except OSError as error:
            raise ConfigError(
                f"{key}: {authority(host, port)} can't be listened on ({reason(error)}); 0 takes a free port"
            ) from None
        self._server = HttpServer(_page(registry), listener, name="metrics-server", limits=_LIMITS).start()
        self.port = self._server.port
        # Of all addresses of this machine others can use none, but often its name.
        self.url = http_url(socket.gethostname() if is_wildcard(host) else host, self.port) + "/metrics"

    def close(self) -> None:
        self._server.stop()


def _page(registry: CollectorRegistry) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        """The same page at every path."""
        allowed = scope["method"] in ("GET", "HEAD")
        body = generate_latest(registry) if allowed else b"GET or HEAD\n"
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode()), (b"content-length", str(len(body)).encode())]
        if not allowed:
            headers = [(b"allow", b"GET, HEAD"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200 if allowed else 405, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app
