"""Producers that serve each other: real clients, real peers, one origin; peers that lie, die, hang or are not there."""

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from structlog.testing import capture_logs

from echo.errors import WeightsError
from echo.metrics import WeightsMetrics
from echo.weights import pull as pulling
from echo.weights.client import Pulled, WeightClient
from echo.weights.manifest import HostTensor, digest
from echo.weights.peers import Holdings, PeerNode, create_peer_app, unique_chunks
from echo.weights.server import WeightServer, create_app
from echo.weights.store import Published, WeightStore
from echo.weights.tracker import decode_bitmap, encode_bitmap
from echo.weights.transport import Abort, Access, Session
from tests.eventually import eventually
from tests.fakes.wire import Wire

CHUNK = 32 * 1024
CHUNKS = 24
TOKEN = SecretStr("t0ken")


def policy(seed: int) -> list[HostTensor]:
    half = CHUNKS // 2 * CHUNK
    return [
        HostTensor(name, "U8", (half,), memoryview(np.random.default_rng([seed, index]).bytes(half)))
        for index, name in enumerate("ab")
    ]


POLICIES = [policy(0), policy(1)]
NBYTES = CHUNKS * CHUNK


class Origin:
    """A server over a store with one version."""

    def __init__(self, store: WeightStore, *, published: Published | None = None, **options: Any) -> None:
        """published: that version is in the store already."""
        self.store = store
        self.metrics = WeightsMetrics(CollectorRegistry())
        self.claimed: list[str] = []
        self.server = WeightServer(
            create_app(store, token=TOKEN, metrics=self.metrics, **options), host="127.0.0.1", port=0
        ).start()
        self.url = self.server.url
        self.published = published or self.publish(0)

    def publish(self, version: int) -> Published:
        return self.store.publish("run", version, version, POLICIES[version], chunk_bytes=CHUNK, keep=2, created=1.5)

    @property
    def sent_bytes(self) -> float:
        (sample,) = [one for one in self.metrics.sent_bytes.collect()[0].samples if one.name.endswith("_total")]
        return sample.value

    def peers(self, version: int = 0) -> dict[str, int]:
        """By URL, how many chunks each says it holds."""
        order = unique_chunks(self.published.manifest if version == 0 else self.store_manifest(version))
        answer = httpx.get(f"{self.url}/v1/runs/run/peers/{version}", headers=HEADERS).json()
        return {peer["url"]: len(decode_bitmap(order, peer["have"])) for peer in answer["peers"]}

    def store_manifest(self, version: int) -> Any:
        from echo.weights import manifest as manifests

        return manifests.decode(self.store.read_manifest("run", version)[0], where="test")

    def claim(self, url: str, *, have: int = CHUNKS, pending: bool = False) -> None:
        """Announce in the name of `url` that it holds chunks of version 0; pending: that the rest is on its way to it."""
        order = unique_chunks(self.published.manifest)
        body = {"url": url, "have": encode_bitmap(order, order[:have])}
        if pending:
            body["pending"] = encode_bitmap(order, order[have:])
        self._post(body)
        self.claimed.append(url)

    def forget_peers(self) -> None:
        """Those that were claimed."""
        for url in self.claimed:
            self._post({"url": url, "leaving": True})
        self.claimed.clear()

    def _post(self, body: dict[str, Any]) -> None:
        assert httpx.post(f"{self.url}/v1/runs/run/peers/0", json=body, headers=HEADERS).status_code == 200


HEADERS = {"Authorization": f"Bearer {TOKEN.get_secret_value()}"}


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    made = Origin(WeightStore(tmp_path / "store"))
    yield made
    made.server.stop()


@contextmanager
def peer(**options: Any) -> Iterator[WeightClient]:
    made = WeightClient(
        token=TOKEN,
        first_wait_s=0.01,
        longest_wait_s=0.05,
        make_node=lambda access: PeerNode(access, **{"min_bytes": 0, **options}),
    )
    try:
        yield made
    finally:
        made.close()


def pull(puller: WeightClient, origin: Origin, published: Published | None = None, **options: Any) -> Pulled:
    published = published or origin.published
    return puller.pull(
        [f"{origin.url}/v1/runs/run/manifests/{published.manifest.version}"],
        run_id="run",
        version=published.manifest.version,
        manifest_digest=published.digest,
        **{"deadline_s": 60, **options},
    )


def assert_is(pulled: Pulled, version: int = 0) -> None:
    assert {name: bytes(one.data) for name, one in pulled.tensors.items()} == {
        one.name: bytes(one.data) for one in POLICIES[version]
    }


def test_what_one_producer_holds_the_next_pulls_from_it(origin: Origin) -> None:
    """The origin sends the version once; the second producer's bytes all come from the first, which counts them."""
    sent: list[int] = []
    with peer(sent=sent.append) as first, peer() as second:
        assert pull(first, origin).peer_bytes == 0
        eventually(lambda: list(origin.peers().values()) == [CHUNKS], "the first says what it holds")
        before = origin.sent_bytes
        pulled = pull(second, origin)
        assert_is(pulled)
        assert (pulled.peer_bytes, pulled.received_bytes, pulled.retries) == (NBYTES, NBYTES, 0)
        assert (origin.sent_bytes - before, sum(sent)) == (0, NBYTES)
        eventually(lambda: list(origin.peers().values()) == [CHUNKS] * 2, "the second serves as well")
    assert origin.peers() == {}, "who stops as planned takes its leave"


def test_pullers_at_the_same_time_share_what_the_origin_sends(tmp_path: Path) -> None:
    """Four at once over a narrow link: each gets everything, and the origin sends far less than four times that."""
    origin = Origin(WeightStore(tmp_path / "store"), max_egress_bytes_per_s=NBYTES)
    results: list[Pulled] = []
    with ExitStack() as stack:
        pullers = [stack.enter_context(peer()) for _ in range(4)]
        threads = [threading.Thread(target=lambda one=one: results.append(pull(one, origin))) for one in pullers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sent = origin.sent_bytes
    origin.server.stop()
    assert len(results) == 4
    for pulled in results:
        assert_is(pulled)
    assert sum(pulled.peer_bytes for pulled in results) >= 2 * NBYTES
    assert sent <= 2 * NBYTES


def test_a_newer_version_takes_the_place_of_the_older(origin: Origin) -> None:
    """After the next pull its chunks are served, and the old ones no more."""
    with peer() as puller:
        have = pull(puller, origin)
        (where,) = eventually(origin.peers, "the peer is known")
        newer = origin.publish(1)
        assert_is(pull(puller, origin, newer, have=have), 1)
        eventually(lambda: origin.peers(1) == {where: CHUNKS}, "it says so")
        for published, status in ((origin.published, 404), (newer, 200)):
            chunk = published.manifest.tensors[0].chunks[0].digest
            assert httpx.get(f"{where}/v1/chunks/{chunk}", headers=HEADERS).status_code == status
        assert httpx.get(f"{where}/v1/chunks/{chunk}").status_code == 401


def test_a_failed_pull_leaves_the_held_version_served(origin: Origin) -> None:
    """What came of the other is let go."""
    with peer() as puller:
        have = pull(puller, origin)
        (where,) = eventually(origin.peers, "the peer is known")
        newer = origin.publish(1)
        lost = newer.manifest.tensors[1].chunks[3].digest
        origin.store.chunk_path(lost).unlink()
        with pytest.raises(WeightsError):
            pull(puller, origin, newer, have=have)
        for published, status in ((origin.published, 200), (newer, 404)):
            for chunk in published.manifest.tensors[0].chunks:
                assert httpx.get(f"{where}/v1/chunks/{chunk.digest}", headers=HEADERS).status_code == status


@contextmanager
def other_peer(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[str]]]:
    """A peer that is not ours; gives its URL and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_peer_with_wrong_bytes_costs_a_retry_and_is_avoided(origin: Origin) -> None:
    """The policy is right, the lie is told in the log, and the next pull does not ask the liar again."""

    def lie(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(CHUNK))
        request.end_headers()
        request.wfile.write(bytes(CHUNK))

    with other_peer(lie) as (where, asked), peer() as puller:
        origin.claim(where)
        with capture_logs() as logs:
            pulled = pull(puller, origin)
        assert_is(pulled)
        # Two requests may be under way when the first turns out to be a lie.
        assert 1 <= pulled.retries == len(asked) <= 2
        assert pulled.peer_bytes == 0
        assert any(entry["event"].startswith("a peer failed") and entry["peer"] == where for entry in logs)
        asked.clear()
        assert_is(pull(puller, origin))
        assert asked == []


def test_a_peer_that_let_go_of_its_chunks_keeps_its_good_name(origin: Origin) -> None:
    """It went on to a newer version since it was heard of; the pull goes on elsewhere, and later ones ask it again."""

    def lack(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(404)
        request.send_header("Content-Length", "0")
        request.end_headers()

    with other_peer(lack) as (where, asked), peer() as puller:
        origin.claim(where)
        with capture_logs() as logs:
            pulled = pull(puller, origin)
        assert_is(pulled)
        assert 1 <= pulled.retries == len(asked) <= 2
        assert {entry["log_level"] for entry in logs if entry.get("peer") == where} == {"info"}
        assert eventually(lambda: puller._reputations.is_usable(where), "it is asked again soon", timeout_s=1.0)


def test_a_peer_that_dies_in_mid_chunk_costs_a_retry(origin: Origin) -> None:
    """What is missing comes from elsewhere, and nothing of the broken chunk is mixed in."""
    with Wire(0) as wire, peer(url=wire.url) as mortal:
        assert mortal._node is not None
        wire.upstream = mortal._node._server.port
        pull(mortal, origin)
        assert eventually(origin.peers, "the peer is known") == {wire.url: CHUNKS}
        wire.break_after(NBYTES // 4, "close", then=mortal.close)
        with peer() as puller:
            pulled = pull(puller, origin)
    assert wire.cut.is_set()
    assert_is(pulled)
    assert pulled.retries >= 1
    assert 0 < pulled.peer_bytes < NBYTES


def test_a_peer_that_hangs_is_given_up(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before a server would be."""
    monkeypatch.setattr(pulling, "_PEER_TIMEOUT_S", 0.2)
    released = threading.Event()
    with other_peer(lambda request: released.wait(30) and None) as (where, asked), peer() as puller:
        origin.claim(where)
        try:
            pulled = pull(puller, origin)
        finally:
            released.set()
    assert_is(pulled)
    assert asked


def test_peers_that_are_not_there_are_passed_over(origin: Origin) -> None:
    """And so are URLs that no server can have."""
    labels = "a" * 70
    for url in (
        "http://127.0.0.1:1",
        "http://:/",
        f"http://{labels}.test:1",
        "http://127.0.0.1:99999",
        "http://[::1",
        "http://..:1",
    ):
        origin.claim(url)
    with peer() as puller:
        assert_is(pull(puller, origin))


def test_without_a_tracker_everything_comes_from_the_origin(origin: Origin) -> None:
    """No word of peers is not an error."""
    with peer() as puller:
        node = puller._node
        assert node is not None
        session = Session(Access(TOKEN, 1.0, 1.0), Abort())
        assert node.exchange(session, "http://127.0.0.1:1", "run", 0, [], set()) == {}
        assert node.exchange(session, f"{origin.url}/nowhere", "run", 0, [], set()) == {}
        wrong = Session(Access(None, 1.0, 1.0), Abort())
        assert node.exchange(wrong, origin.url, "run", 0, [], set()) == {}
        session.close()


def test_a_peer_without_tls_is_not_asked_where_the_origin_has_it(origin: Origin) -> None:
    """The token would travel in the clear."""
    origin.claim("http://10.0.0.1:1")
    origin.claim("https://10.0.0.2:1")
    with peer() as puller:
        node = puller._node
        assert node is not None

        class Relayed(Session):
            """Reaches the origin of this test under an https address."""

            def ask(self, url: str, *arguments: Any, **options: Any) -> Any:
                return super().ask(url.replace("https://origin", origin.url), *arguments, **options)

        session = Relayed(Access(TOKEN, 1.0, 1.0), Abort())
        assert set(node.exchange(session, "https://origin", "run", 0, [], set())) == {"https://10.0.0.2:1"}
        session.close()


def test_a_peer_serves_ranges_as_the_origin_does(origin: Origin) -> None:
    """The same statuses, headers and bytes, from memory."""
    data = POLICIES[0][0].data[:CHUNK]
    chunk = digest(data)
    holdings = Holdings()
    holdings.add(chunk, data)
    app = create_peer_app(holdings, Access(TOKEN, 1.0, 1.0), max_egress_bytes_per_s=None, sent=lambda _: None)
    server = WeightServer(app, host="127.0.0.1", port=0).start()
    headers = ("content-range", "content-length", "etag", "accept-ranges", "cache-control", "content-type")
    asked: list[tuple[str, dict[str, str]]] = [
        (method, {"Range": f"bytes={text}"})
        for method in ("GET", "HEAD")
        for text in ("0-9", "5-", "-7", f"5-{CHUNK * 9}", f"{CHUNK}-", "-0", "9-3", "x", "0-1,5-6", f"0-{CHUNK - 1}")
    ]
    asked += [("GET", {}), ("HEAD", {}), ("GET", {"If-None-Match": f'"{chunk}"'})]
    asked += [("GET", {"Range": "bytes=10-", "If-Range": f'"{tag}"'}) for tag in (chunk, "0" * 64)]
    ask = httpx.Client()
    try:
        for method, extra in asked:
            answers = [
                ask.request(method, f"{url}/v1/chunks/{chunk}", headers=HEADERS | extra) for url in (origin.url, server.url)
            ]
            ours, theirs = [(one.status_code, [one.headers.get(name) for name in headers], one.content) for one in answers]
            if ours[0] in (400, 416):
                ours, theirs = (ours[0], ours[1][:1]), (theirs[0], theirs[1][:1])  # type: ignore[assignment]
            assert ours == theirs, (method, extra)
        assert httpx.get(f"{server.url}/v1/chunks/{'0' * 64}", headers=HEADERS).status_code == 404
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    finally:
        ask.close()
        server.stop()


def test_an_address_in_use_names_the_peers_settings(origin: Origin) -> None:
    """Not those of the weight server."""
    with pytest.raises(WeightsError, match=r"choose another weights\.peer_host or weights\.peer_port"):
        PeerNode(Access(TOKEN, 1.0, 1.0), port=origin.server.port)
