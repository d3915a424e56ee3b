"""The log as Echo sees it: records, delivery reports, and the protocols of what sends, reads and asks. Pure, no client.

Refuses to know Kafka's client: echo/kafka implements these protocols on it, tests/fakes/log.py in memory, and both pass
the same contract tests (tests/contracts/test_log_contract.py).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from echo.errors import CorruptRecordError

Headers = Sequence[tuple[str, bytes | None]]
Partition = tuple[str, int]

# As an offset: the first record that the partition still holds.
BEGINNING = -2


class LogRecord(NamedTuple):
    """A record read from a topic; or, in its place, `span` offsets from `offset` on that can't be read.

    headers: looking at them raises CorruptRecordError if the client can't read them; `known_headers` does not.
    unreadable: why the offsets can't be read, empty for a record. Such a run has no key, no headers and no value: a reader that
    expects a message finds none.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    headers: Headers
    value: bytes | None
    timestamp_ms: int
    unreadable: str = ""
    span: int = 1

    @property
    def where(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"

    @property
    def end(self) -> int:
        """The first offset after it."""
        return self.offset + self.span

    def known_headers(self) -> tuple[list[tuple[str, bytes | None]], str]:
        """The headers and "", or none and why they can't be read."""
        try:
            return list(self.headers), ""
        except CorruptRecordError as error:
            return [], str(error)


class TopicState(NamedTuple):
    """A topic as the cluster has it now. id: differs between a topic and one that was made anew under the same name."""

    id: str
    partitions: int


class Delivery(NamedTuple):
    """What became of a record that was sent: `error` is None when the broker acknowledged it. Offset -1: unknown."""

    topic: str
    partition: int
    offset: int
    error: str | None


OnDelivery = Callable[[Delivery], None]


class LogProducer(Protocol):
    """Records out. `send` returns False when the local queue is full: nothing was taken, poll and try again."""

    @property
    def last_error(self) -> str:
        """What the client reported within the last minute, for the line of a wait; "" when all is well."""

    def send(
        self, topic: str, *, key: bytes, value: bytes, headers: Headers = (), on_delivery: OnDelivery | None = None
    ) -> bool:
        """Take a record for sending; a key always goes to the same partition, in order.

        Every record that was taken gets exactly one delivery report, from `poll`, `flush` or `close`. Raises BrokerError where
        the record can never be sent (too large) or the producer can't go on.
        """

    def poll(self, timeout_s: float) -> None:
        """Serve delivery reports."""

    def flush(self, timeout_s: float) -> int:
        """Wait for all delivery reports; the number still outstanding after the deadline."""

    def close(self) -> None:
        """Give up what is still outstanding (its reports say so); `flush` first."""


class LogTransactions(Protocol):
    """Small batches, each visible as a whole or not at all. The newest holder of a transactional id fences the earlier ones."""

    def send(self, topic: str, messages: Sequence[tuple[bytes, bytes]]) -> None:
        """Commit (key, value) messages. Raises FencedError when another holder took over, else BrokerError.

        A retriable BrokerError may be answered by the same call again: messages then may stand in the log twice, never in part.
        """

    def close(self) -> None: ...


class LogReader(Protocol):
    """Records in, from exactly the positions it was given. One thread at a time, `last_error` from any."""

    @property
    def last_error(self) -> str:
        """What the client reported within the last minute, for the line of a wait; "" when all is well."""

    def assign(self, positions: Mapping[Partition, int]) -> None:
        """Read these partitions from these offsets (BEGINNING for the first that exists); replaces what was assigned.

        Partitions arrive un-paused, also those that were paused before.
        """

    def add(self, positions: Mapping[Partition, int]) -> None:
        """Read these partitions, too: those that are read already keep their positions and pauses. New ones are not paused.

        Raises a retriable BrokerError, with nothing added, while the client does not know such a partition yet.
        """

    def first_offsets(self, partitions: Iterable[Partition], timeout_s: float) -> dict[Partition, int]:
        """Asked of the brokers: the lowest offset that each partition still holds, its end where it holds nothing.

        Raises BrokerError, retriable if no answer came in time.
        """

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        """At most `max_records`, as soon as some are there; empty after `timeout_s`, or sooner where an end was reached.

        Offsets of a partition rise. Offsets that no client can unpack come as one record (`LogRecord.unreadable`), once it is
        known where they end. That they are passed over is logged here.

        Raises BrokerError where reading can't go on, for ever or until the next `assign`: an offset that the log does not hold
        (NoSuchOffsetError), a topic that does not exist (UnknownTopicError), another cluster than before. Records that were
        read before the error are returned first.
        """

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Return no records of these until `resume`, which goes on where reading stopped."""

    def resume(self, partitions: Iterable[Partition]) -> None: ...

    def at_end(self) -> bool:
        """Whether every assigned partition was read to the end that its last fetch saw."""

    def lag(self) -> dict[Partition, int | None]:
        """Offsets between the position and the high watermark of the last fetch; None until both are known.

        At the end of a reader of committed records, it is what a transaction that is still open holds back.
        """

    def close(self) -> None: ...


class LogGroupOffsets(Protocol):
    """Positions as a picture for lag tools, under a consumer group. Never read back; failures are logged, never raised."""

    def show(self, positions: Mapping[Partition, int]) -> None:
        """Show these offsets (per partition, the next one to resolve). Returns at once."""

    def close(self, timeout_s: float) -> None:
        """Wait for the newest positions to be shown, at most so long."""


class LogAdmin(Protocol):
    """What the processes ask about the cluster. Every answer that does not come in time is a retriable BrokerError."""

    def cluster_id(self, timeout_s: float) -> str: ...

    def nodes(self, timeout_s: float) -> dict[int, str]:
        """The brokers that are up: node id -> host:port."""

    def partitions(self, topic: str, timeout_s: float) -> int:
        """How many partitions a topic has; 0 if it does not exist."""

    def topics(self, names: Iterable[str], timeout_s: float) -> dict[str, TopicState]:
        """Those of the named topics that exist, as they are now. Creates none, whatever the broker is set to."""
