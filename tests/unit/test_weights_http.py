"""The weight server and the client that pulls from it, over real sockets: access, ranges, verification, faults."""

import http.server
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from structlog.testing import capture_logs

from echo.config import ModelConfig, RunConfig, WeightsConfig
from echo.errors import ChunkError, ConfigError, ManifestError, PullCancelled, WeightsError
from echo.metrics import WeightsMetrics
from echo.weights.client import Pulled, WeightClient
from echo.weights.manifest import HostTensor, digest
from echo.weights.server import WeightServer, create_app
from echo.weights.spawn import WeightServerProcess
from echo.weights.store import Published, WeightStore
from echo.weights.urls import READING_HEADER
from tests.fakes.wire import Wire

KIB = 1024
CHUNK = 64 * KIB
TOKEN = "s3cret-Token~1="


def tensor(name: str, seed: int, nbytes: int = 3 * CHUNK + 5) -> HostTensor:
    return HostTensor(name, "U8", (nbytes,), memoryview(np.random.default_rng(seed).bytes(nbytes)))


POLICY = [
    tensor("a", 1),
    tensor("b", 2, 10 * CHUNK),
    HostTensor("scalar", "F32", (), memoryview(b"\0\0\x80?")),
    HostTensor("empty", "BF16", (0, 4), memoryview(b"")),
    # Shares a chunk with the scalar.
    HostTensor("bias", "F32", (3,), memoryview(b"one.two.four")),
    # Its two chunks are equal, and so are both tensors.
    HostTensor("zeros", "BF16", (CHUNK,), memoryview(bytes(2 * CHUNK))),
    HostTensor("tied", "BF16", (CHUNK,), memoryview(bytes(2 * CHUNK))),
]
NBYTES = sum(one.data.nbytes for one in POLICY)
# Equal bytes travel once.
UNIQUE_BYTES = NBYTES - 3 * CHUNK


def publish(store: WeightStore, version: int, tensors: Sequence[HostTensor] = POLICY, *, run: str = "run") -> Published:
    return store.publish(run, version, version, list(tensors), chunk_bytes=CHUNK, keep=2, created=1.5)


@contextmanager
def serving(store: WeightStore, token: str | None = None) -> Iterator[WeightServer]:
    app = create_app(store, token=SecretStr(token) if token is not None else None, metrics=WeightsMetrics(CollectorRegistry()))
    server = WeightServer(app, host="127.0.0.1", port=0).start()
    try:
        yield server
    finally:
        server.stop()


def client(**options: Any) -> WeightClient:
    return WeightClient(**{"first_wait_s": 0.01, "longest_wait_s": 0.05, **options})


def pull(puller: WeightClient, url: str, published: Published, **options: Any) -> Pulled:
    manifest = published.manifest
    urls = [f"{url}/v1/runs/{manifest.run_id}/manifests/{manifest.version}"]
    return puller.pull(
        **{
            "manifest_urls": urls,
            "run_id": manifest.run_id,
            "version": manifest.version,
            "manifest_digest": published.digest,
            "deadline_s": 60.0,
            **options,
        }
    )


def assert_is(pulled: Pulled, tensors: Sequence[HostTensor]) -> None:
    assert [(one.name, one.dtype, one.shape, bytes(one.data)) for one in pulled.tensors.values()] == [
        (one.name, one.dtype, one.shape, bytes(one.data)) for one in tensors
    ]
    assert list(pulled.tensors) == [one.name for one in tensors]


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


@pytest.fixture
def published(store: WeightStore) -> Published:
    return publish(store, 0)


@pytest.fixture
def url(store: WeightStore, published: Published) -> Iterator[str]:
    with serving(store) as server:
        yield server.url


@pytest.fixture
def chunk(published: Published) -> str:
    return published.manifest.tensors[0].chunks[0].digest


# The server


def test_latest_names_the_newest_manifest(store: WeightStore, url: str, published: Published) -> None:
    """Version, digest and the path of the manifest; its bytes have that digest and may be cached by their tag."""
    answer = httpx.get(f"{url}/v1/runs/run/latest")
    assert answer.json() == {"run_id": "run", "version": 0, "digest": published.digest, "url": "/v1/runs/run/manifests/0"}
    assert answer.headers["cache-control"] == "no-store"
    manifest = httpx.get(url + answer.json()["url"])
    assert (manifest.status_code, digest(manifest.content)) == (200, published.digest)
    assert manifest.headers["etag"] == f'"{published.digest}"'
    again = httpx.get(url + answer.json()["url"], headers={"If-None-Match": manifest.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    publish(store, 1)
    assert httpx.get(f"{url}/v1/runs/run/latest").json()["version"] == 1


def test_a_chunk_is_immutable_and_tagged_with_its_digest(url: str, chunk: str) -> None:
    """GET and HEAD agree; the tag is the digest on every host; a known tag is answered without a body."""
    head, got = httpx.head(f"{url}/v1/chunks/{chunk}"), httpx.get(f"{url}/v1/chunks/{chunk}")
    assert (head.status_code, head.content, got.status_code, digest(got.content)) == (200, b"", 200, chunk)
    for answer in (head, got):
        assert answer.headers["etag"] == f'"{chunk}"'
        assert answer.headers["content-length"] == str(CHUNK)
        assert answer.headers["accept-ranges"] == "bytes"
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    for known in (f'"{chunk}"', f'W/"{chunk}"', f'"other", "{chunk}"', "*"):
        answer = httpx.get(f"{url}/v1/chunks/{chunk}", headers={"If-None-Match": known})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", f'"{chunk}"')
    assert httpx.get(f"{url}/v1/chunks/{chunk}", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    ("asked", "begin", "end"),
    [("0-9", 0, 10), (f"{CHUNK - 3}-", CHUNK - 3, CHUNK), ("-7", CHUNK - 7, CHUNK), (f"5-{CHUNK * 9}", 5, CHUNK)],
)
def test_a_range_is_served(url: str, chunk: str, asked: str, begin: int, end: int) -> None:
    """One range gives exactly these bytes, and says which."""
    answer = httpx.get(f"{url}/v1/chunks/{chunk}", headers={"Range": f"bytes={asked}"})
    assert answer.status_code == 206
    assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/{CHUNK}"
    assert answer.content == bytes(POLICY[0].data[begin:end])


def test_ranges_that_can_not_be_served(url: str, chunk: str) -> None:
    """Behind the end: 416 with the size. Nonsense: 4xx. Several: the whole chunk, as HTTP allows."""
    where = f"{url}/v1/chunks/{chunk}"
    for asked in (f"bytes={CHUNK}-", "bytes=-0"):
        answer = httpx.get(where, headers={"Range": asked})
        assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{CHUNK}")
    for asked in ("bytes=9-3", "bytes=x-y", "bytes=", "lines=1-2", "bytes"):
        assert httpx.get(where, headers={"Range": asked}).status_code == 400
    answer = httpx.get(where, headers={"Range": "bytes=0-1,5-6"})
    assert (answer.status_code, digest(answer.content)) == (200, chunk)


def test_if_range_guards_a_resumed_transfer(url: str, chunk: str) -> None:
    """The range holds for the content that the tag names; for another tag the whole chunk comes."""
    where = f"{url}/v1/chunks/{chunk}"
    same = httpx.get(where, headers={"Range": "bytes=10-", "If-Range": f'"{chunk}"'})
    assert (same.status_code, len(same.content)) == (206, CHUNK - 10)
    other = httpx.get(where, headers={"Range": "bytes=10-", "If-Range": f'"{"0" * 64}"'})
    assert (other.status_code, len(other.content)) == (200, CHUNK)


HOSTILE_PATHS = [
    "/v1/chunks/..%2f..%2fruns%2frun%2f0.json",
    "/v1/chunks/../../../etc/passwd",
    "/v1/chunks/%2e%2e/%2e%2e/etc/passwd",
    "/v1/chunks/" + "A" * 64,
    "/v1/chunks/" + "a" * 63,
    "/v1/chunks/" + "a" * 64 + "%0a",
    "/v1/chunks/%ff%00",
    "/v1/chunks/" + "a" * 64,
    "/v1/runs/..%2fother/latest",
    "/v1/runs/../latest",
    "/v1/runs/%2e%2e/latest",
    "/v1/runs/.hidden/latest",
    "/v1/runs/unknown/latest",
    "/v1/runs/run/manifests/-1",
    "/v1/runs/run/manifests/1",
    "/v1/runs/run/manifests/x",
    "/v1/runs/run/manifests/" + "9" * 30,
    "/v1/runs/unknown/manifests/0",
    "/v1/runs/run/manifests/..%2f0",
]


def test_malformed_and_missing_names_are_client_errors(url: str) -> None:
    """Nothing that is not in the store is ever opened, and nothing makes the server fail."""
    for path in HOSTILE_PATHS:
        answer = httpx.get(httpx.URL(url, raw_path=path.encode()))
        assert 400 <= answer.status_code < 500, path
        assert b"root:" not in answer.content, path
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


def test_only_the_token_opens(store: WeightStore, published: Published, chunk: str) -> None:
    """Without the right token every route but /health answers 401 and says how; whether a thing exists stays hidden."""
    with serving(store, TOKEN) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        paths = ["/metrics", "/v1/openapi.json", "/v1/runs/run/latest", "/v1/runs/run/manifests/0"]
        paths += [f"/v1/chunks/{chunk}", "/v1/chunks/malformed"]
        wrong = ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xe9"]
        for path in paths:
            for header in wrong:
                answer = httpx.get(server.url + path, headers={"Authorization": header.encode("latin-1")} if header else {})
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Bearer realm="echo-weights"')
                assert TOKEN not in answer.text
            right = httpx.get(server.url + path, headers={"Authorization": f"Bearer {TOKEN}"})
            assert right.status_code == (200 if path != "/v1/chunks/malformed" else 422)
        assert httpx.get(f"{server.url}/no/such/path").status_code == 401, "which paths there are stays hidden, too"
        answer = httpx.get(f"{server.url}/v1/chunks/{chunk}", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.headers["cache-control"].startswith("private,"), "a shared cache would serve it without the token"


def test_metrics_count_requests_bytes_and_versions(store: WeightStore, url: str, chunk: str) -> None:
    """By route template, so that digests and guesses make no series of their own."""
    httpx.get(f"{url}/v1/chunks/{chunk}")
    httpx.get(f"{url}/v1/chunks/{chunk}", headers={"Range": "bytes=0-9"})
    httpx.head(f"{url}/v1/chunks/{chunk}")
    httpx.get(f"{url}/v1/chunks/{'0' * 64}")
    httpx.get(f"{url}/no/such/path")
    text = httpx.get(f"{url}/metrics").text
    for line in (
        'echo_weights_requests_total{route="/v1/chunks/{digest}",status="200"} 2.0',
        'echo_weights_requests_total{route="/v1/chunks/{digest}",status="206"} 1.0',
        'echo_weights_requests_total{route="/v1/chunks/{digest}",status="404"} 1.0',
        'echo_weights_requests_total{route="unknown",status="404"} 1.0',
        f"echo_weights_sent_bytes_total {float(CHUNK + 10)}",
        'echo_weights_newest_version{run="run"} 0.0',
        f"echo_weights_stored_bytes {float(UNIQUE_BYTES)}",
    ):
        assert line in text.splitlines()


def test_openapi_describes_the_server(store: WeightStore) -> None:
    """Paths, patterns, statuses and the bearer scheme are there; operation ids are unique."""
    with serving(store, TOKEN) as server:
        schema = httpx.get(f"{server.url}/v1/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    assert set(schema["paths"]) == {
        "/health",
        "/metrics",
        "/v1/runs/{run}/latest",
        "/v1/runs/{run}/manifests/{version}",
        "/v1/runs/{run}/peers/{version}",
        "/v1/chunks/{digest}",
    }
    chunk = schema["paths"]["/v1/chunks/{digest}"]["get"]
    assert {"200", "206", "304", "401", "404", "416"} <= set(chunk["responses"])
    assert "application/octet-stream" in chunk["responses"]["200"]["content"]
    assert chunk["security"] == [{"HTTPBearer": []}]
    assert "security" not in schema["paths"]["/health"]["get"]
    ids = [operation["operationId"] for path in schema["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))


def test_pulling_keeps_a_version_from_retention(store: WeightStore, url: str, chunk: str) -> None:
    """Asking for a manifest, or for a chunk in the name of a version, notes a reader; asking for `latest` does not."""
    httpx.get(f"{url}/v1/runs/run/latest")
    httpx.get(f"{url}/v1/chunks/{chunk}")
    assert not store.is_being_read("run", 0)
    assert httpx.get(f"{url}/v1/chunks/{chunk}", headers={READING_HEADER: "../0"}).status_code == 422
    httpx.get(f"{url}/v1/chunks/{chunk}", headers={READING_HEADER: "run/0"})
    assert store.is_being_read("run", 0)
    publish(store, 1)
    httpx.get(f"{url}/v1/runs/run/manifests/1")
    assert store.is_being_read("run", 1)


def test_an_address_in_use_is_a_clear_error(store: WeightStore, url: str) -> None:
    """The error names the address and the settings to change."""
    with pytest.raises(WeightsError, match=r"127\.0\.0\.1:\d+: Address already in use: choose another weights\.host"):
        WeightServer(
            create_app(store, token=None, metrics=WeightsMetrics(CollectorRegistry())),
            host="127.0.0.1",
            port=httpx.URL(url).port or 0,
        )


# The client


@pytest.mark.parametrize("connections", [1, 4])
def test_a_pull_gives_the_published_tensors(url: str, published: Published, connections: int) -> None:
    """Every tensor, bit for bit, also empty and 0-d ones; equal bytes travel once; the memory is the caller's to write."""
    told: list[tuple[int, int]] = []
    pulled = pull(client(connections=connections), url, published, progress=lambda *numbers: told.append(numbers))
    assert_is(pulled, POLICY)
    assert pulled.manifest == published.manifest
    assert (pulled.received_bytes, pulled.retries) == (UNIQUE_BYTES, 0)
    assert told[-1] == (UNIQUE_BYTES, UNIQUE_BYTES)
    assert 0 < pulled.seconds < 60
    assert not any(one.data.readonly for one in pulled.tensors.values())


def test_the_newest_version_is_asked_for(url: str, published: Published) -> None:
    """`latest` gives what a pull needs."""
    latest = client().latest(url, "run")
    assert (latest.version, latest.digest, latest.url) == (0, published.digest, f"{url}/v1/runs/run/manifests/0")
    with pytest.raises(ManifestError, match="/v1/runs/other/latest: 404"):
        client().latest(url, "other")


def test_unchanged_tensors_are_reused(store: WeightStore, url: str, published: Published) -> None:
    """Only changed chunks travel; an unchanged tensor is the very one that was held, and a held one is never written to."""
    have = pull(client(), url, published)
    held = have.tensors
    before = {name: bytes(one.data) for name, one in held.items()}
    changed = bytearray(POLICY[1].data)
    changed[4 * CHUNK] ^= 1
    policy = [POLICY[0], HostTensor("b", "U8", (len(changed),), memoryview(bytes(changed))), *POLICY[2:]]
    newer = publish(store, 1, policy)
    pulled = pull(client(), url, newer, have=have)
    assert_is(pulled, policy)
    assert pulled.received_bytes == CHUNK
    assert [name for name in held if pulled.tensors[name] is not held[name]] == ["b"]
    assert {name: bytes(one.data) for name, one in held.items()} == before


def test_held_tensors_that_do_not_fit_are_fetched(store: WeightStore, url: str) -> None:
    """Another shape, dtype or content under the same name is no shortcut."""
    other = [
        HostTensor("a", "U8", (POLICY[0].data.nbytes,), memoryview(bytes(POLICY[0].data.nbytes))),
        POLICY[1],
        HostTensor("zeros", "F16", (CHUNK,), memoryview(bytes(2 * CHUNK))),
        HostTensor("tied", "BF16", (CHUNK, 1), memoryview(bytes(2 * CHUNK))),
    ]
    have = pull(client(), url, publish(store, 1, other))
    again = publish(store, 2)
    pulled = pull(client(), url, again, have=have)
    assert_is(pulled, POLICY)
    assert pulled.received_bytes == UNIQUE_BYTES - POLICY[1].data.nbytes


def test_a_chunk_damaged_on_the_server_is_refused(store: WeightStore, url: str, published: Published) -> None:
    """A flipped bit is an error that names the chunk's URL, after a bounded number of attempts."""
    damaged = published.manifest.tensors[1].chunks[3].digest
    path = store.chunk_path(damaged)
    raw = bytearray(path.read_bytes())
    raw[100] ^= 4
    path.write_bytes(raw)
    with pytest.raises(ChunkError, match=rf"{url}/v1/chunks/{damaged}: its bytes have digest .* \(attempt 3 of 3\)") as caught:
        pull(client(connections=1, attempts=3), url, published)
    assert caught.value.retriable
    # Four chunks of tensor a, three good ones of b, and three times the damaged one.
    assert metric(url, 'echo_weights_requests_total{route="/v1/chunks/{digest}",status="200"}') == 4 + 3 + 3


@pytest.mark.parametrize("size", [0, CHUNK - 1, CHUNK + 1])
def test_a_chunk_of_another_size_is_refused(store: WeightStore, url: str, published: Published, size: int) -> None:
    """Too short or too long is noticed before the tensor's memory is left."""
    digest = published.manifest.tensors[1].chunks[3].digest
    store.chunk_path(digest).write_bytes(bytes(size))
    with pytest.raises(ChunkError, match=rf"{digest}: offers .* where 65,536 are missing"):
        pull(client(attempts=2), url, published)


def test_a_lost_chunk_is_not_asked_for_again(store: WeightStore, url: str, published: Published) -> None:
    """404 will not get better: no retry."""
    lost = published.manifest.tensors[1].chunks[3].digest
    store.chunk_path(lost).unlink()
    with pytest.raises(ChunkError, match=rf"{lost}: 404 Not Found: the server does not have it"):
        pull(client(), url, published)
    assert metric(url, 'echo_weights_requests_total{route="/v1/chunks/{digest}",status="404"}') == 1


def test_another_server_helps_out(tmp_path: Path, store: WeightStore, url: str, published: Published) -> None:
    """Chunks that are lost or damaged on the first server, and a manifest that it does not have, come from the second."""
    copy = WeightStore(tmp_path / "copy")
    assert publish(copy, 0).digest == published.digest
    chunks = published.manifest.tensors[1].chunks
    copy.chunk_path(chunks[0].digest).unlink()
    copy.chunk_path(chunks[1].digest).write_bytes(bytes(CHUNK))
    with serving(copy) as bad, serving(WeightStore(tmp_path / "none")) as empty:
        urls = [f"{base}/v1/runs/run/manifests/0" for base in (empty.url, bad.url, url)]
        pulled = pull(client(attempts=3), url, published, manifest_urls=urls)
    assert_is(pulled, POLICY)
    assert pulled.retries > 2


def test_a_manifest_of_another_digest_is_refused(url: str, published: Published) -> None:
    """What was announced is what is pulled, or nothing."""
    with pytest.raises(ManifestError, match=rf"{url}/v1/runs/run/manifests/0: digest {published.digest} is not the announced"):
        pull(client(attempts=2), url, published, manifest_digest="0" * 64)


def test_a_manifest_of_another_run_or_version_is_refused(store: WeightStore, url: str, published: Published) -> None:
    """Also with the right digest: a foreign manifest under our URL is not loaded."""
    foreign = publish(store, 0, run="foreign")
    path = store.manifest_path("run", 0)
    path.write_bytes(foreign.path.read_bytes())
    with pytest.raises(ManifestError, match="belongs to run 'foreign', not 'run'"):
        pull(client(attempts=1), url, published, manifest_digest=foreign.digest)
    newer = publish(store, 1)
    path.write_bytes(newer.path.read_bytes())
    with pytest.raises(ManifestError, match="manifests/0: is version 1, not 0"):
        pull(client(attempts=1), url, published, manifest_digest=newer.digest)


@pytest.mark.parametrize(
    "bad",
    [
        "{url}/v1/runs/other/manifests/0",
        "{url}/v1/runs/run/manifests/1",
        "{url}/v1/runs/run/manifests/0?x=1",
        "ftp://127.0.0.1/v1/runs/run/manifests/0",
        "http:///v1/runs/run/manifests/0",
        "http://127.0.0.1:99999/v1/runs/run/manifests/0",
        "http://127.0.0.1/a b/v1/runs/run/manifests/0",
        "nonsense",
    ],
)
def test_urls_that_can_not_be_this_version_are_refused(url: str, published: Published, bad: str) -> None:
    """Before anything is asked of anyone."""
    with pytest.raises(ManifestError):
        pull(client(), url, published, manifest_urls=[bad.format(url=url)])


def test_credentials_in_a_url_are_refused_and_not_repeated(published: Published) -> None:
    """They would end up in logs."""
    with pytest.raises(ManifestError) as caught:
        pull(client(), "http://user:hunter2@127.0.0.1:1", published)
    assert "hunter2" not in str(caught.value)


def test_an_announcement_without_urls_is_refused(published: Published) -> None:
    """There is nowhere to pull from."""
    with pytest.raises(ManifestError, match="announced without a URL"):
        pull(client(), "", published, manifest_urls=[])


def test_a_server_that_is_not_there(published: Published) -> None:
    """A bounded number of attempts, then an error that may be retried and names the URL."""
    with pytest.raises(
        ManifestError, match=r"http://127\.0\.0\.1:1/v1/runs/run/manifests/0: .*refused.*\(attempt 2 of 2\)"
    ) as caught:
        pull(client(attempts=2), "http://127.0.0.1:1", published)
    assert caught.value.retriable


def test_the_token_is_sent_and_never_shown(store: WeightStore, published: Published) -> None:
    """With the right token a pull works; with a wrong one it fails at once. No repr, log line or error has the token."""
    texts = []
    with serving(store, TOKEN) as server, capture_logs() as logs:
        right = client(token=SecretStr(TOKEN))
        assert_is(pull(right, server.url, published), POLICY)
        for puller, complaint in (
            (client(token=SecretStr("wrong" + TOKEN)), "refuses the token"),
            (client(), "asks for a token"),
        ):
            with pytest.raises(
                ManifestError, match=rf"401 Unauthorized: the server {complaint}; weights\.token must"
            ) as caught:
                pull(puller, server.url, published)
            assert not caught.value.retriable
            texts += [repr(puller), "".join(traceback.format_exception(caught.value))]
        with pytest.raises(ManifestError) as caught:
            pull(client(token=SecretStr(TOKEN), attempts=2), "http://127.0.0.1:1", published)
        texts += ["".join(traceback.format_exception(caught.value)), repr(right), repr(vars(right)), repr(logs)]
    assert any("trying again" in text for text in texts)
    assert not any(TOKEN in text for text in texts)


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "ümlaut"])
def test_a_token_that_can_not_travel_is_refused_by_both_sides(store: WeightStore, token: str) -> None:
    """When it is configured, not when the first puller comes; without repeating it."""
    secret = SecretStr(token)
    for make in (
        lambda: WeightClient(token=secret),
        lambda: create_app(store, token=secret, metrics=WeightsMetrics(CollectorRegistry())),
    ):
        with pytest.raises(ConfigError, match=r"weights\.token") as caught:
            make()
        assert not token or token not in str(caught.value)


@contextmanager
def other_server(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[Any]]]:
    """A server that is not ours; gives its URL and the headers of the requests that came."""
    seen: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers)
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_redirect_does_not_carry_the_token_away(published: Published) -> None:
    """Redirects are refused: the other host hears nothing."""

    def refuse(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_error(404)

    def redirect(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(307)
        request.send_header("Location", elsewhere)
        request.send_header("Content-Length", "0")
        request.end_headers()

    with other_server(refuse) as (elsewhere, heard), other_server(redirect) as (url, _):
        with pytest.raises(ManifestError, match=r"307 .*redirects are not followed") as caught:
            pull(client(token=SecretStr(TOKEN)), url, published)
    assert not caught.value.retriable
    assert heard == []


def test_an_answer_that_is_no_manifest(published: Published) -> None:
    """Some other server on the port: refused by its digest, and `latest` says what it is not."""

    def page(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write(b"<html>welcome</html>")

    with other_server(page) as (url, _):
        with pytest.raises(ManifestError, match="is not the announced"):
            pull(client(attempts=1), url, published)
        with pytest.raises(ManifestError, match="latest: not the answer of a weight server"):
            client().latest(url, "run")


# Faults on the way


def test_a_broken_transfer_goes_on_where_it_ended(store: WeightStore, url: str, published: Published) -> None:
    """The connection dies in the middle of chunks: the rest is fetched by range, and no byte travels twice."""
    with Wire(httpx.URL(url).port or 0) as wire:
        wire.break_after(UNIQUE_BYTES // 2, "close")
        pulled = pull(client(connections=3), wire.url, published)
    assert wire.cut.is_set()
    assert_is(pulled, POLICY)
    assert pulled.retries >= 1
    assert pulled.received_bytes == UNIQUE_BYTES
    assert metric(url, 'echo_weights_requests_total{route="/v1/chunks/{digest}",status="206"}') >= 1


def run_config(store: WeightStore, **weights: Any) -> RunConfig:
    return RunConfig(run_id="run", model=ModelConfig(path="tiny"), weights=WeightsConfig(dir=store.root, port=0, **weights))


def test_a_server_killed_in_mid_pull_costs_only_what_was_missing(
    tmp_path: Path, store: WeightStore, published: Published
) -> None:
    """kill -9 of the server while it sends; another one takes over: the pull ends well, and no byte travels twice."""
    run = run_config(store, token=SecretStr(TOKEN))
    with (
        WeightServerProcess.start(run, tmp_path / "first.log") as first,
        WeightServerProcess.start(run, tmp_path / "second.log") as second,
        Wire(first.port) as wire,
    ):

        def kill() -> None:
            first.kill()
            wire.upstream = second.port

        wire.break_after(UNIQUE_BYTES // 2, "close", then=kill)
        pulled = pull(client(token=run.weights.token, connections=2), wire.url, published)
        assert first.poll() == -9
    assert_is(pulled, POLICY)
    assert pulled.retries >= 1
    assert pulled.received_bytes == UNIQUE_BYTES
    assert not any(TOKEN in log.read_text() for log in tmp_path.glob("*.log"))


def test_a_silent_server_is_given_up_and_asked_again(url: str, published: Published) -> None:
    """A transfer that hangs longer than the read timeout is a broken one."""
    with Wire(httpx.URL(url).port or 0) as wire:
        wire.break_after(UNIQUE_BYTES // 2, "stall")
        pulled = pull(client(read_timeout_s=0.2), wire.url, published)
    assert_is(pulled, POLICY)
    assert pulled.retries >= 1


def test_a_pull_is_cancelled_while_it_hangs(url: str, published: Published) -> None:
    """A newer announcement ends the wait for a stuck server long before any timeout."""
    begun = time.monotonic()
    with Wire(httpx.URL(url).port or 0) as wire:
        wire.break_after(UNIQUE_BYTES // 2, "stall")
        with pytest.raises(PullCancelled, match=r"manifests/0: cancelled after [\d,]+ of [\d,]+ bytes"):
            pull(client(read_timeout_s=60), wire.url, published, cancelled=wire.cut.is_set)
    assert time.monotonic() - begun < 20


def test_a_pull_is_cancelled_while_it_waits_to_retry(published: Published) -> None:
    """Also the waits between attempts end."""
    begun = time.monotonic()
    asked: list[float] = []

    def cancelled() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 3

    with pytest.raises(PullCancelled, match="no manifest yet"):
        pull(client(first_wait_s=60, longest_wait_s=60), "http://127.0.0.1:1", published, cancelled=cancelled)
    assert time.monotonic() - begun < 20


def test_a_cancelled_pull_asks_nothing(url: str, published: Published) -> None:
    """Where the newer version is known before the start, nothing is returned even if it would be quick."""
    with pytest.raises(PullCancelled):
        pull(client(), url, published, cancelled=lambda: True)


def test_a_pull_has_a_deadline(url: str, published: Published) -> None:
    """However many retries are left: a retriable error says how far it came."""
    with Wire(httpx.URL(url).port or 0) as wire:
        wire.break_after(UNIQUE_BYTES // 2, "stall")
        with pytest.raises(WeightsError, match=r"manifests/0: not done within 0\.3 s, [\d,]+ of [\d,]+ bytes") as caught:
            pull(client(), wire.url, published, deadline_s=0.3)
    assert caught.value.retriable
    assert not isinstance(caught.value, ChunkError | ManifestError | PullCancelled)


def test_an_interrupted_caller_leaves_no_thread(url: str, published: Published) -> None:
    """Ctrl-C in the calling thread ends the workers too, hanging ones included."""

    def interrupt() -> bool:
        if wire.cut.is_set():
            raise KeyboardInterrupt
        return False

    with Wire(httpx.URL(url).port or 0) as wire:
        wire.break_after(UNIQUE_BYTES // 2, "stall")
        with pytest.raises(KeyboardInterrupt):
            pull(client(), wire.url, published, cancelled=interrupt)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights-pull")]


def test_a_version_retired_in_mid_pull_is_still_whole(store: WeightStore, url: str, published: Published) -> None:
    """The trainer publishes on while a slow puller is in the middle of an old version: it gets every chunk of it."""
    published_since: list[int] = []

    def trainer_goes_on() -> None:
        for version in range(1, 5):
            publish(store, version, [tensor("a", 100 + version), tensor("b", 200 + version)])
            published_since.append(version)

    with Wire(httpx.URL(url).port or 0) as wire:
        wire.break_after(UNIQUE_BYTES // 2, "close", then=trainer_goes_on)
        pulled = pull(client(connections=1), wire.url, published)
    assert_is(pulled, POLICY)
    assert published_since == [1, 2, 3, 4]
    assert store.versions("run") == [0, 3, 4]


def test_a_long_pull_goes_on_holding_its_version(store: WeightStore, url: str, published: Published) -> None:
    """Not only the manifest's request notes the reader, but every chunk's: a pull may last longer than the note."""
    note = store.manifest_path("run", 0).with_suffix(".reading")
    with Wire(httpx.URL(url).port or 0) as wire:
        wire.break_after(UNIQUE_BYTES // 2, "close", then=lambda: os.utime(note, (1, 1)))
        pull(client(connections=1), wire.url, published)
    assert store.is_being_read("run", 0)


def test_a_wire_without_faults_changes_nothing(url: str, published: Published) -> None:
    """The relay of these tests is transparent."""
    with closing(Wire(httpx.URL(url).port or 0)) as wire:
        assert pull(client(), wire.url, published).retries == 0
