"""Heartbeats: at once, regularly, soon after a change and never in a flood, with a last one that says goodbye."""

import time
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from echo import control
from echo.control import Heartbeat
from producers.heartbeat import HeartbeatSender
from tests.eventually import eventually
from tests.fakes.log import FakeLog, FakeProducer


def status(sequence: int, leaving: bool) -> Heartbeat:
    return Heartbeat(
        run_id="run",
        producer_id="p0",
        incarnation="p0-1",
        sequence=sequence,
        state="testing",
        serving=3,
        announced=3,
        control_sequence=0,
        granted_limit=9,
        groups_started=0,
        groups_published=0,
        trajectories=0,
        tokens=0,
        busy_seconds=1.0,
        pulls=0,
        failed_pulls=0,
        leaving=leaving,
        created=time.time(),
    )


class Bench:
    def __init__(self, every_s: float, queue_bytes: int = 2**20) -> None:
        self.log = FakeLog()
        self.log.create_topic("heartbeats")
        self.producer = FakeProducer(self.log, queue_bytes=queue_bytes)
        self.sender = HeartbeatSender(self.producer, "heartbeats", status, every_s=every_s)

    def sent(self) -> list[Heartbeat]:
        self.producer.flush(0)
        return [control.decode_heartbeat(record.value, record.where) for record in self.log.records("heartbeats")]

    def wait_for(self, count: int) -> list[Heartbeat]:
        return eventually(lambda: found if len(found := self.sent()) >= count else [], f"{count} heartbeats")


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(every_s: float, **options: int) -> Bench:
        made.append(Bench(every_s, **options))
        made[-1].sender.start()
        return made[-1]

    yield build
    for bench in made:
        bench.sender.close()


def test_the_first_is_sent_at_once_and_the_next_after_the_period(make: Callable[..., Bench]) -> None:
    began = time.monotonic()
    bench = make(0.1)
    bench.wait_for(1)
    found = bench.wait_for(4)
    assert time.monotonic() - began >= 0.3
    assert [one.sequence for one in found[:4]] == [0, 1, 2, 3]
    assert bench.log.records("heartbeats")[0].key == b"run/p0"


def test_an_urgent_change_does_not_wait(make: Callable[..., Bench]) -> None:
    bench = make(3600)
    bench.wait_for(1)
    for count in (2, 3):
        bench.sender.changed(now=True)
        bench.wait_for(count)


def test_many_changes_are_told_once(make: Callable[..., Bench]) -> None:
    bench = make(3600)
    bench.wait_for(1)
    for _ in range(1000):
        bench.sender.changed()
    bench.wait_for(2)
    bench.sender.close()
    assert [one.leaving for one in bench.sent()] == [False, False, True]


def test_a_full_queue_costs_a_heartbeat_and_nothing_else(make: Callable[..., Bench]) -> None:
    with capture_logs() as lines:
        bench = make(3600, queue_bytes=1)
        bench.sender.close()
    assert bench.sent() == []
    assert {line["event"] for line in lines} == {"heartbeat not sent: the queue to the broker is full"}
