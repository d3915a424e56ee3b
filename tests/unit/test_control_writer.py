"""What the trainer tells is seen, also where Kafka dies between a commit and the marker that shows it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from consumers.fleet import Fleet
from consumers.fleet_listener import FleetListener
from consumers.policy import ControlWriter, PolicyPublisher, read_told
from echo import control
from echo.control import Announcement, ControlMessage, EndOfRun, Grant, Progress, Request
from echo.errors import BrokerError, EchoError, FencedError
from echo.weights.manifest import HostTensor
from echo.weights.store import WeightStore
from tests.eventually import eventually
from tests.fakes.log import FakeLog, FakeReader, FakeTransactions

RUN = "run"


class Away:
    """A broker that is away for so many sends; the last of them was committed all the same, and not confirmed."""

    def __init__(self, log: FakeLog, sends: int) -> None:
        self._real = FakeTransactions(log, transactional_id=RUN)
        self.left = sends

    def send(self, topic: str, messages: Sequence[tuple[bytes, bytes]]) -> None:
        if self.left > 1:
            self.left -= 1
            raise BrokerError("committing: _TIMED_OUT", retriable=True)
        self._real.send(topic, messages)
        if self.left == 1:
            self.left = 0
            raise BrokerError("committing: _TIMED_OUT", retriable=True)

    def close(self) -> None: ...


class ShownByTheNext:
    """A transactional producer as Kafka's is at its worst: what was committed is seen once the next transaction begins.

    A single node of Kafka 4.3 that was killed right after a commit showed it in one of five trials only then, however long
    readers waited.
    """

    def __init__(self, log: FakeLog) -> None:
        self._real = FakeTransactions(log, transactional_id=RUN)
        self._held: tuple[str, Sequence[tuple[bytes, bytes]]] | None = None

    def send(self, topic: str, messages: Sequence[tuple[bytes, bytes]]) -> None:
        if self._held is not None:
            self._real.send(*self._held)
        self._held = (topic, messages)

    def close(self) -> None: ...


def make(folder: Path) -> tuple[PolicyPublisher, Callable[[], list[ControlMessage]], FakeLog]:
    log = FakeLog()
    log.create_topic("control")
    log.create_topic("heartbeats")
    publisher = PolicyPublisher(
        run_id=RUN,
        store=WeightStore(folder),
        writer=ControlWriter(ShownByTheNext(log), "control"),
        server_url="http://127.0.0.1:1",
        chunk_bytes=4096,
        keep=2,
        newest=-1,
    )
    return publisher, lambda: [control.decode_control(one.value, one.where) for one in log.records("control")], log


def progress(sequence: int) -> Progress:
    return Progress(
        run_id=RUN, sequence=sequence, version=0, step=0, grants={"p.1": Grant(window=sequence, resolved=0)}, created=1.0
    )


def test_a_broker_that_is_away_for_a_while_is_waited_for_aloud_and_nothing_is_lost_or_out_of_order() -> None:
    """What was committed without a word of it stands there twice, in a row; a producer takes it as once."""
    log = FakeLog()
    log.create_topic("control")
    writer = ControlWriter(Away(log, 3), "control", waiting_s=0.0, pause_s=0.0)
    with capture_logs() as said:
        for _ in range(2):
            writer.send(progress)
    messages = [control.decode_control(one.value, one.where) for one in log.records("control")]
    assert [message.sequence for message in messages] == [0, 0, 1]
    first, *_ = [entry["event"] for entry in said]
    assert first.startswith("waiting for the broker to take messages for topic control")
    assert "_TIMED_OUT" in first


def test_requests_are_sent_again_too() -> None:
    log = FakeLog()
    log.create_topic("requests")
    request = Request(
        run_id=RUN,
        request_id="r",
        producer="p.1",
        version=0,
        step=0,
        first_prompt=0,
        group_ids=("g",),
        seed=1,
        issue=0,
        created=1.0,
    )
    ControlWriter(Away(log, 2), "control", pause_s=0.0).ask("requests", [request])
    assert {record.value for record in log.records("requests")} == {control.encode(request)}


def test_a_broker_that_stays_away_ends_the_wait_at_its_deadline() -> None:
    with pytest.raises(BrokerError, match="_TIMED_OUT"):
        ControlWriter(Away(FakeLog(), 10**9), "control", deadline_s=0.05, pause_s=0.0).send(progress)


def test_who_was_fenced_does_not_try_again() -> None:
    log = FakeLog()
    log.create_topic("control")
    writer = ControlWriter(FakeTransactions(log, transactional_id=RUN), "control", pause_s=1000.0)
    FakeTransactions(log, transactional_id=RUN)
    with pytest.raises(FencedError):
        writer.send(progress)


def test_closing_ends_a_wait_for_the_broker() -> None:
    away = Away(FakeLog(), 10**9)
    writer = ControlWriter(away, "control", pause_s=1000.0)
    raised: list[BrokerError] = []

    def send() -> None:
        try:
            writer.send(progress)
        except BrokerError as error:
            raised.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    eventually(lambda: away.left < 10**9, "the first try")
    writer.close()
    thread.join(10)
    assert len(raised) == 1


def test_reading_what_was_told_says_what_it_waits_for() -> None:
    class NeverAtTheEnd(FakeReader):
        def at_end(self) -> bool:
            return False

    log = FakeLog()
    log.create_topic("control")
    with capture_logs() as said, pytest.raises(EchoError, match="was not read to its end"):
        read_told(NeverAtTheEnd(log), topic="control", run_id=RUN, waiting_s=0.05, deadline_s=0.3)
    assert said[0]["event"].startswith("waiting for the end of the control topic")


def test_the_end_of_a_run_is_seen_although_nothing_comes_after_it(tmp_path: Path) -> None:
    publisher, seen, _ = make(tmp_path)
    publisher.end(step=1, reason="done")
    assert [type(message) for message in seen()] == [EndOfRun]


def test_a_resumed_run_uses_no_number_twice_that_nobody_could_see(tmp_path: Path) -> None:
    """A trainer that was killed with its broker leaves a message that its successor can't read; the successor's shows both."""
    publisher, seen, log = make(tmp_path)
    for step in (1, 2):
        publisher.progress(step=step, grants=lambda sequence: {})
    told = read_told(FakeReader(log), topic="control", run_id=RUN, waiting_s=5.0, deadline_s=5.0)
    writer = publisher._writer
    writer.go_on_after(told.sequence)
    publisher.end(step=2, reason="done")
    numbers = [message.sequence for message in seen()]
    assert len(numbers) == 3
    assert numbers == sorted(set(numbers))


def test_an_announcement_is_seen_although_no_grant_changes_after_it(tmp_path: Path) -> None:
    """Without a live producer grants never change; the listener repeats them all the same, and that shows what came before."""
    publisher, seen, log = make(tmp_path)
    now = [0.0]

    def progress(grants: Callable[[int], Mapping[str, Grant]]) -> None:
        publisher.progress(step=0, grants=grants)

    listener = FleetListener(
        fleet=Fleet(run_id=RUN, total_window=4, dead_after_s=30, clock=lambda: now[0]),
        reader=FakeReader(log),
        topic="heartbeats",
        send_progress=progress,
        clock=lambda: now[0],
    )
    tensor = HostTensor("w", "U8", (4,), memoryview(b"1234"))
    publisher.announce(publisher.store(step=0, tensors=[tensor]), grants=listener.take_grants)
    assert seen() == []
    listener.start()
    try:
        now[0] = 5.0
        eventually(lambda: any(isinstance(message, Announcement) for message in seen()), "the announcement is seen")
    finally:
        listener.close()
