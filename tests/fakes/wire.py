"""A TCP relay between a puller and a server, which a test can cut or stall after an exact number of bytes.

Refuses to understand what it relays.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Literal

_PIECE = 16 * 1024


class Wire:
    """Listens on `port` of 127.0.0.1 and relays to `upstream`, a port that may be changed at any time.

    `cut` is set when the break came, by `break_after`; bytes that were let through have then reached the client.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.cut = threading.Event()
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._budget: int | None = None
        self._how: Literal["close", "stall"] = "close"
        self._then: Callable[[], None] = lambda: None
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._spawn(self._accept)

    def break_after(self, nbytes: int, how: Literal["close", "stall"], then: Callable[[], None] = lambda: None) -> None:
        """Let `nbytes` more through to clients, on all connections together; then end these connections, or let them hang.

        then: called once, when the bytes are through. Later connections work again.
        """
        with self._lock:
            self._budget, self._how, self._then = nbytes, how, then

    def close(self) -> None:
        self._released.set()
        with self._lock:
            sockets = [self._listener, *self._sockets]
        for one in sockets:
            # Wakes whoever is blocked on it.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for one in sockets:
            one.close()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.upstream), timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._sockets += [client, server]
                doomed = self._budget is not None
            self._spawn(self._up, client, server)
            self._spawn(self._down, server, client, doomed)

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := client.recv(_PIECE):
                server.sendall(piece)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _down(self, server: socket.socket, client: socket.socket, doomed: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := server.recv(_PIECE):
                allowed = self._allow(len(piece)) if doomed else len(piece)
                client.sendall(piece[:allowed])
                if allowed < len(piece):
                    self._break()
                    if self._how == "stall":
                        self._released.wait()
                    break
        # FIN and not RST: what was let through arrives.
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _allow(self, wanted: int) -> int:
        with self._lock:
            if self._budget is None:
                # Broken already; what still waits here is lost.
                return 0
            allowed = min(wanted, self._budget)
            self._budget -= allowed
            return allowed

    def _break(self) -> None:
        with self._lock:
            if self._budget is None:
                return
            self._budget = None
        self._then()
        self.cut.set()
