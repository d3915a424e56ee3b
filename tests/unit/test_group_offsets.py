"""Positions shown under a consumer group: any lag tool sees them, and no broker trouble holds a trainer up."""

import socket
import time

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient
from structlog.testing import capture_logs

from echo.broker import RunningBroker
from echo.kafka import KafkaGroupOffsets
from tests.conftest import CreateTopic


@pytest.fixture(params=["tansu", pytest.param("apache", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest) -> RunningBroker:
    found: RunningBroker = request.getfixturevalue(request.param)
    return found


def test_lag_tools_see_the_newest_positions(broker: RunningBroker, create_topic: CreateTopic, topic_prefix: str) -> None:
    """As kafka-consumer-groups asks; positions may go back, since a run may be set back to an earlier checkpoint."""
    topic = create_topic(broker, "trajectories", partitions=2)
    group = f"echo-{topic_prefix}run"
    settings = {"bootstrap.servers": broker.bootstrap_servers, "log_level": 2}
    shown = KafkaGroupOffsets(settings, group=group, client_id="test")
    for positions in ({0: 5, 1: 7}, {0: 6, 1: 9}, {0: 3, 1: 0}):
        shown.show({(topic, number): offset for number, offset in positions.items()})
    shown.close(30.0)
    admin = AdminClient(settings)
    asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0), TopicPartition(topic, 1)])
    answer = admin.list_consumer_group_offsets([asked], request_timeout=20.0)[group].result(20.0)
    assert {place.partition: place.offset for place in answer.topic_partitions} == {0: 3, 1: 0}


def test_a_broker_that_is_away_costs_a_warning_and_no_time() -> None:
    with socket.socket() as held, capture_logs() as said:
        held.bind(("127.0.0.1", 0))
        settings = {"bootstrap.servers": f"127.0.0.1:{held.getsockname()[1]}"}
        shown = KafkaGroupOffsets(settings, group="echo-r", client_id="test")
        began = time.monotonic()
        for offset in range(100):
            shown.show({("t", 0): offset})
        assert time.monotonic() - began < 10.0
        shown.close(0.3)
        assert time.monotonic() - began < 15.0
    warnings = [entry for entry in said if "can't be shown in Kafka" in entry["event"]]
    assert len(warnings) == 1
    assert (warnings[0]["group"], warnings[0]["error"]) == ("echo-r", "no answer within 0.3 s")
