"""Who holds which chunks of a version: what the origin remembers of the peers that told it. Pure; nobody is asked.

Refuses to interpret what peers say: holdings are bitmaps over the manifest's chunks, which both ends know and the tracker
does not. Whoever is not heard of for `ttl_s` is forgotten.
"""

import base64
import time
from collections.abc import Callable, Collection, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Bounds the tracker's memory, and each answer.
PEERS_MAX = 1024
VERSIONS_MAX = 64
BITMAP_CHARACTERS_MAX = 2**16

Bitmap = Annotated[str, Field(max_length=BITMAP_CHARACTERS_MAX, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]


class Peer(BaseModel):
    """What one puller says of itself.

    url: where it serves, like http://10.0.0.7:9104. have: chunks that it holds and serves, pending: chunks that are on their
    way to it from the origin; both base64 of a bitmap over `peers.unique_chunks`, lowest bit first. leaving: it serves no more.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    url: Annotated[str, Field(max_length=512, pattern=r"^https?://[A-Za-z0-9._\-\[\]:%/]+$")]
    have: Bitmap = ""
    pending: Bitmap = ""
    leaving: bool = False


class Peers(BaseModel):
    """Everybody that the tracker has heard of lately."""

    peers: list[Peer]


class Tracker:
    """Used from one thread."""

    def __init__(self, *, ttl_s: float = 15.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._versions: dict[tuple[str, int], dict[str, tuple[float, Peer]]] = {}

    def announce(self, run_id: str, version: int, peer: Peer) -> bool:
        """Remember what a peer says, until it says something else or leaves. False: there is no room for more."""
        self._forget()
        key = (run_id, version)
        if peer.leaving:
            self._versions.get(key, {}).pop(peer.url, None)
            return True
        if key not in self._versions and len(self._versions) >= VERSIONS_MAX:
            return False
        known = self._versions.setdefault(key, {})
        if peer.url not in known and len(known) >= PEERS_MAX:
            return False
        known[peer.url] = (self._clock() + self._ttl_s, peer)
        return True

    def peers(self, run_id: str, version: int) -> list[Peer]:
        self._forget()
        return [peer for _, peer in self._versions.get((run_id, version), {}).values()]

    def _forget(self) -> None:
        now = self._clock()
        for key, known in list(self._versions.items()):
            for url in [url for url, (until, _) in known.items() if until <= now]:
                del known[url]
            if not known:
                del self._versions[key]


def encode_bitmap(order: Sequence[str], held: Collection[str]) -> str:
    """Base64 of a bitmap: bit i is whether `order[i]` is in `held`."""
    bits = bytearray((len(order) + 7) // 8)
    for index, digest in enumerate(order):
        if digest in held:
            bits[index >> 3] |= 1 << (index & 7)
    return base64.b64encode(bits).decode()


def decode_bitmap(order: Sequence[str], bitmap: str) -> set[str]:
    """What `encode_bitmap` was given. Lenient: a peer's nonsense says that it holds little, never that we fail."""
    try:
        bits = base64.b64decode(bitmap, validate=True)
    except ValueError:
        return set()
    return {digest for index, digest in enumerate(order[: 8 * len(bits)]) if bits[index >> 3] >> (index & 7) & 1}
