"""A peer that costs whoever pulls from it time: it accepts connections and is of no use, in one of several ways.

Refuses to hold anybody longer than its own life: every connection ends when it is closed.
"""

import socket
import threading
from types import TracebackType
from typing import Self

KINDS = ("silent", "drip", "wrong", "closes", "endless")
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"


class BadPeer:
    """Listens on loopback. kind: one of KINDS."""

    def __init__(self, kind: str) -> None:
        assert kind in KINDS
        self._kind = kind
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

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
        with connection:
            try:
                connection.recv(65536)
                self._answer(connection)
            except OSError:
                return  # Whoever asked has gone.

    def _answer(self, connection: socket.socket) -> None:
        if self._kind == "silent":
            self._closed.wait()
        elif self._kind == "wrong":
            connection.sendall(_HEAD + b"Content-Length: 4096\r\n\r\n" + bytes(4096))
        elif self._kind == "closes":
            connection.sendall(_HEAD + b"Content-Length: 4096\r\n\r\n" + bytes(100))
        elif self._kind == "drip":
            connection.sendall(_HEAD + b"Content-Length: 4096\r\n\r\n")
            while not self._closed.wait(0.1):
                connection.sendall(b"\0" * 100)
        else:
            connection.sendall(_HEAD + b"\r\n")
            while not self._closed.is_set():
                connection.sendall(bytes(65536))
