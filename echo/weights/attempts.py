"""One source's request for one chunk: what came of it so far, and how more is received.

Every byte is checked before the chunk counts as there. Bytes are counted as they arrive, however few they are, so that
a source that crawls is seen while it does.
"""

import http.client
import time
from collections.abc import Callable

import numpy as np
from blake3 import blake3

from echo.errors import ChunkError
from echo.weights.plan import Want
from echo.weights.transport import Abort, Session
from echo.weights.urls import READING_HEADER

# What is read and hashed at once: large enough for speed.
_PIECE_BYTES = 2**20
# Less than this is taken as it comes: a read for more returns only once all of it is there.
_SMALL_PIECE_BYTES = 2**14
_READ_S = 0.05


class Job:
    """A wanted chunk, and the requests for it that run now.

    is_over: a verified copy came, or it is not wanted any more. copy: the former, until it is spread; not longer, since a
    circle of references would keep its memory.
    """

    def __init__(self, want: Want) -> None:
        self.want = want
        self.tried: set[str] = set()
        self.attempts: list[Attempt] = []
        self.is_over = False
        self.copy: Attempt | None = None


class Attempt:
    """One source's request for one chunk. Its worker writes it, the queue reads how far it is.

    peer: its URL; None is the origin. room: memory of its own, where the chunk belongs if no other attempt writes there.
    stop: ends it from outside.
    """

    def __init__(self, job: Job, peer: str | None, abort: Abort, now: float) -> None:
        self.job, self.peer, self.begun = job, peer, now
        self.stop = Abort(abort)
        nbytes = job.want.chunk.nbytes
        self.is_in_place: bool = not any(other.is_in_place for other in job.attempts)
        self.room = job.want.room() if self.is_in_place else np.empty(nbytes, np.uint8).data
        self.is_too_slow = False
        # What of it was counted.
        self.seen = 0
        self.restart()

    @property
    def digest(self) -> str:
        return self.job.want.chunk.digest

    @property
    def nbytes(self) -> int:
        return self.job.want.chunk.nbytes

    def restart(self) -> None:
        self.got = self.hashed = 0
        self.hasher = blake3()

    def add(self, received: int) -> None:
        """So many more bytes are in the room. Hashed in large pieces: small ones cost more time."""
        self.got += received
        if self.got - self.hashed >= _PIECE_BYTES or self.got == self.nbytes:
            self.hasher.update(self.room[self.hashed : self.got])
            self.hashed = self.got

    def left_s(self, now: float) -> float:
        """Seconds that it needs for the rest at the speed that it had; endless if nothing came."""
        return (self.nbytes - self.got) * (now - self.begun) / self.got if self.got else float("inf")


class MissingChunk(ChunkError):
    """The source does not have it, or not any more."""


class DamagedChunk(ChunkError):
    """All of it came, and it was not what its digest names."""


def receive(
    session: Session, url: str, attempt: Attempt, *, reading: str, timeout_s: float | None, count: Callable[[int], None]
) -> None:
    """Fetch what the attempt lacks of its chunk from `url`, and check the whole.

    reading: run/version, so that it is kept. timeout_s: for connecting and each read. count: called with the bytes of each.
    Raises ChunkError. What came before a failure is kept for the next call, unless it was wrong.
    """
    chunk = attempt.job.want.chunk
    headers = {READING_HEADER: reading}
    if attempt.got:
        # No If-Range: what a digest names does not change, and a server in front may have tags of its own.
        headers["Range"] = f"bytes={attempt.got}-"
    with session.ask(
        url, ChunkError, headers=headers, allowed=(200, 206, 404, 416), timeout_s=timeout_s, abort=attempt.stop
    ) as response:
        if response.status == 404:
            raise MissingChunk(f"{url}: {response.status} {response.reason}: the server does not have it (any more)")
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {attempt.got}-")
        if not resumed:
            attempt.restart()
        left = chunk.nbytes - attempt.got
        if response.status != 200 and not resumed:
            raise ChunkError(f"{url}: {response.status} {response.reason} does not resume where it ended", retriable=True)
        if response.length is not None and response.length != left:
            attempt.restart()
            raise ChunkError(f"{url}: offers {response.length:,} bytes where {left:,} are missing", retriable=True)
        begun, before = time.monotonic(), attempt.got
        while attempt.got < chunk.nbytes:
            # What came in `_READ_S` so far: a fast source is read in large pieces, a slow one as its bytes arrive. Never more
            # than all so far: the first bytes may have waited for us, and say little about the next.
            at_once = int((attempt.got - before) * min(_READ_S / max(time.monotonic() - begun, 1e-6), 1.0))
            received = _read(response, attempt.room[attempt.got : attempt.got + _PIECE_BYTES], at_once)
            if not received:
                raise ChunkError(f"{url}: the connection ended after {attempt.got:,} of {chunk.nbytes:,} bytes", retriable=True)
            attempt.add(received)
            count(received)
    if (digest := attempt.hasher.hexdigest()) != chunk.digest:
        attempt.restart()
        raise DamagedChunk(f"{url}: its bytes have digest {digest}: the chunk is damaged there", retriable=True)


def _read(response: http.client.HTTPResponse, room: memoryview, at_once: int) -> int:
    """Fill `room` as far as `at_once` bytes; if these are few, with what has arrived, one byte at least. 0 at the end."""
    if response.length is None:
        return response.readinto(room[: max(at_once, _SMALL_PIECE_BYTES)])
    if at_once >= _SMALL_PIECE_BYTES:
        return response.readinto(room[:at_once])
    # `readinto` would return only once all of `room` is full.
    count: int = response.fp.readinto1(room[: response.length])
    response.length -= count
    return count
