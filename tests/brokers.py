"""What an operator does to the topics of a running broker: deletes them, adds partitions, deletes records.

Refuses to return before the broker has done it.
"""

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from echo.broker import RunningBroker
from echo.log import Partition

_DEADLINE_S = 30.0


def _admin(broker: RunningBroker) -> AdminClient:
    """To be held until its answer is there: a client that nobody holds ends in mid-request."""
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 2})


def delete_topic(broker: RunningBroker, topic: str) -> None:
    admin = _admin(broker)
    admin.delete_topics([topic], operation_timeout=_DEADLINE_S)[topic].result(_DEADLINE_S)


def add_partitions(broker: RunningBroker, topic: str, partitions: int) -> None:
    admin = _admin(broker)
    admin.create_partitions([NewPartitions(topic, partitions)], operation_timeout=_DEADLINE_S)[topic].result(_DEADLINE_S)


def delete_before(broker: RunningBroker, partition: Partition, offset: int) -> None:
    """As retention would: the partition begins at `offset` from now on."""
    admin = _admin(broker)
    (answer,) = admin.delete_records([TopicPartition(*partition, offset)]).values()
    assert answer.result(_DEADLINE_S).low_watermark == offset
