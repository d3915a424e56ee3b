"""The publisher: bounded in bytes, never drops, counts what is acknowledged, and gives a group up only as a whole."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from echo import codec
from echo.errors import BrokerError
from echo.log import Delivery, Headers, OnDelivery
from echo.metrics import ProducerMetrics
from echo.trajectory import Trajectory
from producers.publisher import Publisher, record_bytes
from tests.helpers import make_group


class Sent(NamedTuple):
    topic: str
    key: bytes
    value: bytes
    on_delivery: OnDelivery | None


class HeldProducer:
    """A `LogProducer` whose broker answers only when the test says so."""

    def __init__(self) -> None:
        self.pending: deque[Sent] = deque()
        self.full = False
        self.fatal = ""
        self.refuses = ""
        self.last_error = ""
        self._reports: deque[tuple[Sent, str | None]] = deque()
        self._changed = threading.Condition()

    def send(
        self, topic: str, *, key: bytes, value: bytes, headers: Headers = (), on_delivery: OnDelivery | None = None
    ) -> bool:
        with self._changed:
            if self.refuses:
                raise BrokerError(self.refuses)
            if self.full:
                return False
            self.pending.append(Sent(topic, key, value, on_delivery))
            self._changed.notify_all()
            return True

    def answer(self, count: int = 1, error: str | None = None) -> None:
        with self._changed:
            for _ in range(count):
                self._reports.append((self.pending.popleft(), error))
            self._changed.notify_all()

    def die(self, error: str) -> None:
        with self._changed:
            self.fatal = error
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        """Until so many records are in flight."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.pending) >= count, timeout=10), f"{len(self.pending)} of {count}"

    def poll(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._reports or self.fatal, timeout=timeout_s)
            reports = list(self._reports)
            self._reports.clear()
            fatal = self.fatal
        for sent, error in reports:
            if sent.on_delivery is not None:
                sent.on_delivery(Delivery(sent.topic, 0, 7, error))
        if fatal:
            raise BrokerError(fatal)

    def flush(self, timeout_s: float) -> int:
        return len(self.pending)

    def close(self) -> None: ...


@pytest.fixture
def broker() -> HeldProducer:
    return HeldProducer()


@pytest.fixture
def metrics() -> ProducerMetrics:
    return ProducerMetrics("test-run", "p0", CollectorRegistry())


@pytest.fixture
def make(broker: HeldProducer, metrics: ProducerMetrics) -> Iterator[Callable[..., Publisher]]:
    made: list[Publisher] = []

    def build(**options: object) -> Publisher:
        defaults: dict[str, object] = {"queue_bytes": 2**20, "record_bytes": 2**20}
        made.append(Publisher(broker, "trajectories", metrics=metrics, **(defaults | options)))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for publisher in made:
        publisher.close()


def group_of(size: int = 2, **overrides: object) -> list[Trajectory]:
    return [member.trajectory for member in make_group(size, **overrides).members]  # type: ignore[arg-type]


def size_of(group: list[Trajectory]) -> int:
    return sum(record_bytes(codec.encode(trajectory)) for trajectory in group)


def value_of(metrics: ProducerMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"run": "test-run", "producer": "p0"})


def in_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def test_records_travel_under_the_group_id_and_decode(broker: HeldProducer, make: Callable[..., Publisher]) -> None:
    group = group_of(2)
    assert make().publish(group)
    assert [codec.decode(sent.value).trajectory_id for sent in broker.pending] == [one.trajectory_id for one in group]
    assert {sent.key for sent in broker.pending} == {group[0].group_id.encode()}
    assert {sent.topic for sent in broker.pending} == {"trajectories"}


def test_only_the_brokers_word_counts(broker: HeldProducer, make: Callable[..., Publisher], metrics: ProducerMetrics) -> None:
    publisher = make()
    group = group_of(2)
    publisher.publish(group)
    assert (publisher.acknowledged, publisher.groups_acknowledged) == (0, 0)
    assert publisher.queued_bytes == size_of(group) == value_of(metrics, "echo_produce_queue_bytes")
    broker.answer(2)
    publisher.flush(10)
    assert (publisher.acknowledged, publisher.groups_acknowledged, publisher.queued_bytes) == (2, 1, 0)
    assert value_of(metrics, "echo_produce_records_acknowledged_total") == 2


def test_a_full_queue_holds_the_publisher_until_the_broker_acknowledges(
    broker: HeldProducer, make: Callable[..., Publisher]
) -> None:
    first, second = group_of(1), group_of(1, number=1)
    publisher = make(queue_bytes=size_of(first) + size_of(second) - 1)
    publisher.publish(first)
    thread = in_thread(lambda: publisher.publish(second))
    thread.join(0.3)
    assert thread.is_alive()
    assert len(broker.pending) == 1, "the bound counts what is not acknowledged"
    broker.answer()
    thread.join(10)
    assert not thread.is_alive()
    assert [sent.key for sent in broker.pending] == [second[0].group_id.encode()]


def test_a_record_above_the_bound_still_goes_alone(broker: HeldProducer, make: Callable[..., Publisher]) -> None:
    publisher = make(queue_bytes=1)
    thread = in_thread(lambda: publisher.publish(group_of(2)))
    for _ in range(2):
        broker.wait_for(1)
        assert len(broker.pending) == 1
        broker.answer()
    thread.join(10)
    publisher.flush(10)
    assert publisher.acknowledged == 2


def test_the_clients_own_full_queue_is_waited_for_too(broker: HeldProducer, make: Callable[..., Publisher]) -> None:
    broker.full = True
    publisher = make()
    thread = in_thread(lambda: publisher.publish(group_of(1)))
    thread.join(0.1)
    assert thread.is_alive()
    broker.full = False
    thread.join(10)
    assert not thread.is_alive()
    assert publisher.queued_records == 1, "counted once, however often it was tried"


def test_a_wait_says_what_it_waits_for(broker: HeldProducer, make: Callable[..., Publisher]) -> None:
    publisher = make(queue_bytes=1, waiting_s=0.05)
    publisher.publish(group_of(1))
    with capture_logs() as lines:
        thread = in_thread(lambda: publisher.publish(group_of(1, number=1)))
        thread.join(0.5)
        broker.answer()
        thread.join(10)
    said = lines[0]["event"]
    assert said.startswith("waiting for room in the queue to the broker")
    assert "1 records" in said


def test_an_oversized_member_gives_up_its_group_before_anything_is_sent(
    broker: HeldProducer, make: Callable[..., Publisher], metrics: ProducerMetrics
) -> None:
    group = group_of(3, members=[{}, {}, {"completion_ids": np.full(2000, 70000), "spans": ((0, 0),)}])
    publisher = make(record_bytes=size_of(group[:1]) + 10)
    assert not publisher.publish(group)
    assert not broker.pending
    assert publisher.failed == 3 == value_of(metrics, "echo_produce_records_failed_total")
    assert publisher.publish(group_of(1, number=1)), "others go on"


def test_an_unsound_member_gives_up_its_group(broker: HeldProducer, make: Callable[..., Publisher]) -> None:
    group = group_of(2, members=[{}, {"logprobs": np.array([-1, np.nan, -1, -1], np.float32)}])
    assert not make().publish(group)
    assert not broker.pending


def test_the_largest_record_that_passes_is_counted_with_its_headers(make: Callable[..., Publisher]) -> None:
    group = group_of(1)
    assert make(record_bytes=size_of(group)).publish(group)
    assert not make(record_bytes=size_of(group) - 1).publish(group)


def test_a_refused_record_ends_the_producer(
    broker: HeldProducer, make: Callable[..., Publisher], metrics: ProducerMetrics
) -> None:
    publisher = make()
    publisher.publish(group_of(2))
    broker.answer(1)
    broker.answer(1, error="MSG_SIZE_TOO_LARGE: too large")
    with pytest.raises(BrokerError, match=r"topic trajectories.*MSG_SIZE_TOO_LARGE"):
        publisher.flush(10)
    with pytest.raises(BrokerError, match="MSG_SIZE_TOO_LARGE"):
        publisher.check()
    with pytest.raises(BrokerError, match="MSG_SIZE_TOO_LARGE"):
        publisher.publish(group_of(1, number=1))
    assert (publisher.acknowledged, publisher.failed, publisher.groups_acknowledged) == (1, 1, 0)
    assert value_of(metrics, "echo_produce_records_failed_total") == 1


def test_a_dead_client_ends_a_wait(broker: HeldProducer, make: Callable[..., Publisher]) -> None:
    publisher = make()
    publisher.publish(group_of(1))
    broker.die("producer can't go on: _FATAL")
    with pytest.raises(BrokerError, match="_FATAL"):
        publisher.flush(10)


def test_a_record_that_the_client_does_not_take_is_not_waited_for(broker: HeldProducer, make: Callable[..., Publisher]) -> None:
    """`publish` raises, and nothing is counted as under way: no acknowledgement will come."""
    broker.refuses = "sending to trajectories: UNKNOWN_TOPIC_OR_PART"
    publisher = make()
    with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PART"):
        publisher.publish(group_of(1))
    assert (publisher.queued_records, publisher.queued_bytes) == (0, 0)
    publisher.flush(0)


def test_a_record_that_the_client_had_no_room_for_until_the_stop_is_not_waited_for(
    broker: HeldProducer, make: Callable[..., Publisher]
) -> None:
    broker.full = True
    publisher = make(flush_timeout_s=0.0, stopping=lambda: True)
    with pytest.raises(BrokerError, match="stopped while the queue is full"):
        publisher.publish(group_of(1))
    publisher.flush(0)


def test_the_wait_for_the_last_acknowledgements_says_so(broker: HeldProducer, make: Callable[..., Publisher]) -> None:
    publisher = make(waiting_s=0.05)
    publisher.publish(group_of(1))
    with capture_logs() as lines, pytest.raises(BrokerError):
        publisher.flush(0.5)
    said = lines[0]["event"]
    assert said.startswith("waiting for the last acknowledgements")
    assert "1 records" in said


def test_a_flush_that_is_late_says_how_much_is_missing(broker: HeldProducer, make: Callable[..., Publisher]) -> None:
    publisher = make()
    publisher.publish(group_of(3))
    broker.answer()
    with pytest.raises(BrokerError, match=r"2 records are not acknowledged after 0\.3 s"):
        publisher.flush(0.3)


def test_after_a_stop_a_full_queue_is_not_waited_for_without_end(broker: HeldProducer, make: Callable[..., Publisher]) -> None:
    stop = threading.Event()
    publisher = make(queue_bytes=1, flush_timeout_s=0.1, stopping=stop.is_set)
    publisher.publish(group_of(1))
    stop.set()
    with pytest.raises(BrokerError, match="stopped while the queue is full"):
        publisher.publish(group_of(1, number=1))


def test_the_oldest_record_has_an_age(broker: HeldProducer, make: Callable[..., Publisher], metrics: ProducerMetrics) -> None:
    now = [100.0]
    publisher = make(clock=lambda: now[0])
    assert publisher.oldest_unacknowledged_s() == 0
    publisher.publish(group_of(1))
    now[0] = 107.0
    publisher.publish(group_of(1, number=1))
    assert value_of(metrics, "echo_produce_oldest_unacknowledged_seconds") == 7
    broker.answer()
    with pytest.raises(BrokerError):
        publisher.flush(0)
