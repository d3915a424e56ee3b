"""Peers that are of no use cost a pull a bounded time, however many there are and in whatever way: real sockets throughout."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import pytest

from echo.weights.store import WeightStore
from tests.chaos.bad_peer import KINDS, BadPeer
from tests.unit.test_peers import CHUNK, NBYTES, Origin, assert_is, peer, pull

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
