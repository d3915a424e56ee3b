"""Hosts and ports in URLs: of both kinds of addresses, and over real sockets on ::1."""

import socket
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge
from pydantic import ValidationError

from consumers.wiring import _weight_server
from echo.addresses import authority, http_url, is_loopback, is_wildcard, local_host
from echo.config import MetricsConfig, ModelConfig, RunConfig, WeightsConfig
from echo.errors import ConfigError
from echo.metrics import WeightsMetrics
from echo.metrics_server import MetricsServer
from echo.weights.peers import PeerNode
from echo.weights.server import WeightServer, create_app
from echo.weights.spawn import KeptWeightServer
from echo.weights.store import WeightStore
from echo.weights.transport import Access
from echo.weights.urls import base_of, check_url
from tests.unit.test_weights_http import POLICY, assert_is, client, publish, pull


@given(st.ip_addresses() | st.from_regex(r"[a-z][a-z0-9]{0,9}(\.[a-z]{2,5})?", fullmatch=True), st.integers(1, 65535))
def test_host_and_port_come_out_of_a_url_as_they_went_in(host: object, port: int) -> None:
    text = str(host)
    parts = urlsplit(f"{http_url(text, port)}/v1/runs/run/manifests/1")
    assert (parts.hostname, parts.port) == (text, port)
    check_url(http_url(text, port))
    assert base_of(parts.geturl(), "run", 1) == http_url(text, port)


@pytest.mark.parametrize(
    ("host", "wildcard", "loopback", "local"),
    [
        ("0.0.0.0", True, False, "127.0.0.1"),
        ("::", True, False, "::1"),
        ("0:0:0:0:0:0:0:0", True, False, "::1"),
        ("", True, False, "127.0.0.1"),
        ("127.0.0.1", False, True, "127.0.0.1"),
        ("127.1.2.3", False, True, "127.1.2.3"),
        ("::1", False, True, "::1"),
        ("localhost", False, True, "localhost"),
        ("trainer-1", False, False, "trainer-1"),
        ("10.0.0.1", False, False, "10.0.0.1"),
        ("fd00::7", False, False, "fd00::7"),
    ],
)
def test_what_a_host_stands_for(host: str, wildcard: bool, loopback: bool, local: str) -> None:
    assert (is_wildcard(host), is_loopback(host), local_host(host)) == (wildcard, loopback, local)


def test_a_host_may_stand_in_brackets() -> None:
    assert WeightsConfig(host="[::1]").host == "::1"


@pytest.mark.parametrize("bad", ["::1:9103:x", "host:9103", "http://host", "[::1]:9103", "two words", "fd00::/8"])
def test_a_host_of_the_run_file_is_a_host_alone(bad: str) -> None:
    for make in (lambda: WeightsConfig(host=bad), lambda: WeightsConfig(peer_host=bad), lambda: MetricsConfig(host=bad)):
        with pytest.raises(ValidationError, match="is no host: give a name or an address alone"):
            make()


def run_of(**weights: object) -> RunConfig:
    return RunConfig(run_id="run", model=ModelConfig(path="tiny"), weights=WeightsConfig.model_validate(weights))


def test_the_url_of_a_server_that_is_another_s() -> None:
    """With serve: false the trainer announces what the run file says of the server."""
    with ExitStack() as opened:
        assert _weight_server(run_of(serve=False, host="::1", port=9103), opened)[0] == "http://[::1]:9103"
        assert _weight_server(run_of(serve=False, host="trainer-1", port=1), opened)[0] == "http://trainer-1:1"
        assert _weight_server(run_of(serve=False, host="::", url="http://t:1"), opened)[0] == "http://t:1"
        tls = {"tls_cert": "cert.pem", "tls_key": "key.pem"}
        assert _weight_server(run_of(serve=False, host="fd00::7", port=2, **tls), opened)[0] == "https://[fd00::7]:2"
        for host in ("::", "0.0.0.0", "0:0::0", ""):
            with pytest.raises(ConfigError, match=r"weights\.host is '.*', which producers can't reach: set weights\.url"):
                _weight_server(run_of(serve=False, host=host), opened)
        with pytest.raises(ConfigError, match=r"weights\.port is 0: set the port of the weight server, or weights\.url"):
            _weight_server(run_of(serve=False, port=0), opened)


# On ::1


@pytest.mark.parametrize("serve", [True, False])
def test_a_pull_over_ipv6(tmp_path: Path, serve: bool) -> None:
    """At the URL that the trainer announces, whether it starts the server or not."""
    store = WeightStore(tmp_path / "weights")
    published = publish(store, 0)
    with ExitStack() as opened:
        if serve:
            url, check = _weight_server(run_of(dir=store.root, host="::1", port=0), opened)
        else:
            app = create_app(store, token=None, metrics=WeightsMetrics(CollectorRegistry()))
            server = WeightServer(app, host="::1", port=0).start()
            opened.callback(server.stop)
            url, check = _weight_server(run_of(serve=False, host="::1", port=server.port), opened)
            assert url == server.url
        assert url.startswith("http://[::1]:")
        assert_is(pull(client(), url, published), POLICY)
        check()


def test_peers_find_each_other_over_ipv6(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")
    published = publish(store, 0)
    server = WeightServer(
        create_app(store, token=None, metrics=WeightsMetrics(CollectorRegistry())), host="::1", port=0
    ).start()
    try:
        pullers = [client(make_node=lambda access: PeerNode(access, host="::1", min_bytes=0)) for _ in range(2)]
        with closing(pullers[0]), closing(pullers[1]):
            assert_is(pull(pullers[0], server.url, published), POLICY)
            assert_is(pulled := pull(pullers[1], server.url, published), POLICY)
            assert pulled.peer_bytes > 0
    finally:
        server.stop()


def test_metrics_over_ipv6() -> None:
    registry = CollectorRegistry()
    Gauge("known", "A metric", registry=registry).set(7)
    server = MetricsServer(registry, host="::1", port=0, key="metrics.train_port")
    try:
        assert server.url == f"http://[::1]:{server.port}/metrics"
        assert "known 7.0" in httpx.get(server.url).text
        with pytest.raises(ConfigError, match=rf"metrics\.train_port: \[::1\]:{server.port} can't be listened on"):
            MetricsServer(registry, host="::1", port=server.port, key="metrics.train_port")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("host", "reached_at"), [("::", ("127.0.0.1", "::1")), ("0.0.0.0", ("127.0.0.1",)), ("", ("127.0.0.1",))]
)
def test_a_wildcard_is_reached_at_all_addresses_and_shown_as_the_machines_name(host: str, reached_at: tuple[str, ...]) -> None:
    server = MetricsServer(CollectorRegistry(), host=host, port=0, key="metrics.train_port")
    try:
        for address in reached_at:
            assert httpx.get(f"{http_url(address, server.port)}/metrics").status_code == 200
        assert server.url == f"http://{authority(socket.gethostname(), server.port)}/metrics"
    finally:
        server.close()


def test_a_trainer_that_starts_the_server_on_all_addresses_is_asked_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights\.host is '::', which producers can't reach: set weights\.url as well"):
        KeptWeightServer.start(run_of(dir=tmp_path / "store", host="::", token="t"), tmp_path / "log")
    run = run_of(dir=tmp_path / "store", host="::", port=0, token="t", url="http://trainer-1:9103")
    server = KeptWeightServer.start(run, tmp_path / "log")
    try:
        assert server.url == "http://trainer-1:9103"
        for address in ("127.0.0.1", "::1"):
            assert httpx.get(f"{http_url(address, server.port)}/health").status_code == 200
    finally:
        server.stop()


def test_a_peer_is_asked_at_its_address_of_ipv6() -> None:
    node = PeerNode(Access(None, 5.0, 5.0), host="::1").start()
    try:
        check_url(node.url)
        assert httpx.get(f"{node.url}/health").json() == {"status": "ok"}
    finally:
        node.close()
