"""What the weight server can be told to do beside serving: TLS, a bounded link, nginx in front, a tracker for peers."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trustme
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from echo.config import ModelConfig, RunConfig, WeightsConfig
from echo.errors import ConfigError, ManifestError
from echo.http_server import Tls
from echo.metrics import WeightsMetrics
from echo.weights.client import WeightClient
from echo.weights.manifest import HostTensor
from echo.weights.server import WeightServer, create_app
from echo.weights.serving import Pace, Paced, parse_range
from echo.weights.spawn import WeightServerProcess
from echo.weights.store import Published, WeightStore
from echo.weights.tracker import Peer, Tracker, decode_bitmap, encode_bitmap

CHUNK = 64 * 1024
POLICY = [HostTensor("a", "U8", (3 * CHUNK,), memoryview(np.random.default_rng(0).bytes(3 * CHUNK)))]


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


@pytest.fixture
def published(store: WeightStore) -> Published:
    return store.publish("run", 0, 0, POLICY, chunk_bytes=CHUNK, keep=2, created=1.5)


@pytest.fixture
def chunk(published: Published) -> str:
    return published.manifest.tensors[0].chunks[0].digest


class Certificates:
    """A certificate authority, and a certificate of 127.0.0.1 that it signed, as files."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        self.ca, self.cert, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        issued.cert_chain_pems[0].write_to_path(str(self.cert))
        issued.private_key_pem.write_to_path(str(self.key))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@contextmanager
def serving(store: WeightStore, *, tls: Tls | None = None, **options: Any) -> Iterator[WeightServer]:
    app = create_app(store, **{"token": None, "metrics": WeightsMetrics(CollectorRegistry()), **options})
    server = WeightServer(app, host="127.0.0.1", port=0, tls=tls).start()
    try:
        yield server
    finally:
        server.stop()


# TLS


def test_a_pull_over_tls(tmp_path: Path, store: WeightStore, published: Published, certificates: Certificates) -> None:
    """The child of echo-train serves https where the run file names a certificate; who trusts its authority can pull."""
    weights = WeightsConfig(dir=store.root, port=0, token=SecretStr("t"), tls_cert=certificates.cert, tls_key=certificates.key)
    run = RunConfig(run_id="run", model=ModelConfig(path="tiny"), weights=weights)
    with WeightServerProcess.start(run, tmp_path / "server.log") as server:
        assert server.url == f"https://127.0.0.1:{server.port}"
        trusting = WeightClient(token=weights.token, tls_ca=certificates.ca)
        latest = trusting.latest(server.url, "run")
        pulled = trusting.pull([latest.url], run_id="run", version=0, manifest_digest=latest.digest, deadline_s=30)
        assert bytes(pulled.tensors["a"].data) == bytes(POLICY[0].data)
        with pytest.raises(ManifestError, match="CERTIFICATE_VERIFY_FAILED"):
            WeightClient(token=weights.token, attempts=1).latest(server.url, "run")


def test_unusable_tls_files_are_named(tmp_path: Path, store: WeightStore, certificates: Certificates) -> None:
    """When the server or the puller is made, and not when the first connection comes."""
    missing = tmp_path / "none.pem"
    (tmp_path / "junk.pem").write_text("junk")
    for tls, why in (
        (Tls(missing, certificates.key), "No such file"),
        (Tls(tmp_path / "junk.pem", certificates.key), "not a PEM certificate and its key"),
        (Tls(certificates.cert, certificates.ca), "not a PEM certificate and its key"),
    ):
        with pytest.raises(ConfigError, match=rf"weights\.tls_cert {tls.certificate}.*: {why}"):
            with serving(store, tls=tls):
                pass
    for ca, why in ((missing, "No such file"), (tmp_path / "junk.pem", "holds no PEM certificate")):
        with pytest.raises(ConfigError, match=rf"weights\.tls_ca {ca}: {why}"):
            WeightClient(tls_ca=ca)


def test_a_certificate_needs_its_key() -> None:
    """One without the other is a mistake in the run file."""
    with pytest.raises(ValueError, match=r"weights\.tls_cert and weights\.tls_key go together"):
        RunConfig(run_id="run", model=ModelConfig(path="tiny"), weights=WeightsConfig(tls_cert=Path("cert.pem")))


# nginx in front


def test_nginx_is_told_which_file_to_send(store: WeightStore, published: Published, chunk: str) -> None:
    """Access, existence and tag stay ours; the body is left to the server in front. The folder is that of the store."""
    with serving(store, accel_redirect="/internal/", token=SecretStr("t")) as server:
        where = f"{server.url}/v1/chunks/{chunk}"
        assert httpx.get(where).status_code == 401
        answer = httpx.get(where, headers={"Authorization": "Bearer t"})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (200, b"", f'"{chunk}"')
        redirect = answer.headers["x-accel-redirect"]
        assert redirect == f"/internal/{chunk[:2]}/{chunk}"
        assert (store.root / "chunks" / redirect.removeprefix("/internal/")) == store.chunk_path(chunk)
        gone = httpx.get(f"{server.url}/v1/chunks/{'0' * 64}", headers={"Authorization": "Bearer t"})
        assert gone.status_code == 404
        assert "x-accel-redirect" not in gone.headers


# The bounded link


def test_a_link_lets_bytes_through_at_its_rate() -> None:
    """In the order of asking; what was not used before is not caught up with."""
    now = 100.0
    pace = Pace(1000, clock=lambda: now)
    assert [pace.reserve(500), pace.reserve(1000)] == [0.5, 1.5]
    now = 101.0
    assert pace.reserve(1000) == 1.5
    now = 200.0
    assert pace.reserve(100) == pytest.approx(0.1)


def test_only_chunks_are_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's body goes out in pieces, each when the link has had time for it; everything else passes as it is."""
    waits: list[float] = []
    sent: list[Any] = []

    async def sleep(seconds: float) -> None:
        waits.append(round(seconds, 6))

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": False})

    async def receive() -> Any:
        raise AssertionError("nobody reads here")

    monkeypatch.setattr("echo.weights.serving.asyncio.sleep", sleep)
    paced = Paced(app, Pace(100_000, clock=lambda: 0.0))
    asyncio.run(paced({"type": "http", "path": "/health"}, receive, send))
    assert (waits, len(sent)) == ([], 2)
    sent.clear()
    asyncio.run(paced({"type": "http", "path": "/v1/chunks/abc"}, receive, send))
    assert [(len(one["body"]), one["more_body"]) for one in sent[1:]] == [(4096, True), (4096, True), (1808, False)]
    assert waits == [0.04096, 0.08192, 0.1]


def test_a_bounded_server_serves_the_right_bytes(store: WeightStore, published: Published) -> None:
    """Slower than without, by the bytes over the rate, and health answers meanwhile."""
    with serving(store, max_egress_bytes_per_s=2 * 3 * CHUNK) as server:
        puller = WeightClient()
        latest = puller.latest(server.url, "run")
        begun = time.monotonic()
        pulled = puller.pull([latest.url], run_id="run", version=0, manifest_digest=latest.digest, deadline_s=30)
        assert time.monotonic() - begun > 0.45
    assert bytes(pulled.tensors["a"].data) == bytes(POLICY[0].data)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("bytes=0-9", (0, 10)),
        ("bytes=5-", (5, 100)),
        ("bytes=-7", (93, 100)),
        ("bytes=-700", (0, 100)),
        ("bytes=5-900", (5, 100)),
        ("bytes=100-", (100, 100)),
        ("bytes=-0", (100, 100)),
        ("bytes=0-1,5-6", (0, 100)),
        ("bytes=9-3", None),
        ("bytes=x-y", None),
        ("bytes=", None),
        ("bytes=-", None),
        ("lines=1-2", None),
        ("bytes", None),
        ("bytes=0-1,x", None),
    ],
)
def test_ranges_are_read(asked: str, found: tuple[int, int] | None) -> None:
    """As RFC 9110 has them, of a body of 100 bytes."""
    assert parse_range(asked, 100) == found


# The tracker


def test_peers_hear_of_each_other(store: WeightStore) -> None:
    """Who tells what it holds hears of the others and not of itself; what is told again replaces what was told before."""
    with serving(store) as server:
        where = f"{server.url}/v1/runs/run/peers/7"
        assert httpx.get(where).json() == {"peers": []}
        first = {"url": "http://10.0.0.1:9104", "have": "AQ==", "pending": "", "leaving": False}
        second = {"url": "http://10.0.0.2:9104", "have": "", "pending": "Ag==", "leaving": False}
        assert httpx.post(where, json=first).json() == {"peers": []}
        assert httpx.post(where, json=second).json() == {"peers": [first]}
        again = first | {"have": "Aw=="}
        assert httpx.post(where, json=again).json() == {"peers": [second]}
        assert httpx.get(where).json() == {"peers": [again, second]}
        assert httpx.get(f"{server.url}/v1/runs/run/peers/8").json() == {"peers": []}


@pytest.mark.parametrize(
    "bad",
    [
        {"url": "ftp://host/"},
        {"url": "http://user:secret@host/"},
        {"url": "http://host/?query"},
        {"url": "http://host/", "have": "not base64!"},
        {"url": "http://host/", "have": "A" * 2**17},
        {},
        [],
    ],
)
def test_nonsense_of_a_peer_is_refused(store: WeightStore, bad: Any) -> None:
    """And is not told to others."""
    with serving(store) as server:
        where = f"{server.url}/v1/runs/run/peers/7"
        assert httpx.post(where, json=bad).status_code == 422
        assert httpx.get(where).json() == {"peers": []}


def test_the_tracker_forgets(store: WeightStore) -> None:
    """Who is silent is forgotten, and who leaves at once; and there is an end to what is remembered."""
    now = 0.0
    tracker = Tracker(ttl_s=10, clock=lambda: now)
    assert tracker.announce("run", 1, Peer(url="http://a:1"))
    now = 6.0
    assert tracker.announce("run", 1, Peer(url="http://b:1"))
    now = 11.0
    assert [peer.url for peer in tracker.peers("run", 1)] == ["http://b:1"]
    assert tracker.announce("run", 1, Peer(url="http://b:1", leaving=True))
    assert tracker.peers("run", 1) == []
    taken = [tracker.announce("run", 1, Peer(url=f"http://{number}:1")) for number in range(1025)]
    assert taken == [True] * 1024 + [False]
    taken = [tracker.announce("run", version, Peer(url="http://a:1")) for version in range(2, 66)]
    assert taken == [True] * 63 + [False]
    now = 30.0
    assert tracker.announce("run", 99, Peer(url="http://a:1"))


def test_a_bitmap_says_what_is_held() -> None:
    """Over the manifest's chunks in their order; nonsense says that little is held."""
    order = [f"{number:064x}" for number in range(19)]
    for held in (set(), set(order), {order[0], order[8], order[18]}):
        assert decode_bitmap(order, encode_bitmap(order, held)) == held
    assert decode_bitmap(order, "!") == set()
    assert decode_bitmap(order, "AQ==") == {order[0]}
    assert decode_bitmap(order[:3], "/////w==") == set(order[:3])
