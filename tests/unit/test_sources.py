"""Which chunk is fetched next, and from whom: the origin once for all, peers for the rest, nobody who cheated."""

from random import Random

import pytest

from echo.weights.attempts import Attempt
from echo.weights.manifest import Chunk
from echo.weights.plan import Fill, Target, Want
from echo.weights.reputations import Patience, Reputations
from echo.weights.sources import PeerView, Queue

NAMES = "abcdefgh"


class Clock:
    """tick: how far each look at it moves it, so that a queue that waits gets on."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def wants(names: str = NAMES) -> list[Want]:
    return [Want(Chunk(name, 10)) for name in names]


def view(have: str = "", pending: str = "") -> PeerView:
    return PeerView(frozenset(have), frozenset(pending))


def queue(
    names: str = NAMES, *, reputations: Reputations | None = None, clock: Clock | None = None, shuffled: bool = True
) -> Queue:
    made = Queue(
        wants(names),
        reputations or Reputations(),
        origin_lanes=4,
        shuffle=Random(1) if shuffled else None,
        clock=clock or Clock(),
    )
    return made


def take(source: Queue) -> tuple[str, str | None]:
    attempt = source.take()
    assert attempt is not None
    return attempt.digest, attempt.peer


def finish(source: Queue, attempt: Attempt) -> None:
    attempt.got = attempt.nbytes
    assert source.finished(attempt) is attempt
    source.done(attempt.job)


def take_all(source: Queue) -> list[Attempt]:
    found = []
    while (attempt := source.take()) is not None:
        found.append(attempt)
        finish(source, attempt)
    return found


def test_without_peers_everything_comes_from_the_origin_in_order() -> None:
    """Several at once."""
    assert [(choice.job.want.chunk.digest, choice.peer) for choice in take_all(queue(shuffled=False))] == [
        (name, None) for name in NAMES
    ]
    source = queue(shuffled=False)
    assert [take(source)[0] for _ in range(4)] == list(NAMES[:4])


def test_each_puller_has_an_order_of_its_own() -> None:
    """So that two of them soon have different chunks; each still gets all."""
    orders = []
    for seed in range(2):
        source = Queue(wants(), Reputations(), origin_lanes=4, shuffle=Random(seed), clock=Clock())
        source.saw({})
        orders.append([choice.job.want.chunk.digest for choice in take_all(source)])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(NAMES)


def test_one_connection_fetches_what_nobody_has_and_the_others_what_peers_have() -> None:
    """The rarest first."""
    source = queue()
    for peer in ("p2", "p3"):
        source._reputations.succeeded(peer, 10, 1.0)
    source.saw({"p1": view("ab"), "p2": view("b"), "p3": view("b"), "p4": view()})
    fresh, where = take(source)
    assert where is None
    assert fresh not in "ab"
    assert take(source) == ("a", "p1")
    digest, peer = take(source)
    assert (digest, peer in {"p1", "p2", "p3"}) == ("b", True)


def test_pullers_divide_what_nobody_has_among_them() -> None:
    """Each begins with its own part, without a word: together they ask the origin for everything once."""
    names = [f"{number}" for number in range(64)]
    urls = [f"http://10.0.0.{number}:1" for number in range(4)]
    taken: list[str] = []
    parts = []
    for number, url in enumerate(urls):
        source = Queue(
            [Want(Chunk(name, 10)) for name in names],
            Reputations(),
            origin_lanes=4,
            shuffle=Random(number),
            me=url,
            clock=Clock(),
        )
        source.saw({other: view() for other in urls if other != url})
        order = [choice.job.want.chunk.digest for choice in take_all(source)]
        assert sorted(order) == sorted(names), "who is left alone fetches the parts of the others, too"
        owned = [name for name in names if source._owner(name) == url]
        assert set(order[: len(owned)]) == set(owned)
        parts.append(len(owned))
        taken += owned
    assert sorted(taken) == sorted(names)
    assert min(parts) >= 8


def test_what_is_on_its_way_to_others_is_not_asked_of_the_origin() -> None:
    """Unless it takes long: what was announced need not be true."""
    clock = Clock(tick=0.01)
    source = queue("ab", clock=clock)
    source.saw({"p1": view(have="a"), "p2": view(pending="b")})
    assert take(source) == ("a", "p1")
    begun = clock.now
    assert take(source) == ("b", None)
    assert clock.now - begun > 0.4


def test_a_chunk_that_arrives_at_a_peer_is_fetched_there() -> None:
    """The next word of the tracker wakes who waits."""
    source = queue("a")
    source.saw({"p1": view(pending="a")})
    source.saw({"p1": view(have="a")})
    assert take(source) == ("a", "p1")
    assert source.pending == set()


def test_a_peer_gets_two_requests_at_once_and_no_more() -> None:
    """Its link is shared by all who ask it."""
    clock = Clock(tick=0.01)
    source = queue("abc", clock=clock)
    source._reputations.succeeded("p1", 10, 1.0)
    source.saw({"p1": view("abc")})
    assert [peer for _, peer in (take(source), take(source))] == ["p1", "p1"]
    # The third is not begun with the peer; as nothing comes of the others, the origin helps.
    assert take(source)[1] is None


def test_who_begins_alone_does_not_open_all_connections_at_once() -> None:
    """Others may have begun in the same moment, and each should have a chunk to give soon."""
    clock = Clock()
    source = queue(clock=clock)
    source.saw({})
    first = source.take()
    assert first is not None
    assert source.pending == {first.job.want.chunk.digest}
    source.saw({})
    source.saw({})
    assert [take(source)[1] for _ in range(3)] == [None] * 3
    assert len(source.pending) == 4


def test_the_faster_peer_is_preferred_and_a_new_one_tried() -> None:
    """By what was measured, shared by what runs there already."""
    reputations = Reputations(clock=Clock())
    reputations.succeeded("slow", 100, 1.0)
    reputations.succeeded("fast", 1000, 1.0)
    source = queue("abc", reputations=reputations, clock=Clock(tick=0.001))
    source.saw({"slow": view("abc"), "fast": view("abc")})
    assert [take(source)[1] for _ in range(2)] == ["fast", "fast"]
    assert take(source)[1] == "slow"
    assert reputations.speed("new") == 1000


def test_a_failed_chunk_is_tried_elsewhere() -> None:
    """Not again with the peer that failed, whatever its reputation; what came of it is the job's to keep."""
    source = queue("a")
    source.saw({"p1": view("a"), "p2": view("a")})
    choice = source.take()
    assert choice is not None
    source.left(choice, failed=True)
    again = source.take()
    assert again is not None
    assert again.job is choice.job
    assert {choice.peer, again.peer} == {"p1", "p2"}
    finish(source, again)
    assert source.take() is None


def test_failures_are_forgiven_later_and_lies_much_later() -> None:
    """Waits double up to a minute; ten minutes for wrong bytes; a success begins anew."""
    clock = Clock()
    reputations = Reputations(clock=clock)

    def banned_for(url: str) -> float:
        begun = clock.now
        while not reputations.is_usable(url):
            clock.now += 0.5
        return clock.now - begun

    spans = []
    for _ in range(8):
        reputations.failed("p")
        spans.append(banned_for("p"))
    assert spans == [1, 2, 4, 8, 16, 32, 60, 60]
    reputations.succeeded("p", 10, 1.0)
    reputations.failed("p")
    assert banned_for("p") == 1
    reputations.failed("p", lied=True)
    assert banned_for("p") == 600


def test_who_let_go_of_a_chunk_is_asked_again_soon_however_often_it_happens() -> None:
    clock = Clock()
    reputations = Reputations(clock=clock)
    for _ in range(5):
        reputations.lacked("p")
        assert not reputations.is_usable("p")
        clock.now += 0.5
        assert reputations.is_usable("p")


def test_a_liar_is_not_chosen() -> None:
    """What it claims to hold comes from the origin."""
    reputations = Reputations(clock=Clock())
    reputations.failed("liar", lied=True)
    source = queue("a", reputations=reputations)
    source.saw({"liar": view("a")})
    assert take(source) == ("a", None)


def test_a_peer_is_slow_by_what_others_gave() -> None:
    """If all are slow, none is; nor is the first that was ever asked."""
    reputations = Reputations(clock=Clock())
    assert not reputations.is_slow("p", 0, 4.0)
    for other in "abc":
        reputations.succeeded(other, 100, 10.0)
    assert not reputations.is_slow("p", 4, 4.0)
    assert reputations.is_slow("p", 3, 4.0)
    for other in "abc":
        for _ in range(50):
            reputations.succeeded(other, 1000, 1.0)
    assert reputations.is_slow("p", 100, 4.0)
    assert not reputations.is_slow("p", 0, 0.9), "each may take a while to begin"


def test_a_slow_peer_rests_longer_each_time() -> None:
    """Long enough to cost the next version nothing, and a success begins anew."""
    clock = Clock()
    reputations = Reputations(clock=clock)
    spans = []
    for _ in range(8):
        reputations.failed("p", slow=True)
        begun = clock.now
        while not reputations.is_usable("p"):
            clock.now += 5
        spans.append(clock.now - begun)
    assert spans == [15, 30, 60, 120, 240, 480, 600, 600]


def test_a_chunk_at_a_source_that_is_silent_is_taken_over_and_the_first_copy_wins() -> None:
    """By the origin if no other peer has it; the other request ends, and its peer rests."""
    clock = Clock(tick=0.01)
    reputations = Reputations(clock=clock)
    source = queue("ab", reputations=reputations, clock=clock)
    source.saw({"p1": view("a")})
    first, fresh = source.take(), source.take()
    assert first is not None
    assert fresh is not None
    assert {first.peer, fresh.peer} == {"p1", None}
    silent, other = (first, fresh) if first.peer else (fresh, first)
    clock.now += 0.1
    finish(source, other)
    again = source.take()
    assert again is not None
    assert again.job is silent.job
    assert (again.peer, again.is_in_place, silent.is_in_place) == (None, False, True)
    again.got = 10
    assert source.finished(again) is None, "the other worker may still write where the chunk belongs"
    assert silent.stop.is_set()
    assert not reputations.is_usable("p1")
    assert source.left(silent) is again
    source.done(again.job)
    assert source.take() is None
    assert source.present_bytes == 20


def test_strangers_get_one_request_each_and_few_at_once() -> None:
    """The rest of the workers stays free for sources that are known."""
    clock = Clock(tick=0.001)
    source = Queue(wants(), Reputations(), origin_lanes=8, connections=4, shuffle=Random(1), clock=clock)
    source.saw({f"p{index}": view(NAMES) for index in range(8)})
    chosen = [take(source)[1] for _ in range(5)]
    assert len(set(chosen[:4]) - {None}) == 4
    assert chosen[4] is None


def test_strangers_that_fail_one_after_the_other_do_not_keep_the_origin_waiting() -> None:
    """However many there are."""
    clock = Clock(tick=0.01)
    reputations = Reputations(clock=clock)
    source = queue("abcd", reputations=reputations, clock=clock)
    source.saw({f"p{index}": view("abcd") for index in range(1000)})
    while (attempt := source.take()) is not None and attempt.peer is not None:
        reputations.failed(attempt.peer)
        assert source.left(attempt, failed=True) is None
    assert attempt is not None
    assert clock.now - attempt.begun < 0.1
    assert len(attempt.job.tried) < 200


def test_the_origin_is_spared_while_peers_give_half_of_what_it_would() -> None:
    """And not for longer than a bound once they do not, nor on account of bytes that turn out to be wrong."""
    reputations = Reputations(clock=Clock())
    patience = Patience(reputations, lanes=4)

    def tick(from_peers: float, *, times: int = 1, lanes: int = 0) -> None:
        for _ in range(times):
            patience.tick(
                0.05, spared=True, from_peers=from_peers, from_origin=50.0 * lanes, lanes=lanes, left=10**6, chunk=100
            )

    tick(0, times=4, lanes=1)
    # One request gives 1,000 bytes per second, four would give 4,000: a chunk of 100 takes 0.1 s.
    assert patience.origin_bytes_per_s == pytest.approx(4000)
    tick(110, times=100)
    assert not patience.is_over
    tick(0, times=12)
    assert patience.is_over
    tick(200, times=20)
    assert not patience.is_over
    tick(-2000)
    assert patience.is_over


def test_a_chunk_that_is_wanted_twice_is_fetched_once() -> None:
    """Every place gets its bytes, also where the second wish comes when the first waits again after a failure."""
    target = Target(3)
    first, second, third = wants("aaa")
    for want in (first, second, third):
        want.fills.append(Fill(0, memoryview(bytearray(10)), target))
    source = Queue([first, second], Reputations(), origin_lanes=1, clock=Clock())
    choice = source.take()
    assert choice is not None
    source.left(choice, failed=True)
    source.add([third])
    again = source.take()
    assert again is not None
    assert len(again.job.want.fills) == 3
    finish(source, again)
    assert source.take() is None


@pytest.mark.parametrize("ended", [False, True])
def test_an_end_wakes_who_waits(ended: bool) -> None:
    """`take` gives None at once, also where chunks are left."""
    source = queue("a")
    if ended:
        source.end()
        assert source.take() is None
        assert source.is_over
    else:
        source.saw({})
        assert source.take() is not None
        assert not source.is_over
