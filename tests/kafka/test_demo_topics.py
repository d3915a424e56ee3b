"""What `echo-demo` does to the topics of a Kafka that is not its own: it makes those that are missing, and changes none."""

import pytest

from echo.broker import RunningBroker
from echo.config import BrokerConfig, ModelConfig, RunConfig, TopicsConfig
from echo.demo import make_topics
from echo.errors import TopicError
from echo.kafka import KafkaLogAdmin
from echo.topics import read_actual
from tests.conftest import CreateTopic

pytestmark = pytest.mark.kafka

MONTH_MS = "2592000000"


def run_on(broker: RunningBroker, prefix: str) -> RunConfig:
    return RunConfig(
        run_id="demo",
        model=ModelConfig(path="tiny"),
        broker=BrokerConfig(settings={"bootstrap.servers": broker.bootstrap_servers}),
        topics=TopicsConfig(prefix=prefix),
    )


def test_a_topic_that_is_there_keeps_its_retention_and_partitions(
    apache: RunningBroker, create_topic: CreateTopic, topic_prefix: str
) -> None:
    """topics.yaml has a week and eight: the broker would delete another run's records after that."""
    config = {"retention.ms": MONTH_MS, "max.message.bytes": "16777216"}
    name = create_topic(apache, "trajectories", partitions=2, config=config)
    run = run_on(apache, topic_prefix)
    spec = make_topics(run)
    found = read_actual(KafkaLogAdmin(run.broker.settings, client_id="t"), spec.names).topics
    assert set(found) == set(spec.names), "the others are made"
    assert (found[name].partitions, found[name].settings["retention.ms"].value) == (2, MONTH_MS)


def test_a_topic_that_does_not_fit_is_refused(apache: RunningBroker, create_topic: CreateTopic, topic_prefix: str) -> None:
    create_topic(apache, "control", config={"cleanup.policy": "delete"})
    with pytest.raises(TopicError, match=rf"{topic_prefix}control: .*`echo-topics plan` shows all differences"):
        make_topics(run_on(apache, topic_prefix))
