"""Threads that die: each of them ends its process's loop with an error that names it, and none is started in another way."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from structlog.testing import capture_logs

import echo.broker.tansu
from consumers.wiring import trainer_of
from echo.background import Background
from echo.broker import plan_broker
from echo.broker.tansu import start_tansu
from echo.errors import BackgroundError, BrokerError, EchoError
from echo.metrics import TrainerMetrics
from echo.process import StopSignal
from echo.weights.client import WeightClient
from echo.weights.manifest import Manifest
from echo.weights.peers import PeerNode
from echo.weights.transport import Access
from tests.conftest import ROOT
from tests.eventually import eventually
from tests.helpers import RUN_ID
from tests.unit.test_learner import make_model
from tests.unit.test_produce_loop import NAMES, Harness, announcement
from tests.unit.test_train_loop import Cluster, make_run

# What a thread may die of: a mistake of ours, an exit that Python's threads take in silence, an error that has a type.
MISTAKE, EXIT, ERROR = ZeroDivisionError, SystemExit, BrokerError


def assert_named(error: EchoError | None, name: str, cause: type[BaseException]) -> None:
    assert error is not None
    assert str(error).startswith(f"{name} ")
    assert "injected" in str(error)
    if issubclass(cause, EchoError):
        assert type(error) is cause
        assert str(error) == f"{name} ended: injected"
    else:
        assert type(error) is BackgroundError
        assert cause.__name__ in str(error)


def raising(cause: type[BaseException]) -> Callable[..., Any]:
    def strike(*_: Any, **__: Any) -> Any:
        raise cause("injected")

    return strike


@pytest.fixture
def start() -> Iterator[Callable[..., Harness]]:
    """A producer that has sent its first heartbeat."""
    made: list[Harness] = []

    def build(**options: Any) -> Harness:
        made.append(Harness(**options).start())
        made[-1].wait_for_heartbeat(lambda one: True, "it lives")
        return made[-1]

    yield build
    for harness in made:
        harness.stop.set()
        harness.join()


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        *[(name, cause) for name in ("policy-listener", "request-listener") for cause in (MISTAKE, EXIT, ERROR)],
        *[(name, cause) for name in ("policy-puller", "delivery-reports") for cause in (MISTAKE, EXIT)],
        ("delivery-reports", ERROR),
        # A pull that fails with an error of Echo's is tried again, a heartbeat that the broker refuses is a warning.
        *[("heartbeat", cause) for cause in (MISTAKE, EXIT)],
    ],
)
def test_the_death_of_any_thread_ends_the_producer_and_is_named(
    start: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, name: str, cause: type[BaseException]
) -> None:
    h = start(run={"mode": "sequential"} if name == "request-listener" else {})
    if name == "policy-listener":
        h.log.break_reading(NAMES.control, cause("injected"))
    elif name == "request-listener":
        h.log.break_reading(NAMES.requests, cause("injected"))
    elif name == "policy-puller":
        monkeypatch.setattr(h.weights, "pull", raising(cause))
        h.tell(announcement(0))
    elif name == "delivery-reports":
        monkeypatch.setattr(h.producer, "poll", raising(cause))
    else:
        # Nothing else is sent without an announced policy.
        monkeypatch.setattr(h.producer, "send", raising(cause))
    assert h.ends_within(20), f"the producer went on without {name}"
    assert_named(h.error, name, cause)


class Token(SecretStr):
    """Breaks whatever asks for it, once it is told to."""

    broken = False

    def get_secret_value(self) -> str:
        if self.broken:
            raise MISTAKE("injected")
        return super().get_secret_value()


@pytest.mark.parametrize("name", ["weights-peer", "weight-server"])
def test_the_death_of_what_serves_peers_ends_the_producer_and_is_named(
    start: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    token = Token("t0ken")
    nodes: list[PeerNode] = []

    def make_node(access: Access) -> PeerNode:
        nodes.append(PeerNode(access._replace(token=token)))
        return nodes[-1]

    if name == "weight-server":
        monkeypatch.setattr(uvicorn.Server, "run", raising(MISTAKE))
    client = WeightClient(token=token, make_node=make_node)
    try:
        if name == "weight-server":
            h = Harness(puller=client).start()
        else:
            h = start(puller=client)
            token.broken = True
            manifest = Manifest(schema="2.0", run_id="r", version=0, step=0, created=0.0, tensors=())
            nodes[0].settle("http://127.0.0.1:1", manifest, [])
        assert h.ends_within(20), f"the producer went on without {name}"
        assert_named(h.error, name, MISTAKE)
    finally:
        token.broken = False
        client.close()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("cause", [MISTAKE, EXIT, ERROR])
@pytest.mark.parametrize("name", ["trajectory-reader", "fleet-listener"])
def test_the_death_of_any_thread_ends_the_trainer_and_is_named(
    model_path: str, tmp_path: Path, name: str, cause: type[BaseException]
) -> None:
    cluster = Cluster()
    topic = NAMES.trajectories if name == "trajectory-reader" else NAMES.heartbeats
    cluster.log.break_reading(topic, cause("injected"))
    run = make_run(model_path, tmp_path, steps=1)
    with (
        trainer_of(run, cluster.clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=StopSignal()) as trainer,
        pytest.raises(EchoError) as caught,
    ):
        trainer.run()
    assert_named(caught.value, name, cause)


def test_the_death_of_the_brokers_watch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo.broker.tansu, "resident_bytes", raising(MISTAKE))
    plan = plan_broker(environ={})
    with start_tansu(plan, data_dir=tmp_path, port=0, ready_s=30, watch_s=0.01) as broker:

        def check() -> EchoError | None:
            try:
                broker.check()
            except EchoError as error:
                return error
            return None

        assert_named(eventually(check, "the watch is missed"), "tansu-watch", MISTAKE)


def test_a_mistake_is_logged_with_its_traceback_and_wakes_the_owner() -> None:
    woken = threading.Event()
    with capture_logs() as said:
        background = Background("helper", raising(MISTAKE), wake=woken.set).start()
        assert woken.wait(20)
        background.stop()
    (entry,) = said
    assert (entry["thread"], entry["log_level"]) == ("helper", "error")
    assert isinstance(entry["exc_info"], MISTAKE)


def test_a_target_that_returns_unasked_has_died_unless_it_had_one_thing_to_do() -> None:
    background, one_shot = Background("helper", lambda: None), Background("errand", lambda: None, one_shot=True)
    background.check()
    for one in (background, one_shot):
        one.start().join()
    with pytest.raises(BackgroundError, match="helper ended"):
        background.check()
    one_shot.check()


def test_a_stop_ends_the_target_and_is_no_death() -> None:
    background = Background("helper", lambda: background.stopping.wait())
    assert background.stop(), "before it was started there is nothing to wait for"
    background = Background("helper", lambda: background.stopping.wait())
    background.start()
    assert background.stop(20)
    background.check()


def test_no_thread_is_started_in_another_way() -> None:
    sources = [path for room in ("echo", "producers", "consumers") for path in (ROOT / room).rglob("*.py")]
    pattern = re.compile(r"\bThread\(|start_new_thread|\bTimer\(")
    starting = [str(path.relative_to(ROOT)) for path in sources if pattern.search(path.read_text())]
    assert starting == ["echo/background.py"]
