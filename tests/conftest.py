"""Brokers for all tests: one Tansu and one Apache Kafka per session, topics with names of their own per test."""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import structlog
from confluent_kafka.admin import AdminClient, NewTopic
from hypothesis import settings

from echo.broker import BrokerPlan, RunningBroker, plan_broker, start_broker
from echo.errors import BrokerError
from tests.e2e.demo import Demo

ROOT = Path(__file__).resolve().parent.parent

# The same examples every time, so that a change fails for what it changed. `--hypothesis-profile=default` looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

CreateTopic = Callable[..., str]

# Apache Kafka compacts within seconds instead of minutes; topics set segment.ms and min.cleanable.dirty.ratio themselves.
FAST_CLEANER = {"log.cleaner.backoff.ms": "500", "log.retention.check.interval.ms": "1000"}


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A command that a test runs in this process configures logging for the whole of it."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def own_process() -> Iterator[None]:
    """As a learner has it in a process of its own: accelerate knows no precision yet, and sums are in one order."""
    # Imported here: most tests need no torch, which takes seconds.
    import torch
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tansu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """The embedded development broker."""
    try:
        plan = plan_broker(environ={})
    except BrokerError as error:
        pytest.skip(f"no Tansu here: {error}")
    with start_broker(plan, data_dir=tmp_path_factory.mktemp("tansu")) as broker:
        yield broker


@pytest.fixture(scope="session")
def apache_plan() -> BrokerPlan:
    """A real Apache Kafka that can be started; tests that use it carry the marker `kafka`."""
    home = os.environ.get("KAFKA_HOME") or str(ROOT.parent / "shared" / "kafka")
    try:
        return plan_broker(environ={**os.environ, "KAFKA_HOME": home})
    except BrokerError as error:
        pytest.skip(f"no Apache Kafka here: {error}")


@pytest.fixture(scope="session")
def apache(apache_plan: BrokerPlan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """One node of a real Apache Kafka, for the whole session: don't kill it."""
    with start_broker(apache_plan, data_dir=tmp_path_factory.mktemp("kafka"), heap_mib=512, overrides=FAST_CLEANER) as broker:
        yield broker


@pytest.fixture
def topic_prefix() -> str:
    """Goes before the topic names of one test, so that tests can share a broker."""
    return f"t{secrets.token_hex(4)}-"


@pytest.fixture
def create_topic(topic_prefix: str) -> CreateTopic:
    """create_topic(broker, name, partitions=1, replication=1, config=None) -> the topic's full name, with the prefix."""

    def create(
        broker: RunningBroker, name: str, partitions: int = 1, replication: int = 1, config: Mapping[str, str] | None = None
    ) -> str:
        topic = f"{topic_prefix}{name}"
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 2})
        new = NewTopic(topic, num_partitions=partitions, replication_factor=replication, config=dict(config or {}))
        admin.create_topics([new], operation_timeout=20.0)[topic].result(30.0)
        return topic

    return create


@pytest.fixture(scope="session")
def warm_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's policy, made once for all tests that only need one that answers right at times: don't change its folder."""
    # Imported here: most tests need no torch, which takes seconds.
    from tests.experiments.loop import make_model

    return make_model(tmp_path_factory.mktemp("policy"), seed=0)


@pytest.fixture
def started() -> Iterator[list[Demo]]:
    """Demos that a test started: none outlives it."""
    demos: list[Demo] = []
    yield demos
    for demo in demos:
        demo.process.kill()
        demo.process.wait()
