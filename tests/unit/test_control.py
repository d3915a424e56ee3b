"""Control messages survive the wire; what is none is refused with the place named."""

import pytest

from echo import control
from echo.control import Announcement, EndOfRun, Grant, Heartbeat, Progress, Request
from echo.errors import ControlError

ANNOUNCEMENT = Announcement(
    run_id="r",
    sequence=0,
    version=3,
    step=6,
    manifest_urls=("http://127.0.0.1:1/m",),
    manifest_digest="ab",
    nbytes=5,
    grants={"p.1": Grant(window=4, resolved=7)},
    created=1.0,
)
HEARTBEAT = Heartbeat(
    run_id="r",
    producer_id="p",
    incarnation="p.1",
    sequence=0,
    state="sampling",
    serving=2,
    announced=3,
    control_sequence=0,
    granted_limit=9,
    groups_started=1,
    groups_published=1,
    trajectories=8,
    tokens=99,
    busy_seconds=1.0,
    pulls=1,
    failed_pulls=0,
    created=1.0,
)
REQUEST = Request(
    run_id="r",
    request_id="r/v1/c0/0",
    producer="p.1",
    version=1,
    step=1,
    first_prompt=8,
    group_ids=("g",),
    seed=3,
    issue=0,
    created=2.0,
)


@pytest.mark.parametrize(
    "message",
    [
        ANNOUNCEMENT,
        Progress(run_id="r", sequence=0, version=3, step=6, grants={}, created=1.0),
        EndOfRun(run_id="r", sequence=0, version=3, step=6, reason="done", created=1.0),
    ],
)
def test_control_messages_round_trip(message: control.ControlMessage) -> None:
    assert control.decode_control(control.encode(message), "control[0]@1") == message
    assert control.key(message).decode().startswith("r/")


def test_heartbeats_and_requests_round_trip() -> None:
    assert control.decode_heartbeat(control.encode(HEARTBEAT), "x") == HEARTBEAT
    assert control.decode_request(control.encode(REQUEST), "x") == REQUEST
    assert control.key(REQUEST) == b"p.1"


def test_compaction_keeps_the_newest_of_each_type_per_run() -> None:
    end = EndOfRun(run_id="r", sequence=0, version=3, step=6, reason="done", created=1.0)
    progress = Progress(run_id="r", sequence=0, version=3, step=6, grants={}, created=1.0)
    assert len({control.key(message) for message in (ANNOUNCEMENT, end, progress)}) == 3


def test_unknown_fields_are_ignored() -> None:
    raw = control.encode(ANNOUNCEMENT).replace(b'"version":3', b'"version":3,"invented":[1]')
    assert control.decode_control(raw, "x") == ANNOUNCEMENT


@pytest.mark.parametrize(
    ("field", "number"),
    [(b'"groups_published":1', 10**400), (b'"groups_started":1', -1), (b'"busy_seconds":1.0', 1e308), (b'"serving":2', -2)],
    ids=["huge", "negative", "endless", "no version"],
)
def test_a_number_that_no_producer_can_mean_makes_a_heartbeat_unreadable(field: bytes, number: float) -> None:
    """Who hears it reckons with it: one message may not end the trainer."""
    raw = control.encode(HEARTBEAT)
    wrong = raw.replace(field, field.partition(b":")[0] + f":{number}".encode())
    assert wrong != raw
    with pytest.raises(ControlError, match=r"heartbeats\[0\]@7"):
        control.decode_heartbeat(wrong, "heartbeats[0]@7")


@pytest.mark.parametrize("raw", [None, b"", b"{}", b"\xff", b'{"type":"party"}', b'{"type":"announcement"}', b"[" * 9999])
def test_what_is_no_message_names_where_it_stood(raw: bytes | None) -> None:
    with pytest.raises(ControlError, match=r"control\[0\]@7"):
        control.decode_control(raw, "control[0]@7")
