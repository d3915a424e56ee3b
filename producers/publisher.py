"""Trajectories out: codec, Kafka producer, delivery reports, and back-pressure bounded in bytes.

Refuses to drop: `publish` waits while the queue is full. A group that can't be published whole (a member too large or
unsound) is given up before any member is sent. A record that the broker refuses for good ends the producer: what counts is
what was acknowledged.
"""

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from echo import codec
from echo.background import Background
from echo.errors import BrokerError, CorruptRecordError, EchoError
from echo.log import Delivery, LogProducer
from echo.metrics import ProducerMetrics
from echo.trajectory import Trajectory
from echo.waiting import Watch

log = structlog.get_logger("publisher")

# Kafka's record batch and record framing, so that what passes here passes the client's and the broker's own checks.
_RECORD_OVERHEAD = 128
_HEADER_OVERHEAD = 10
# Between looks at the stop signal while a wait lasts; reports of the broker end a wait at once.
_SLICE_S = 0.2


def record_bytes(record: codec.EncodedRecord) -> int:
    """Bytes of a record as Kafka counts them before compression, rounded up."""
    headers = sum([len(name) + len(value) for name, value in record.headers]) + _HEADER_OVERHEAD * len(record.headers)
    return len(record.key) + len(record.value) + headers + _RECORD_OVERHEAD


class Publisher:
    """Sends whole groups and counts what the broker acknowledged. One thread publishes; totals may be read from any.

    topic: where trajectories go. queue_bytes: bound of what is not acknowledged yet (one larger record may be alone in
    the queue). record_bytes: the largest record sent. waiting_s: how often a wait speaks. stopping: tells that a stop was
    asked for; from then on a wait lasts `flush_timeout_s` at most. check_topic: raises if the topic is gone: then
    there is nothing to wait for.
    """

    def __init__(
        self,
        producer: LogProducer,
        topic: str,
        *,
        metrics: ProducerMetrics,
        queue_bytes: int,
        record_bytes: int,
        flush_timeout_s: float = 60.0,
        waiting_s: float = 30.0,
        stopping: Callable[[], bool] = lambda: False,
        check_topic: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._metrics = metrics
        self._queue_bytes = queue_bytes
        self._record_bytes = record_bytes
        self._flush_timeout_s = flush_timeout_s
        self._waiting_s = waiting_s
        self._stopping = stopping
        self._check_topic = check_topic
        self._clock = clock
        self._changed = threading.Condition()
        self._unacknowledged: dict[int, tuple[int, float]] = {}
        self._queued = 0
        self._tickets = 0
        self._wants_room = False
        self._error: BrokerError | None = None
        self.acknowledged = 0
        self.groups_acknowledged = 0
        self.failed = 0
        self.last_given_up = ""
        metrics.queue_limit_bytes.set(queue_bytes)
        metrics.queued_bytes.set_function(lambda: self._queued)
        metrics.oldest_unacknowledged.set_function(self.oldest_unacknowledged_s)
        # Reports are served while the engine samples too: acknowledgements free the queue when they come, not when asked.
        self._serving = Background("delivery-reports", self._serve, wake=self._notify)
        self._serving.start()

    @property
    def queued_bytes(self) -> int:
        return self._queued

    @property
    def queued_records(self) -> int:
        return len(self._unacknowledged)

    def oldest_unacknowledged_s(self) -> float:
        """Age of the oldest record without acknowledgement, seconds; 0 when there is none."""
        with self._changed:
            for _, sent_at in self._unacknowledged.values():
                return max(0.0, self._clock() - sent_at)
        return 0.0

    def check(self) -> None:
        """Raise what ended the publishing: BrokerError where a record was refused for good, or what ended the thread."""
        with self._changed:
            if self._error is not None:
                raise self._error
        self._serving.check()

    def publish(self, group: Sequence[Trajectory]) -> bool:
        """Send the members of one group, waiting while the queue is full.

        False: it was given up, `last_given_up` says why, and nothing of it was sent.

        Raises BrokerError where a record was refused for good, or a stop was asked for and the queue stays full.
        """
        records = self._encode(group)
        if records is None:
            self.failed += len(group)
            self._metrics.failed.inc(len(group))
            return False
        missing = [len(records)]
        for record, size in records:
            self._send(record, size, missing)
        self._metrics.bytes.inc(sum(size for _, size in records))
        return True

    def flush(self, deadline_s: float) -> None:
        """Wait until every record is acknowledged. Raises BrokerError after `deadline_s`, saying how many are not."""
        watch = Watch("the last acknowledgements", self._describe, limit_s=self._waiting_s, clock=self._clock)
        deadline = self._clock() + deadline_s
        with self._changed:
            while self._unacknowledged:
                self.check()
                left = deadline - self._clock()
                if left <= 0:
                    raise BrokerError(
                        f"topic {self._topic}: {len(self._unacknowledged)} records are not acknowledged after {deadline_s:g} s "
                        f"({self._describe()}): is the broker up?"
                    )
                self._changed.wait(min(_SLICE_S, left))
                self._check_topic()
                watch.check()
            self.check()

    def close(self) -> None:
        """Stop serving reports. Does not flush, and leaves the Kafka producer open: it is not ours."""
        self._serving.stop()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _encode(self, group: Sequence[Trajectory]) -> list[tuple[codec.EncodedRecord, int]] | None:
        """The whole group, encoded and measured, or None where a member can't go."""
        try:
            encoded = codec.encode_many(group)
        except CorruptRecordError as error:
            self._give_up(group, f"a member is unsound: {error}")
            return None
        records = []
        for trajectory, record in zip(group, encoded, strict=True):
            size = record_bytes(record)
            if size > self._record_bytes:
                self._give_up(
                    group,
                    f"record {trajectory.trajectory_id} of {size} bytes is above limits.record_bytes = {self._record_bytes}; "
                    "raise it (and the topic's max.message.bytes) or lower sampling.max_tokens",
                )
                return None
            records.append((record, size))
        return records

    def _give_up(self, group: Sequence[Trajectory], why: str) -> None:
        self.last_given_up = f"group {group[0].group_id} of {len(group)} records: {why}"
        log.error(f"given up: {self.last_given_up}")

    def _send(self, record: codec.EncodedRecord, size: int, missing: list[int]) -> None:
        watch: Watch | None = None
        give_up_at: float | None = None
        ticket = -1
        while True:
            with self._changed:
                self.check()
                if ticket < 0 and (self._queued == 0 or self._queued + size <= self._queue_bytes):
                    # Counted before it is sent: its report may come before `send` returns.
                    self._tickets += 1
                    ticket = self._tickets
                    self._unacknowledged[ticket] = (size, self._clock())
                    self._queued += size
            if ticket >= 0 and self._hand_over(record, ticket, missing):
                return
            watch = watch or Watch(
                "room in the queue to the broker", self._describe, limit_s=self._waiting_s, clock=self._clock
            )
            if self._stopping():
                give_up_at = give_up_at if give_up_at is not None else self._clock() + self._flush_timeout_s
                if self._clock() >= give_up_at:
                    why = f"topic {self._topic}: stopped while the queue is full ({self._describe()}): is the broker up?"
                    if ticket >= 0:
                        self._forget(ticket)
                    raise BrokerError(why)
            self._look_at_topic(ticket)
            with self._changed:
                self._wants_room = True
                self._changed.wait(_SLICE_S)
                self._wants_room = False
            watch.check()

    def _look_at_topic(self, ticket: int) -> None:
        try:
            self._check_topic()
        except EchoError:
            if ticket >= 0:
                self._forget(ticket)
            raise

    def _hand_over(self, record: codec.EncodedRecord, ticket: int, missing: list[int]) -> bool:
        def report(delivery: Delivery) -> None:
            self._on_delivery(delivery, ticket, missing)

        try:
            return self._producer.send(
                self._topic, key=record.key, value=record.value, headers=record.headers, on_delivery=report
            )
        except BrokerError:
            # Nothing was taken, so no report will come.
            self._forget(ticket)
            raise

    def _forget(self, ticket: int) -> None:
        with self._changed:
            size, _ = self._unacknowledged.pop(ticket)
            self._queued -= size
            self._changed.notify_all()

    def _on_delivery(self, delivery: Delivery, ticket: int, missing: list[int]) -> None:
        with self._changed:
            size, _ = self._unacknowledged.pop(ticket)
            self._queued -= size
            if delivery.error is None:
                self.acknowledged += 1
                self._metrics.acknowledged.inc()
                missing[0] -= 1
                if missing[0] == 0:
                    self.groups_acknowledged += 1
            else:
                # The client has tried as often as its settings allow; this is final.
                self.failed += 1
                self._metrics.failed.inc()
                self._error = self._error or BrokerError(
                    f"topic {delivery.topic}: a record was refused for good: {delivery.error}; nothing acknowledged is lost"
                )
            # To wake `flush` for every report would cost more than all else that is done for it.
            if self._wants_room or self._error is not None or not self._unacknowledged:
                self._changed.notify_all()

    def _serve(self) -> None:
        while not self._serving.stopping.is_set():
            self._producer.poll(_SLICE_S)

    def _describe(self) -> str:
        error = self._producer.last_error
        return (
            f"{len(self._unacknowledged)} records and {self._queued} of {self._queue_bytes} bytes are not acknowledged, "
            f"the oldest for {self.oldest_unacknowledged_s():.0f} s; acknowledged so far {self.acknowledged}"
            + (f"; the client's last error: {error}" if error else "")
        )
