"""Positions shown in Kafka under a consumer group, so that ordinary lag tools see them (kafka-consumer-groups, Burrow, ...).

Refuses to be read back, to hold anybody up, and to fail: positions live in the trainer's checkpoint, these are a picture of
them. The group has no members: they are committed by a client that never subscribes, which brokers allow for such a group only.
The admin API could do it too, but its requests to a coordinator abort the process when the connection breaks under them
(librdkafka pull request 5397).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from echo.background import Background
from echo.kafka.client import PRODUCER_ONLY, ClientErrors, Settings, build, client_settings
from echo.log import Partition

log = structlog.get_logger("kafka")

_DEFAULTS: dict[str, Any] = {"enable.auto.commit": False, "enable.auto.offset.store": False}
# Between looks for an answer; after a refusal also between tries: a coordinator that is only just loading refuses at first.
_LOOK_S = 0.2


class KafkaGroupOffsets:
    """See `LogGroupOffsets`. Not thread safe; requests run in the client's own thread."""

    def __init__(self, settings: Settings, *, group: str, client_id: str) -> None:
        conf = client_settings(settings, _DEFAULTS, client_id=client_id, drop=PRODUCER_ONLY)
        conf |= {"group.id": group, "on_commit": self._on_commit, "error_cb": ClientErrors(client_id)}
        self._client = build(Consumer, conf)
        self._group = group
        self._wanted: dict[Partition, int] = {}
        self._sent: dict[Partition, int] | None = None
        self._shown: dict[Partition, int] = {}
        self._said = ""

    def show(self, positions: Mapping[Partition, int]) -> None:
        self._wanted = dict(positions)
        self._client.poll(0)
        # What is under way may not be overtaken; the newest positions then go with the next call, or with `close`.
        self._send()

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._shown != self._wanted:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._send()
            self._client.poll(min(_LOOK_S, left))
        if self._sent is None:
            self._client.close()
        else:
            self._warn(f"no answer within {timeout_s:g} s")
            # Closing waits for the answer, for most of a minute. Nobody waits for this thread, not even the process's end.
            Background("group-offsets", self._client.close, one_shot=True).start()

    def _send(self) -> None:
        if self._sent is not None or self._shown == self._wanted:
            return
        try:
            self._client.commit(
                offsets=[TopicPartition(topic, number, offset) for (topic, number), offset in self._wanted.items()],
                asynchronous=True,
            )
        except KafkaException as error:
            self._warn(error.args[0].str())
        else:
            self._sent = self._wanted

    def _on_commit(self, error: KafkaError | None, places: Sequence[TopicPartition]) -> None:
        sent, self._sent = self._sent, None
        failed = next((place for place in places if place.error is not None), None)
        if error is not None:
            self._warn(error.str())
        elif failed is not None:
            self._warn(f"{failed.topic}[{failed.partition}]: {failed.error}")
        else:
            self._shown = sent or {}
            self._said = ""

    def _warn(self, text: str) -> None:
        if text != self._said:
            self._said = text
            log.warning(
                "the positions can't be shown in Kafka; lag tools miss them, training does not", group=self._group, error=text
            )
