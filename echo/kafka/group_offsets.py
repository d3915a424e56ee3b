"""Positions shown in Kafka under a consumer group, so that ordinary lag tools see them (kafka-consumer-groups, Burrow, ...).

Refuses to be read back, to hold anybody up, and to fail: positions live in the trainer's checkpoint, these are a picture of
them. The group has no members; its offsets are altered through the admin API, which brokers allow for such a group only.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import structlog
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition

from echo.kafka.admin import KafkaLogAdmin
from echo.kafka.client import Settings
from echo.log import Partition

log = structlog.get_logger("kafka")

_RETRY_S = 0.2


class KafkaGroupOffsets:
    """See `LogGroupOffsets`. timeout_s: the deadline of one request, which runs in the client's own thread."""

    def __init__(self, settings: Settings, *, group: str, client_id: str, timeout_s: float = 5.0) -> None:
        self._client = KafkaLogAdmin(settings, client_id=client_id).client
        self._group = group
        self._timeout_s = timeout_s
        self._wanted: dict[Partition, int] = {}
        self._sent: dict[Partition, int] = {}
        self._request: Future[Any] | None = None
        self._said = ""

    def show(self, positions: Mapping[Partition, int]) -> None:
        self._wanted = dict(positions)
        # What is under way may not be overtaken; the newest positions then go with the next call, or with `close`.
        if self._request is None or self._request.done():
            self._succeeded()
            self._send()

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._wanted:
            if self._succeeded(max(0.0, deadline - time.monotonic())) and self._sent == self._wanted:
                return
            if time.monotonic() >= deadline:
                if self._request is not None and not self._request.done():
                    self._warn(f"no answer within {timeout_s:g} s")
                return
            # A coordinator that is only just loading refuses at first.
            time.sleep(_RETRY_S)
            self._send()

    def _send(self) -> None:
        self._sent = self._wanted
        wanted = [TopicPartition(topic, number, offset) for (topic, number), offset in self._wanted.items()]
        try:
            asked = self._client.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(self._group, wanted)], request_timeout=self._timeout_s
            )
        except KafkaException as error:
            self._request = None
            self._warn(error.args[0].str())
        else:
            self._request = asked[self._group]

    def _succeeded(self, timeout_s: float = 0.0) -> bool:
        """Whether the request under way, if any, succeeded within the timeout. A failure is said once, until it is another."""
        if self._request is None:
            return False
        try:
            answer = self._request.result(timeout_s)
        except TimeoutError:
            return False
        except KafkaException as error:
            self._warn(error.args[0].str())
            return False
        failed = next((place for place in answer.topic_partitions if place.error is not None), None)
        if failed is not None:
            self._warn(f"{failed.topic}[{failed.partition}]: {failed.error.str()}")
            return False
        self._said = ""
        return True

    def _warn(self, text: str) -> None:
        if text != self._said:
            self._said = text
            log.warning(
                "the positions can't be shown in Kafka; lag tools miss them, training does not", group=self._group, error=text
            )
