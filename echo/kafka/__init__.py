"""The one seam to confluent-kafka: a producer, a transactional producer, a reader with manual assignment, an admin.

Refuses consumer groups for reading (positions live in the trainer's checkpoint) and any knowledge of what records mean.
Only echo/topics.py, for the admin API, imports confluent_kafka beside it. A client does not survive fork: make it in the
process that uses it. The protocols are in echo/log.py and can be imported from here too.
"""

from echo.kafka.admin import KafkaLogAdmin
from echo.kafka.client import Settings, client_settings, wrap_error
from echo.kafka.group_offsets import KafkaGroupOffsets
from echo.kafka.producer import KafkaLogProducer, TransactionalProducer
from echo.kafka.reader import KafkaLogReader
from echo.log import (
    BEGINNING,
    Delivery,
    Headers,
    LogAdmin,
    LogGroupOffsets,
    LogProducer,
    LogReader,
    LogRecord,
    LogTransactions,
    OnDelivery,
    Partition,
    TopicState,
)

__all__ = [
    "BEGINNING",
    "Delivery",
    "Headers",
    "KafkaGroupOffsets",
    "KafkaLogAdmin",
    "KafkaLogProducer",
    "KafkaLogReader",
    "LogAdmin",
    "LogGroupOffsets",
    "LogProducer",
    "LogReader",
    "LogRecord",
    "LogTransactions",
    "OnDelivery",
    "Partition",
    "Settings",
    "TopicState",
    "TransactionalProducer",
    "client_settings",
    "wrap_error",
]
