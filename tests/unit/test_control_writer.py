"""What the trainer tells is seen, also where Kafka dies between a commit and the marker that shows it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from consumers.fleet import Fleet
from consumers.fleet_listener import FleetListener
from consumers.policy import ControlWriter, PolicyPublisher, read_told
from echo import control
from echo.control import Announcement, ControlMessage, EndOfRun, Grant
from echo.weights.manifest import HostTensor
from echo.weights.store import WeightStore
from tests.eventually import eventually
from tests.fakes.log import FakeLog, FakeReader, FakeTransactions

RUN = "run"


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
    publisher.publish(step=0, tensors=[tensor], grants=listener.take_grants)
    assert seen() == []
    listener.start()
    try:
        now[0] = 5.0
        eventually(lambda: any(isinstance(message, Announcement) for message in seen()), "the announcement is seen")
    finally:
        listener.close()
