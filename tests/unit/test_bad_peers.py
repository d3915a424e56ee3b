"""Peers that are of no use cost a pull a bounded time, however many there are and in whatever way: real sockets throughout."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs

from echo.errors import WeightsError
from echo.weights.store import WeightStore
from tests.chaos.bad_peer import KINDS, BadPeer
from tests.eventually import eventually
from tests.unit.test_peers import CHUNK, CHUNKS, NBYTES, Origin, assert_is, peer, pull

# Slow enough that a pull's time is that of its bytes and not that of a busy machine.
EGRESS = NBYTES / 0.8


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    made = Origin(WeightStore(tmp_path_factory.mktemp("weights") / "store"), max_egress_bytes_per_s=EGRESS)
    yield made
    made.server.stop()


@pytest.fixture(scope="module")
def alone_s(origin: Origin) -> float:
    """Seconds of a pull without any other peer."""
    with peer() as puller:
        begun = time.monotonic()
        pull(puller, origin)
        return time.monotonic() - begun


def announce(origin: Origin, bad: BadPeer) -> None:
    if bad.only_claims:
        origin.claim(bad.url, have=0, pending=True)
    else:
        origin.claim(bad.url)


def check_cost(origin: Origin, alone_s: float, kinds: list[str]) -> None:
    """A first pull, whose peers are all strangers, and one more that has met them."""
    with ExitStack() as stack:
        for kind in kinds:
            announce(origin, stack.enter_context(BadPeer(kind, chunk_bytes=CHUNK)))
        puller = stack.enter_context(peer())
        for _ in range(2):
            begun = time.monotonic()
            pulled = pull(puller, origin)
            seconds = time.monotonic() - begun
            print(f"{seconds:.2f} s, alone {alone_s:.2f} s")
            assert_is(pulled)
            assert pulled.peer_bytes == 0
            assert seconds <= 2 * alone_s + 1
    origin.forget_peers()


@pytest.mark.parametrize("kind", KINDS)
def test_bad_peers_of_a_kind_cost_a_bounded_time(kind: str, origin: Origin, alone_s: float) -> None:
    """Twice the time of a pull without them, and a second."""
    check_cost(origin, alone_s, [kind] * 6)


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_bad_peers_costs_a_bounded_time(seed: int, origin: Origin, alone_s: float) -> None:
    """Up to twenty at once, of all kinds."""
    draw = Random(seed)
    check_cost(origin, alone_s, draw.choices(KINDS, k=draw.randint(8, 20)))


def test_a_good_peer_among_bad_ones_is_found_and_spares_the_origin(tmp_path: Path) -> None:
    """As soon as it has given a chunk, the others come from it too."""
    origin = Origin(WeightStore(tmp_path / "store"))
    try:
        with ExitStack() as stack:
            good = stack.enter_context(peer())
            pull(good, origin)
            eventually(lambda: CHUNKS in origin.peers().values(), "the good one announces what it holds")
            for kind in ("refused", "missing", "error", "hangs_up", "wrong"):
                announce(origin, stack.enter_context(BadPeer(kind, chunk_bytes=CHUNK)))
            before = origin.sent_bytes
            pulled = pull(stack.enter_context(peer()), origin)
            assert_is(pulled)
            assert pulled.peer_bytes >= NBYTES / 2
            assert origin.sent_bytes - before <= NBYTES / 2
    finally:
        origin.server.stop()


def test_an_origin_that_crawls_costs_little_if_a_peer_is_fast(tmp_path: Path) -> None:
    """What it has begun to send is taken over as well."""
    store = WeightStore(tmp_path / "store")
    fast = Origin(store)
    slow = Origin(store, published=fast.published, max_egress_bytes_per_s=NBYTES / 30)
    try:
        with peer() as good, peer() as puller:
            pull(good, fast)
            (url,) = eventually(fast.peers, "the good one announces what it holds")
            # Not all of it: one chunk is the origin's to give.
            slow.claim(url, have=CHUNKS - 1)
            begun = time.monotonic()
            pulled = pull(puller, slow)
            assert_is(pulled)
            assert pulled.peer_bytes >= NBYTES - 4 * CHUNK
            assert time.monotonic() - begun < 15
    finally:
        fast.server.stop()
        slow.server.stop()


def test_on_a_link_that_is_narrow_for_all_nobody_is_blamed(tmp_path: Path) -> None:
    """Origin and peer give as little as each other: no request is given up, no peer is avoided."""
    origin = Origin(WeightStore(tmp_path / "store"), max_egress_bytes_per_s=NBYTES / 5)
    try:
        with peer(max_egress_bytes_per_s=NBYTES / 5) as other, peer() as puller:
            pull(other, origin)
            (url,) = eventually(origin.peers, "the other announces what it holds")
            with capture_logs() as logs:
                pulled = pull(puller, origin)
            assert_is(pulled)
            assert pulled.retries == 0
            assert pulled.peer_bytes > 0
            assert [entry for entry in logs if entry["log_level"] == "warning"] == []
            assert puller._reputations.is_proven(url)
    finally:
        origin.server.stop()


def test_a_pull_that_is_late_names_its_slow_sources(tmp_path: Path) -> None:
    """And how many chunks are missing."""
    origin = Origin(WeightStore(tmp_path / "store"), max_egress_bytes_per_s=NBYTES / 60)
    try:
        with BadPeer("drip", chunk_bytes=CHUNK) as bad, peer() as puller:
            announce(origin, bad)
            with pytest.raises(WeightsError, match=r"not done within 2 s, [\d,]+ of 786,432 bytes") as caught:
                pull(puller, origin, deadline_s=2)
            message = str(caught.value)
            assert "chunks are missing" in message
            assert "the origin holds" in message
            assert bad.url in message
    finally:
        origin.server.stop()
