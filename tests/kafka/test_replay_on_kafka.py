"""Replay on a log that really deletes: what Kafka says about an offset that retention took becomes an error with a name."""

from contextlib import closing

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from consumers.digest import batch_digest
from consumers.groups import Group
from consumers.replay import StepLine, replay
from echo import codec
from echo.broker import RunningBroker
from echo.errors import CheckpointError
from echo.kafka import KafkaLogAdmin, KafkaLogProducer, KafkaLogReader
from echo.log import Delivery
from tests.conftest import CreateTopic
from tests.helpers import make_group

pytestmark = pytest.mark.kafka


def test_a_step_is_replayed_until_retention_took_its_first_record(apache: RunningBroker, create_topic: CreateTopic) -> None:
    topic = create_topic(apache, "trajectories", partitions=2)
    settings = {"bootstrap.servers": apache.bootstrap_servers}
    groups: list[Group] = [make_group(4, number=number) for number in range(6)]
    places: dict[str, list[list[int]]] = {group.group_id: [] for group in groups}
    with closing(KafkaLogProducer(settings, client_id="t", max_record_bytes=2**20, queue_bytes=2**24)) as producer:
        for group in groups:

            def report(delivery: Delivery, name: str = group.group_id) -> None:
                assert delivery.error is None
                places[name].append([delivery.partition, delivery.offset])

            for member in group.members:
                key, headers, value = codec.encode(member.trajectory)
                assert producer.send(topic, key=key, value=value, headers=headers, on_delivery=report)
            assert producer.flush(30.0) == 0
    cluster_id = KafkaLogAdmin(settings, client_id="t").cluster_id(30.0)
    batch = [groups[5], groups[1], groups[2]]
    line = StepLine(
        step=3,
        version=0,
        batch=[[group.group_id, *places[group.group_id]] for group in batch],
        digest=batch_digest(batch),
        cluster=cluster_id,
        tokens_per_microbatch=64,
    )
    with closing(KafkaLogReader(settings, client_id="t", max_record_bytes=2**20, cluster_id=cluster_id)) as reader:
        assert replay(line, reader, topic=topic, cluster_id=cluster_id).matches

        partition, offset = places[groups[1].group_id][0]
        admin = AdminClient({**settings, "log_level": 2})
        admin.delete_records([TopicPartition(topic, partition, offset + 1)])[TopicPartition(topic, partition)].result(30.0)
        lowest = line.wanted[partition][0]
        with pytest.raises(CheckpointError, match=rf"partition {partition} offset {lowest} of topic {topic}.* retention"):
            replay(line, reader, topic=topic, cluster_id=cluster_id)
