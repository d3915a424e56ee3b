"""The messages between the two sides beside trajectories: announcements, progress, end of run, requests, heartbeats.

Refuses to send or receive. JSON on the wire (low rate, readable in any Kafka tool), tagged by "type", unknown fields
ignored. Key: "<run>/<type>" on the control topic, so that compaction keeps each run's newest of each type; "<run>/<producer>"
on heartbeats, the producer's incarnation on requests.
"""

from typing import Annotated, TypeAlias

import msgspec

from echo.errors import ControlError

# Bounds of what is decoded: a number that no process can mean makes the message unreadable, not the arithmetic of who hears it.
# Whole numbers stay exact as floats.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Version = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
_Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer tells one producer incarnation about admission.

    window: groups that it may have outstanding. resolved: its groups resolved so far (trained, dropped or dead-lettered).
    """

    window: _Count
    resolved: _Count


class Announcement(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="announcement"):
    """A policy is durable and servable. `grants` is keyed by producer incarnation; `nbytes` is the size of its tensors.

    sequence: counts the run's control messages, also over restarts of the trainer. step: learner steps behind this version.
    created: seconds since the epoch. agreement: what both sides must have alike (`echo.agreement`); empty from older senders.
    """

    run_id: str
    sequence: _Count
    version: _Version
    step: _Count
    manifest_urls: tuple[str, ...]
    manifest_digest: str
    nbytes: _Count
    grants: dict[str, Grant] = {}
    created: _Seconds
    agreement: dict[str, str] = {}


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="progress"):
    """Grants between announcements: a producer joined or died, or groups were resolved without a new version.

    agreement: as in `Announcement`.
    """

    run_id: str
    sequence: _Count
    version: _Version
    step: _Count
    grants: dict[str, Grant]
    created: _Seconds
    agreement: dict[str, str] = {}


class EndOfRun(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="end_of_run"):
    """The run is over: producers finish, flush and exit 0. `reason` is for people."""

    run_id: str
    sequence: _Count
    version: _Version
    step: _Count
    reason: str
    created: _Seconds


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="request"):
    """Sequential mode: sample these groups in one engine call, with exactly this policy version.

    producer: the incarnation that is asked. step: learner steps done before the one that the groups are for.
    first_prompt: index of the first group's prompt in the run's stream (`echo.sequential`); the others take those after it.
    seed: of the whole call. issue: counts the times that these groups were asked for, from 0; whoever is asked, the answer
    is the same, so that of two answers either may be taken.
    """

    run_id: str
    request_id: str
    producer: str
    version: _Version
    step: _Count
    first_prompt: _Count
    group_ids: tuple[str, ...]
    seed: _Seed
    issue: _Count
    created: _Seconds


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="heartbeat"):
    """A producer's status, every few seconds and at each change of version.

    serving: the version its engine really samples from, -1 before the first. announced: the newest it has heard of.
    groups_started, groups_published, trajectories, tokens: totals of this incarnation. state: what it does right now.
    busy_seconds: time spent sampling, scoring and publishing, waits left out; with it throughput is what a producer can do, not
    what its window let it do.
    control_sequence, granted_limit: the control message whose grant is in force (-1 before the first), and what it comes to:
    the incarnation may begin groups until `groups_started` reaches this limit. The trainer gives the room of one
    producer to another only when it knows from here that the first will not use it.
    last_pull_error: why the newest version is not served yet; "" when all is well. metrics_url: where Prometheus finds it.
    requests_held: sequential mode's requests that it has and has not answered. given_up: why it gave requests up, by their ids:
    those of the newest version alone; the same groups may be asked for again.
    agreement: as in `Announcement`.
    """

    run_id: str
    producer_id: str
    incarnation: str
    sequence: _Count
    state: str
    serving: _Version
    announced: _Version
    control_sequence: _Version
    granted_limit: _Count
    groups_started: _Count
    groups_published: _Count
    trajectories: _Count
    tokens: _Count
    busy_seconds: _Seconds
    pulls: _Count
    failed_pulls: _Count
    last_pull_error: str = ""
    queued_bytes: _Count = 0
    requests_held: _Count = 0
    given_up: dict[str, str] = {}
    leaving: bool = False
    metrics_url: str = ""
    created: _Seconds
    agreement: dict[str, str] = {}


ControlMessage: TypeAlias = Announcement | Progress | EndOfRun

_encoder = msgspec.json.Encoder()
_control = msgspec.json.Decoder(ControlMessage)
_request = msgspec.json.Decoder(Request)
_heartbeat = msgspec.json.Decoder(Heartbeat)


def encode(message: ControlMessage | Request | Heartbeat) -> bytes:
    return _encoder.encode(message)


def key(message: ControlMessage | Request | Heartbeat) -> bytes:
    """The Kafka key that makes compaction keep what a late joiner needs."""
    if isinstance(message, Heartbeat):
        return f"{message.run_id}/{message.producer_id}".encode()
    if isinstance(message, Request):
        # All that a producer is asked stands in one partition, in order.
        return message.producer.encode()
    return f"{message.run_id}/{type(message).__struct_config__.tag}".encode()


def decode_control(value: bytes | None, where: str) -> ControlMessage:
    """Read a control message. Raises ControlError naming `where` it stood (topic, partition, offset)."""
    message: ControlMessage = _decode(_control, value, where)
    return message


def decode_request(value: bytes | None, where: str) -> Request:
    """Read a request. Raises ControlError naming `where` it stood."""
    message: Request = _decode(_request, value, where)
    return message


def decode_heartbeat(value: bytes | None, where: str) -> Heartbeat:
    """Read a heartbeat. Raises ControlError naming `where` it stood."""
    message: Heartbeat = _decode(_heartbeat, value, where)
    return message


def _decode(decoder, value: bytes | None, where: str):  # type: ignore[no-untyped-def]
    try:
        return decoder.decode(value or b"")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(f"{where}: not a message of this schema ({error}); it is skipped") from None
