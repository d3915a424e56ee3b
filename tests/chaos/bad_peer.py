"""A peer that costs a puller time: it is announced as one that holds chunks, and is of no use, in one of several ways.

Never outlives its `close`: every connection ends then.
"""

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

# Nothing listens; nothing answers a connect; accepts and sends nothing; a head, or a body, that never comes to its end; wrong
# bytes; an early end, in the head, or in the body; no end; a redirect; a peer that lacks everything; an error; a reset in
# mid-body; and one that announces chunks as on their way to it, for ever.
KINDS = (
    "refused",
    "black_hole",
    "silent",
    "drip_head",
    "drip",
    "wrong",
    "hangs_up",
    "closes",
    "endless",
    "redirect",
    "missing",
    "error",
    "dies",
    "claims",
)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"
_PLAIN = {
    "redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "missing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "error": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
}
_DRIP_S = 0.1


class BadPeer:
    """Listens on loopback. kind: one of KINDS. chunk_bytes: the length that its bodies seem to have."""

    def __init__(self, kind: str, *, chunk_bytes: int = 4096) -> None:
        assert kind in KINDS
        self._kind = kind
        self._chunk_bytes = chunk_bytes
        self._closed = threading.Event()
        self._fillers: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0 if kind == "black_hole" else 128)
        self._listener.settimeout(0.1)
        self.asked = 0
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        if kind == "refused":
            self._listener.close()
        elif kind == "black_hole":
            self._fill()
        else:
            self._threads.append(threading.Thread(target=self._accept, daemon=True))
            self._threads[0].start()

    @property
    def only_claims(self) -> bool:
        """It is to be announced as a peer that has nothing, and to which everything is on its way."""
        return self._kind == "claims"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()
        for filler in self._fillers:
            filler.close()
        self._listener.close()

    def _fill(self) -> None:
        """Take all places of the queue of connections, so that the system answers no further one."""
        while len(self._fillers) < 16:
            filler = socket.socket()
            self._fillers.append(filler)
            filler.settimeout(0.05)
            try:
                filler.connect(self._listener.getsockname())
            except TimeoutError:
                return
        raise AssertionError("the system answers connections that nothing accepts")

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(0.5)
        with connection, contextlib.suppress(OSError):  # A puller that gave up.
            while not self._closed.is_set():
                try:
                    asked = connection.recv(65536)
                except TimeoutError:
                    continue
                if not asked:
                    return
                self.asked += 1
                if not self._answer(connection):
                    return

    def _answer(self, connection: socket.socket) -> bool:
        """Whether the connection stays open for another request."""
        head = _HEAD + b"Content-Length: %d\r\n\r\n" % self._chunk_bytes
        if self._kind in _PLAIN:
            connection.sendall(_PLAIN[self._kind])
            return True
        if self._kind == "wrong":
            connection.sendall(head + bytes(self._chunk_bytes))
            return True
        if self._kind == "silent":
            self._closed.wait()
        elif self._kind == "hangs_up":
            connection.sendall(_HEAD[:20])
        elif self._kind == "drip_head":
            self._drip(connection, _HEAD + b"X-Filler: ", b"x" * 10)
        elif self._kind == "drip":
            self._drip(connection, head, b"\0" * 100)
        elif self._kind == "endless":
            connection.sendall(_HEAD + b"\r\n")
            while not self._closed.is_set():
                connection.sendall(bytes(65536))
        else:
            connection.sendall(head + bytes(self._chunk_bytes // 2))
            if self._kind == "dies":
                # A reset instead of an end.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False

    def _drip(self, connection: socket.socket, first: bytes, then: bytes) -> None:
        connection.sendall(first)
        while not self._closed.wait(_DRIP_S):
            connection.sendall(then)
