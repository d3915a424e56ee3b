"""The one seam to confluent-kafka: a producer, a transactional producer, a reader with manual assignment, an admin.

Refuses consumer groups for reading (positions live in the trainer's checkpoint) and any knowledge of what records mean.
Nothing else in Echo imports confluent_kafka. A client does not survive fork: make it in the process that uses it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from echo.errors import BrokerError, ConfigError, FencedError

log = structlog.get_logger("kafka")

# librdkafka settings: a flat map, as in its CONFIGURATION.md.
Settings = Mapping[str, Any]
Headers = Sequence[tuple[str, bytes | None]]
Partition = tuple[str, int]

BEGINNING = OFFSET_BEGINNING

# Fewer, larger fetch answers: the embedded broker stalls a tail reader that asks for many small ones, and 100 ms is far
# below any learner step. The partition budget is librdkafka's prefetch, in KiB over all partitions.
_READER_DEFAULTS: dict[str, Any] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    "fetch.wait.max.ms": 100,
    "queued.max.messages.kbytes": 65536,
    "check.crcs": True,
    "allow.auto.create.topics": False,
}
_PRODUCER_DEFAULTS: dict[str, Any] = {
    "enable.idempotence": True,
    "acks": "all",
    "compression.type": "lz4",
    "linger.ms": 20,
    "partitioner": "murmur2_random",
    "allow.auto.create.topics": False,
}
_COMMON_DEFAULTS: dict[str, Any] = {
    "topic.metadata.refresh.interval.ms": 30000,
    "socket.connection.setup.timeout.ms": 5000,
    "log_level": 4,
}

_PRODUCER_ONLY = (
    "acks",
    "linger.ms",
    "batch.",
    "compression.",
    "delivery.timeout.ms",
    "queue.buffering.",
    "transaction",
)
_CONSUMER_ONLY = ("fetch.", "queued.", "auto.offset.reset", "isolation.level", "max.poll.interval.ms", "group.")


class LogRecord(NamedTuple):
    """A record read from a topic."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    headers: list[tuple[str, bytes | None]]
    value: bytes | None
    timestamp_ms: int

    @property
    def where(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


class Delivery(NamedTuple):
    """What became of a record that was sent: `error` is None when the broker acknowledged it."""

    topic: str
    partition: int
    offset: int
    error: str | None


OnDelivery = Callable[[Delivery], None]


class LogProducer(Protocol):
    """Records out. `send` returns False when the local queue is full: nothing was taken, poll and try again."""

    def send(
        self, topic: str, *, key: bytes, value: bytes, headers: Headers = (), on_delivery: OnDelivery | None = None
    ) -> bool: ...

    def poll(self, timeout_s: float) -> None:
        """Serve delivery reports."""

    def flush(self, timeout_s: float) -> int:
        """Wait for all delivery reports; the number still outstanding after the deadline."""

    def close(self) -> None: ...


class LogReader(Protocol):
    """Records in, from exactly the positions it was given. One thread at a time."""

    def assign(self, positions: Mapping[Partition, int]) -> None:
        """Read these partitions from these offsets (BEGINNING for the first that exists); replaces what was assigned."""

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """At most `max_records`, as soon as some are there. Empty after `timeout_s`. Raises BrokerError."""

    def pause(self, partitions: Iterable[Partition]) -> None: ...

    def resume(self, partitions: Iterable[Partition]) -> None: ...

    def at_end(self) -> bool:
        """Whether every assigned partition was read to the end that its last fetch saw."""

    def lag(self) -> dict[Partition, int | None]:
        """Records (offsets) between the position and the high watermark of the last fetch; None before the first."""

    def close(self) -> None: ...


class LogAdmin(Protocol):
    """What the processes ask about the cluster at start."""

    def cluster_id(self, timeout_s: float) -> str: ...

    def partitions(self, topic: str, timeout_s: float) -> int:
        """How many partitions a topic has; 0 if it does not exist."""


def client_settings(settings: Settings, defaults: Settings, *, client_id: str, drop: Sequence[str]) -> dict[str, Any]:
    """Merge: our defaults, then the user's settings, less those that this kind of client does not know."""
    mine = {name: _plain(value) for name, value in settings.items() if not name.startswith(tuple(drop))}
    return {**_COMMON_DEFAULTS, **defaults, "client.id": client_id, **mine}


def _plain(value: Any) -> Any:
    """A secret is opened at the last moment, here."""
    return value.get_secret_value() if hasattr(value, "get_secret_value") else value


def _build(kind: Callable[[dict[str, Any]], Any], conf: dict[str, Any]) -> Any:
    try:
        return kind(conf)
    except KafkaException as error:
        raise ConfigError(f"broker.settings: {error.args[0].str()}") from None


def wrap_error(error: KafkaError, doing: str) -> BrokerError:
    """A BrokerError from the client's own error, keeping whether trying again may help."""
    text = f"{doing}: {error.name()}: {error.str()}"
    if error.code() in (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED):
        return FencedError(text)
    return BrokerError(text, retriable=error.retriable())


class _ErrorCollector:
    """The client's asynchronous errors: logged once per kind, kept so that a wait can say them."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._seen: dict[int, float] = {}
        self.last = ""
        self.fatal: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        self.last = f"{error.name()}: {error.str()}"
        if error.fatal():
            self.fatal = error
        now = time.monotonic()
        if now - self._seen.get(error.code(), -60.0) >= 60.0:
            self._seen[error.code()] = now
            log.warning("broker error", client=self._client_id, error=self.last, fatal=error.fatal())


class KafkaLogProducer:
    """An idempotent, acks=all producer. See `LogProducer`. Thread safe."""

    def __init__(self, settings: Settings, *, client_id: str, max_record_bytes: int, queue_bytes: int) -> None:
        self._errors = _ErrorCollector(client_id)
        conf = client_settings(settings, _PRODUCER_DEFAULTS, client_id=client_id, drop=_CONSUMER_ONLY)
        conf["message.max.bytes"] = max_record_bytes
        conf["queue.buffering.max.kbytes"] = max(1, queue_bytes // 1024)
        conf["error_cb"] = self._errors
        self._producer: Producer = _build(Producer, conf)

    def send(
        self, topic: str, *, key: bytes, value: bytes, headers: Headers = (), on_delivery: OnDelivery | None = None
    ) -> bool:
        self._check()
        try:
            self._producer.produce(topic, value=value, key=key, headers=list(headers), on_delivery=_adapt(on_delivery))
        except BufferError:
            return False
        except KafkaException as error:
            raise wrap_error(error.args[0], f"sending to {topic}") from None
        return True

    def poll(self, timeout_s: float) -> None:
        self._producer.poll(timeout_s)
        self._check()

    def flush(self, timeout_s: float) -> int:
        # In slices: Python's signal handlers run between them.
        deadline = time.monotonic() + timeout_s
        while True:
            left: int = self._producer.flush(min(0.5, max(0.0, deadline - time.monotonic())))
            if left == 0 or time.monotonic() >= deadline:
                return left

    def close(self) -> None:
        self._producer.flush(0)

    @property
    def last_error(self) -> str:
        return self._errors.last

    def _check(self) -> None:
        if self._errors.fatal is not None:
            raise wrap_error(self._errors.fatal, "producer can't go on")


class TransactionalProducer:
    """Sends small batches atomically under a transactional id; the newest holder of the id fences all earlier ones."""

    def __init__(self, settings: Settings, *, transactional_id: str, client_id: str, timeout_s: float = 30.0) -> None:
        self._errors = _ErrorCollector(client_id)
        self._timeout_s = timeout_s
        conf = client_settings(settings, _PRODUCER_DEFAULTS, client_id=client_id, drop=_CONSUMER_ONLY)
        conf["transactional.id"] = transactional_id
        conf["transaction.timeout.ms"] = int(timeout_s * 1000)
        conf["linger.ms"] = 0
        conf["error_cb"] = self._errors
        self._producer: Producer = _build(Producer, conf)
        self._run("taking over the control topic", lambda: self._producer.init_transactions(timeout_s))

    def send(self, topic: str, messages: Sequence[tuple[bytes, bytes]]) -> None:
        """Commit (key, value) messages, all or none. Raises FencedError when another trainer took over."""
        self._run("beginning a transaction", self._producer.begin_transaction)
        for message_key, value in messages:
            self._run(f"sending to {topic}", partial(self._producer.produce, topic, key=message_key, value=value))
        self._run(f"committing to {topic}", lambda: self._producer.commit_transaction(self._timeout_s))

    def close(self) -> None:
        self._producer.flush(0)

    def _run(self, doing: str, action: Callable[[], object]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                action()
                return
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if cause.retriable() and time.monotonic() < deadline:
                    self._producer.poll(0.1)
                    continue
                if cause.txn_requires_abort():
                    self._abort()
                raise wrap_error(cause, doing) from None

    def _abort(self) -> None:
        try:
            self._producer.abort_transaction(self._timeout_s)
        except KafkaException as error:
            log.warning("abort failed", error=str(error))


class KafkaLogReader:
    """Reads assigned partitions; remembers nothing in Kafka. See `LogReader`."""

    def __init__(self, settings: Settings, *, client_id: str, max_record_bytes: int) -> None:
        self._errors = _ErrorCollector(client_id)
        conf = client_settings(settings, _READER_DEFAULTS, client_id=client_id, drop=_PRODUCER_ONLY)
        # librdkafka wants a group id even for manual assignment; nothing is ever committed under it.
        conf["group.id"] = client_id
        conf["fetch.message.max.bytes"] = max_record_bytes
        conf["error_cb"] = self._errors
        self._consumer: Consumer = _build(Consumer, conf)
        self._ends: set[Partition] = set()
        self._assigned: set[Partition] = set()
        self._positions: dict[Partition, int] = {}
        self._lock = threading.Lock()

    def assign(self, positions: Mapping[Partition, int]) -> None:
        self._consumer.assign([TopicPartition(topic, number, offset) for (topic, number), offset in positions.items()])
        with self._lock:
            self._assigned = set(positions)
            self._ends = set()
            self._positions = {partition: offset for partition, offset in positions.items() if offset >= 0}

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        try:
            messages = self._consumer.consume(max_records, timeout_s)
        except KafkaException as error:
            raise wrap_error(error.args[0], "reading") from None
        if self._errors.fatal is not None:
            raise wrap_error(self._errors.fatal, "reader can't go on")
        records: list[LogRecord] = []
        with self._lock:
            for message in messages:
                if message.error() is not None:
                    self._on_error(message)
                    continue
                record = _record(message)
                records.append(record)
                partition = (record.topic, record.partition)
                self._ends.discard(partition)
                self._positions[partition] = record.offset + 1
        return records

    def pause(self, partitions: Iterable[Partition]) -> None:
        self._consumer.pause([TopicPartition(topic, number) for topic, number in partitions])

    def resume(self, partitions: Iterable[Partition]) -> None:
        self._consumer.resume([TopicPartition(topic, number) for topic, number in partitions])

    def at_end(self) -> bool:
        with self._lock:
            return self._ends >= self._assigned

    def lag(self) -> dict[Partition, int | None]:
        with self._lock:
            assigned, positions = set(self._assigned), dict(self._positions)
        found: dict[Partition, int | None] = {}
        for partition in assigned:
            _, high = self._consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
            found[partition] = None if high < 0 else max(0, high - positions.get(partition, 0))
        return found

    def close(self) -> None:
        self._consumer.close()

    @property
    def last_error(self) -> str:
        return self._errors.last

    def _on_error(self, message: Message) -> None:
        error = message.error()
        assert error is not None
        if error.code() == KafkaError._PARTITION_EOF:
            partition = (str(message.topic()), int(message.partition() or 0))
            self._ends.add(partition)
            # Commit markers and compacted records take offsets that nobody ever reads; the end event tells where we really are.
            self._positions[partition] = int(message.offset() or 0)
            return
        where = f"{message.topic()}[{message.partition()}]@{message.offset()}"
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise BrokerError(
                f"reading {where}: the log no longer holds this offset ({error.str()}); retention deleted it, or this is "
                "another cluster: raise the topic's retention, or start the run from a newer checkpoint"
            )
        if error.fatal() or not error.retriable():
            raise wrap_error(error, f"reading {where}")
        log.warning("read error, the client tries again", where=where, error=error.str())


class KafkaLogAdmin:
    """See `LogAdmin`."""

    def __init__(self, settings: Settings, *, client_id: str) -> None:
        self._errors = _ErrorCollector(client_id)
        drop = (*_PRODUCER_ONLY, *_CONSUMER_ONLY)
        conf = client_settings(settings, {}, client_id=client_id, drop=drop)
        conf["error_cb"] = self._errors
        self._servers = conf.get("bootstrap.servers", "")
        self.client: AdminClient = _build(AdminClient, conf)

    def cluster_id(self, timeout_s: float) -> str:
        return str(self.metadata(timeout_s).cluster_id)

    def partitions(self, topic: str, timeout_s: float) -> int:
        found = self.metadata(timeout_s).topics.get(topic)
        return len(found.partitions) if found is not None else 0

    def metadata(self, timeout_s: float) -> Any:
        """confluent-kafka's ClusterMetadata of all topics: naming one in the question makes some brokers create it."""
        try:
            return self.client.list_topics(timeout=timeout_s)
        except KafkaException as error:
            detail = f" ({self._errors.last})" if self._errors.last else ""
            raise BrokerError(
                f"no answer from {self._servers} within {timeout_s:g} s{detail}: is the broker up, and are "
                f"broker.settings right? [{error.args[0].name()}]",
                retriable=True,
            ) from None


def _adapt(on_delivery: OnDelivery | None) -> Callable[[KafkaError | None, Message], None] | None:
    if on_delivery is None:
        return None

    def report(error: KafkaError | None, message: Message) -> None:
        text = None if error is None else f"{error.name()}: {error.str()}"
        on_delivery(Delivery(str(message.topic()), message.partition() or 0, message.offset() or -1, text))

    return report


def _record(message: Message) -> LogRecord:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
    return LogRecord(topic, partition, offset, message.key(), headers, message.value(), message.timestamp()[1])
