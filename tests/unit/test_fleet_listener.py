"""The thread that hears heartbeats: a message that can't be meant does not end it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from structlog.testing import capture_logs

from consumers.fleet import Fleet
from consumers.fleet_listener import FleetListener
from echo import control
from tests.eventually import eventually
from tests.fakes.log import FakeLog, FakeReader
from tests.unit.test_fleet import beat

TOPIC = "heartbeats"


@contextmanager
def listening(log: FakeLog, clock: Callable[[], float]) -> Iterator[FleetListener]:
    """A listener that has read to the end, so that it hears what comes from now on."""
    log.create_topic(TOPIC)
    listener = FleetListener(
        fleet=Fleet(run_id="r", total_window=4, dead_after_s=30, clock=clock),
        reader=FakeReader(log),
        topic=TOPIC,
        send_progress=lambda grants: None,
    )
    listener.start()
    try:
        eventually(lambda: listener._current, "the end of the heartbeats")
        yield listener
    finally:
        listener.close()


def tell(log: FakeLog, value: bytes) -> None:
    with log.changed:
        log.append(TOPIC, b"p", value, ())


def test_a_heartbeat_with_an_absurd_number_is_skipped_and_the_next_is_heard() -> None:
    log = FakeLog()
    with capture_logs() as said, listening(log, lambda: 0.0) as listener:
        tell(log, control.encode(beat("a.1", 0)))
        absurd = control.encode(beat("a.1", 1, published=1)).replace(
            b'"groups_published":1', f'"groups_published":{10**400}'.encode()
        )
        tell(log, absurd)
        tell(log, control.encode(beat("b.1", 0)))
        eventually(lambda: [one.incarnation for one in listener.alive()] == ["a.1", "b.1"], "both producers are alive")
        listener.check()
    assert [entry["event"] for entry in said] == ["heartbeat skipped"]
