"""The guard of listening ports: which connection is closed when, and over real sockets what a connection may do."""

import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from echo.errors import BackgroundError
from echo.http_guard import TRUSTED, Guard, Limits, Stage, Visit
from echo.http_server import HttpServer, Tls, connections_allowed, listen, raise_descriptor_limit
from echo.restarts import Restarts
from tests.eventually import eventually

LIMITS = Limits(connections=3, head_s=10, body_s=20, idle_s=30, stalled_s=60)


def visit_of(guard: Guard) -> Visit:
    visit = guard.admit(lambda: None)
    assert visit is not None
    return visit


def closed(guard: Guard, *visits: Visit) -> list[bool]:
    return [visit.is_gone and visit not in list(guard) for visit in visits]


# Which goes, and when


@pytest.mark.parametrize(("stage", "allowed_s"), [(Stage.HEAD, 10), (Stage.BODY, 20), (Stage.IDLE, 30), (Stage.CLOSING, 10)])
def test_a_stage_has_its_time(stage: Stage, allowed_s: float) -> None:
    guard = Guard(LIMITS)
    visit = visit_of(guard)
    guard.tick(5)
    guard.enter(visit, stage)
    guard.tick(allowed_s)
    assert closed(guard, visit) == [False]
    guard.tick(0.5)
    assert closed(guard, visit) == [True]
    assert (len(guard), guard.timed_out) == (0, 1)


def test_what_trickles_in_is_no_progress() -> None:
    guard = Guard(LIMITS)
    visit = visit_of(guard)
    for _ in range(11):
        visit.received += 1
        guard.tick(1)
    assert closed(guard, visit) == [True]


def test_an_answer_has_time_for_as_long_as_it_is_taken() -> None:
    """A client that takes nothing is closed; one that has its answer before it and takes it slowly is not idle yet."""
    guard = Guard(LIMITS)
    answered, stalled, slow = visit_of(guard), visit_of(guard), visit_of(guard)
    for visit in (answered, stalled, slow):
        guard.enter(visit, Stage.ANSWER)
    guard.stalled(stalled, True)
    guard.stalled(slow, True)
    guard.enter(slow, Stage.IDLE)
    guard.tick(59)
    assert closed(guard, answered, stalled, slow) == [False, False, False]
    guard.stalled(slow, False)
    guard.tick(2)
    assert closed(guard, answered, stalled, slow) == [False, True, False]
    guard.tick(30)
    assert closed(guard, answered, slow) == [False, True]
    guard.tick(1e6)
    assert closed(guard, answered) == [False], "what we are slow with is not the client's fault"


def test_the_place_of_the_one_that_waits_longest_is_given_on() -> None:
    """A stranger's before that of one that has shown the token, and of one that is being answered never."""
    guard = Guard(LIMITS)
    puller, first, second = visit_of(guard), visit_of(guard), visit_of(guard)
    puller.is_trusted = True
    guard.enter(puller, Stage.IDLE)
    guard.enter(first, Stage.BODY)
    third = visit_of(guard)
    assert closed(guard, puller, second, first) == [False, True, False], "the second has waited longest"
    guard.enter(third, Stage.ANSWER)
    fourth = visit_of(guard)
    assert closed(guard, puller, first, third) == [False, True, False]
    guard.enter(fourth, Stage.ANSWER)
    fifth = visit_of(guard)
    assert closed(guard, puller, third, fourth) == [True, False, False]
    guard.enter(fifth, Stage.ANSWER)
    assert guard.admit(lambda: None) is None
    assert (len(guard), guard.turned_away) == (3, 4)


def test_a_closed_connection_stays_closed() -> None:
    """Its transport still reports what had been under way."""
    guard = Guard(LIMITS)
    visit = visit_of(guard)
    guard.drop(visit)
    guard.enter(visit, Stage.IDLE)
    guard.stalled(visit, True)
    guard.forget(visit)
    assert len(guard) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "enter", "stall", "take", "trust", "leave", "tick"]),
            st.integers(0, 5),
            st.sampled_from([Stage.HEAD, Stage.BODY, Stage.ANSWER, Stage.IDLE]),
        ),
        max_size=80,
    )
)
def test_any_order_of_events_keeps_the_limit_and_starves_nobody(events: list[tuple[str, int, Stage]]) -> None:
    """Never more than the limit; a place is refused only while all are answered; once a client waits, its end is near."""
    guard = Guard(LIMITS)
    ended: list[Visit] = []
    visits: list[Visit] = []
    for action, index, stage in events:
        if action == "admit":
            answered = [one for one in visits if not one.is_gone and one.stage is Stage.ANSWER and one.stalled_since is None]
            visit = guard.admit(lambda: None)
            assert (visit is None) == (len(answered) == LIMITS.connections)
            if visit is not None:
                visit.close = lambda one=visit: ended.append(one)  # type: ignore[misc]
                visits.append(visit)
        elif action == "tick":
            guard.tick(float(index))
        elif index < len(visits):
            visit = visits[-1 - index]
            if action == "enter":
                guard.enter(visit, stage)
            elif action == "trust":
                visit.is_trusted = True
            elif action == "leave":
                guard.forget(visit)
            else:
                guard.stalled(visit, action == "stall")
        assert len(guard) <= LIMITS.connections
        assert {one for one in visits if not one.is_gone} == set(guard)
        assert all(one.is_gone for one in ended)
    guard.tick(61)
    assert all(one.stage is Stage.ANSWER and one.stalled_since is None for one in guard)


# Over sockets

HELLO = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def echo_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what it got; /large with a lot; /trusted says that the token was shown; /slow never answers."""
    if scope["path"] == "/trusted":
        scope["extensions"][TRUSTED]()
    if scope["path"] == "/slow":
        await receive()
        await receive()
        return
    body, more = b"", scope["method"] == "POST"
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        body, more = body + message["body"], message["more_body"]
    if scope["path"] == "/large":
        body = bytes(64 * 2**20)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(*, tls: Tls | None = None, restarts: Restarts | None = None, **limits: Any) -> Iterator[HttpServer]:
    bounds = Limits(**{"connections": 8, "head_s": 60.0, "body_s": 60.0, "idle_s": 60.0, **limits})
    server = HttpServer(echo_app, listen("127.0.0.1", 0), name="test-server", limits=bounds, tls=tls, restarts=restarts).start()
    try:
        yield server
    finally:
        server.stop()


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def ends(one: socket.socket) -> bytes:
    """What comes until the server closes the connection; fails, by the socket's timeout, where it does not."""
    received = b""
    try:
        while piece := one.recv(65536):
            received += piece
    except ConnectionError:
        pass
    return received


def answer(one: socket.socket) -> bytes:
    """A whole answer without a body."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = one.recv(65536)
        assert piece, received
        received += piece
    return received


def sent_all(one: socket.socket, data: bytes) -> None:
    try:
        one.sendall(data)
    except ConnectionError:
        return


@pytest.mark.parametrize(
    ("limits", "sent"),
    [
        ({"head_s": 0.5}, b""),
        ({"head_s": 0.5}, b"GET / HT"),
        ({"head_s": 0.5}, b"\r\n\r\n\r\n"),
        ({"body_s": 0.5}, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n123"),
        ({"body_s": 0.5}, b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc"),
        ({"idle_s": 1}, HELLO),
        ({"head_s": 0.5}, HELLO),
    ],
)
def test_a_connection_that_does_not_go_on_is_closed(limits: dict[str, Any], sent: bytes) -> None:
    with serving(**limits) as server, connect(server) as one:
        one.sendall(sent)
        if sent == HELLO:
            answer(one)
            if "head_s" in limits:
                one.sendall(b"GET / ")
        ends(one)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000, b"431"),
        (b"GET /" + b"x" * 100_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, b"431"),
        (b"\r\n" * 50_000, b"431"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n" + b"x" * 400_000, b""),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 70_000, b""),
        (b"nonsense\r\n\r\n", b"400"),
        (HELLO * 2, b""),
        (HELLO * 2000, b""),
    ],
    ids=["header", "url", "headers", "newlines", "length", "number", "chunks", "trailers", "nonsense", "pipeline", "pipelines"],
)
def test_too_much_is_refused_and_the_connection_closed(sent: bytes, status: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The status may be lost where the rest is still on its way. Nothing about it is logged: a stranger would fill the disk."""
    with serving() as server:
        with connect(server) as one:
            sent_all(one, sent)
            received = ends(one)
        assert received == b"" or received.split()[1] == status
        with connect(server) as one:
            one.sendall(HELLO)
            assert b"200 OK" in answer(one), "and others are served"
    assert [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_a_body_within_the_limits_arrives() -> None:
    body = bytes(range(256)) * 1000
    with serving() as server, connect(server) as one:
        for _ in range(3):
            one.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            received = b""
            while len(received.partition(b"\r\n\r\n")[2]) < len(body):
                received += one.recv(65536)
            assert received.endswith(body)


def test_no_protocol_is_changed() -> None:
    upgrade = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    upgrade += b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    with serving(idle_s=1) as server, connect(server) as one:
        one.sendall(upgrade)
        received = answer(one)
        assert received.startswith(b"HTTP/1.1 200")
        ends(one)


def test_an_answer_that_nobody_takes_ends() -> None:
    with serving(stalled_s=0.5) as server, socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(20)
        one.connect(("127.0.0.1", server.port))
        one.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        server_side = eventually(lambda: server._server, "it runs")
        eventually(lambda: server_side.server_state.connections, "it is being answered")
        # A client that takes nothing does not see the end either.
        eventually(lambda: not server_side.server_state.connections, "the connection is closed")


def test_one_that_has_shown_the_token_keeps_its_place_before_strangers() -> None:
    with serving(connections=3) as server:
        with connect(server) as puller:
            puller.sendall(b"GET /trusted HTTP/1.1\r\nHost: x\r\n\r\n")
            answer(puller)
            strangers = [connect(server) for _ in range(20)]
            for one in strangers[:-2]:
                assert ends(one) == b""
            puller.sendall(HELLO)
            assert b"200 OK" in answer(puller)
            for one in strangers:
                one.close()


def test_connections_that_are_being_answered_stay_and_others_are_turned_away() -> None:
    with serving(connections=2) as server:
        busy = [connect(server) for _ in range(2)]
        for one in busy:
            one.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        server_side = eventually(lambda: server._server, "it runs")
        eventually(lambda: len(server_side.server_state.tasks) == 2, "both are being answered")
        with connect(server) as other:
            assert ends(other) == b""
        for one in busy:
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1)
            one.close()


def test_a_tls_handshake_that_does_not_come_holds_no_place(tmp_path: Path) -> None:
    """Its connections count, too, and give their places to others or end by time."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    tls = Tls(tmp_path / "cert.pem", tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(str(tls.certificate))
    issued.private_key_pem.write_to_path(str(tls.key))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with serving(tls=tls, connections=3) as server:
        silent = [connect(server) for _ in range(10)]
        with connect(server) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as one:
            one.sendall(HELLO)
            assert b"200 OK" in answer(one)
            for stranger in silent[:-2]:
                assert ends(stranger) == b""
            one.sendall(HELLO)
            assert b"200 OK" in answer(one)
        for stranger in silent:
            stranger.close()
    with serving(tls=tls, head_s=1.0) as server, connect(server) as stranger:
        assert ends(stranger) == b""


def test_a_process_that_stood_still_closes_nobody_for_it() -> None:
    """The client may have stood still with it: the time does not count."""
    over = threading.Event()

    def stand_still() -> None:
        time.sleep(6.5)
        over.set()

    with serving(head_s=5) as server, connect(server) as one:
        server_side = eventually(lambda: server._server, "it runs")
        eventually(lambda: len(server_side.server_state.connections) == 1, "the connection is there")
        protocol = next(iter(server_side.server_state.connections))
        protocol.loop.call_soon_threadsafe(stand_still)
        assert over.wait(20)
        before = protocol.guard.now
        eventually(lambda: protocol.guard.now > before, "the guard looks at its connections")
        one.sendall(HELLO)
        assert b"200 OK" in answer(one)


def test_a_process_without_a_free_descriptor_serves_again_once_it_has_one() -> None:
    """Meanwhile it neither spins nor ends: the connection waits in the queue of the port."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with capture_logs() as said, serving() as server, socket.socket() as one:
        eventually(lambda: server._server and server._server.started, "it runs")
        one.settimeout(20)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            one.connect(("127.0.0.1", server.port))
            one.sendall(HELLO)
            eventually(lambda: len(said) >= 2, "it says so")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert b"200 OK" in answer(one)
        assert {entry["error"] for entry in said} == {"Too many open files"}
        assert len(said) < 20


def test_a_weight_server_takes_the_descriptors_that_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 8192), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Deaths


def test_a_server_that_dies_is_started_again_on_its_port() -> None:
    with capture_logs() as said, serving(restarts=Restarts(first_s=0.01)) as server:
        for lives in (1, 2):
            first = eventually(lambda: server._server, "it runs")
            first.should_exit = True
            eventually(lambda: server._server is not first, "another life")  # noqa: B023
            with connect(server) as one:
                one.sendall(HELLO)
                assert b"200 OK" in answer(one)
            server.check()
            assert [entry["server"] for entry in said if "started again" in entry["event"]] == ["test-server"] * lives


def test_a_server_that_dies_over_and_over_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(*_: Any) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr("echo.http_guard.Door.__init__", strike)
    with serving(restarts=Restarts(limit=2, first_s=0.01)) as server:

        def error() -> BackgroundError | None:
            try:
                server.check()
            except BackgroundError as found:
                return found
            return None

        assert "injected" in str(eventually(error, "it gives up"))


def test_restarts_are_bounded_in_a_while_and_free_afterwards() -> None:
    now = 0.0
    restarts = Restarts(limit=3, within_s=60, first_s=0.5, clock=lambda: now)
    assert [restarts.died() for _ in range(4)] == [0.5, 1.0, 2.0, None]
    now = 61.0
    assert restarts.died() == 0.5


def test_connections_take_a_part_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, found in ((1024, 256), (8192, 1000), (1, 1), (-1, 1000)):
        monkeypatch.setattr("resource.getrlimit", lambda _, soft=soft: (soft, soft))
        assert connections_allowed(1000) == found
