"""What every client of the seam shares: settings, errors as Echo's own, and noticing that the cluster was replaced.

Refuses to send or read.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from echo.errors import BrokerError, ConfigError, FencedError, OtherClusterError, UnknownTopicError

log = structlog.get_logger("kafka")

# librdkafka settings: a flat map, as in its CONFIGURATION.md.
Settings = Mapping[str, Any]

# The client's own log lines would go to standard error 20 times a second while a broker is down; the same errors reach
# `ClientErrors`, which logs each kind once a minute.
_COMMON_DEFAULTS: dict[str, Any] = {
    "topic.metadata.refresh.interval.ms": 30000,
    "socket.connection.setup.timeout.ms": 5000,
    "log_level": 2,
}

PRODUCER_ONLY = (
    "acks",
    "linger.ms",
    "batch.",
    "compression.",
    "delivery.timeout.ms",
    "message.timeout.ms",
    "queue.buffering.",
    "transaction",
)
CONSUMER_ONLY = ("fetch.", "queued.", "auto.offset.reset", "isolation.level", "max.poll.interval.ms", "group.")

# Errors that pass by themselves; the client goes on trying after each. It marks those of transactions only.
_TRANSIENT = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
    }
)
_FENCED = frozenset({KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED})
_NO_TOPIC = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})

# How often a reader or producer compares what the client knows of the cluster, seconds.
_GUARD_EVERY_S = 0.5

# So long ago an error of the client may be for a wait to name it: the client tries again, and fails again, much sooner.
_RECENT_S = 60.0

# How long `find_leaders` waits, seconds.
_LEADERS_S = 2.0

_Client = TypeVar("_Client")


def client_settings(settings: Settings, defaults: Settings, *, client_id: str, drop: Sequence[str]) -> dict[str, Any]:
    """Merge: our defaults, then the user's settings, less those that this kind of client does not know."""
    mine = {name: _plain(value) for name, value in settings.items() if not name.startswith(tuple(drop))}
    return {**_COMMON_DEFAULTS, **defaults, "client.id": client_id, **mine}


def _plain(value: Any) -> Any:
    """A secret is opened at the last moment, here."""
    return value.get_secret_value() if hasattr(value, "get_secret_value") else value


def build(kind: Callable[[dict[str, Any]], _Client], conf: dict[str, Any]) -> _Client:
    try:
        return kind(conf)
    except KafkaException as error:
        raise ConfigError(f"broker.settings: {error.args[0].str()}") from None


def find_leaders(client: Consumer | Producer, topic: str) -> None:
    """Have the client know the topic's leaders before it needs them. Without an answer it goes on asking by itself."""
    try:
        client.list_topics(topic, _LEADERS_S)
    except KafkaException as error:
        log.info("no answer about the leaders yet, the client goes on asking", topic=topic, error=str(error.args[0]))


def wrap_error(error: KafkaError, doing: str) -> BrokerError:
    """A BrokerError from the client's own error, keeping whether trying again may help."""
    text = f"{doing}: {error.name()}: {error.str()}"
    if error.code() in _FENCED:
        return FencedError(f"{text}: another process took over this transactional id; only the newest holder may go on")
    if error.code() in _NO_TOPIC:
        return UnknownTopicError(f"{text}: `echo-topics apply` creates what topics.yaml names")
    return BrokerError(text, retriable=not error.fatal() and (error.retriable() or error.code() in _TRANSIENT))


class ClientErrors:
    """The client's asynchronous errors: logged once a minute per kind, kept so that the line of a wait can name the last."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._seen: dict[int, float] = {}
        self._last = ""
        self._last_at = 0.0
        self.fatal: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        self.note(f"{error.name()}: {error.str()}")
        if error.fatal():
            self.fatal = error
        now = time.monotonic()
        if now - self._seen.get(error.code(), -60.0) >= 60.0:
            self._seen[error.code()] = now
            log.warning("broker error", client=self._client_id, error=self._last, fatal=error.fatal())

    def note(self, error: str) -> None:
        self._last, self._last_at = error, time.monotonic()

    @property
    def last(self) -> str:
        """The last error, if it is recent: one that passed does not explain a later wait."""
        return self._last if time.monotonic() - self._last_at <= _RECENT_S else ""

    def check(self, doing: str) -> None:
        if self.fatal is not None:
            raise wrap_error(self.fatal, doing)


class SameCluster:
    """Notices that the address now leads to another cluster: a memory-only broker that was restarted has lost everything.

    The client itself only logs it, keeps its positions and sequence numbers, and gets nothing, in silence. Its cached id
    changes with the first metadata answer after reconnecting, so that asking costs no request.
    """

    def __init__(self, expected: str | None) -> None:
        self._expected = expected
        self._next = 0.0

    def due(self) -> bool:
        """Once per interval: callers may ask as often as they like."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _GUARD_EVERY_S
        return True

    def learn(self, client: Consumer | Producer) -> None:
        """Where nobody said which cluster it must be: it is the one that has answered by now."""
        if self._expected is None:
            self.check(client)

    def check(self, client: Consumer | Producer) -> None:
        try:
            found = client.cluster_id(0)
        except KafkaException:
            return  # no metadata yet
        if self._expected is None:
            self._expected = found
        elif found != self._expected:
            raise OtherClusterError(
                f"this is cluster {found}, and it was {self._expected} before: the broker was replaced. The embedded Tansu "
                "broker keeps records in memory only, so what it held is gone: start a new run with a new run_id, or use "
                "Apache Kafka (`echo-broker --apache HOME`), which keeps them; if bootstrap.servers changed, correct it"
            )


def or_default(value: int | None, default: int) -> int:
    return default if value is None else value
