"""A batch from rank 0 to the others: records as they are on the wire, and the newest announced version. Pure; no pickle."""

from collections.abc import Sequence

import msgspec

from consumers.groups import Group, Member
from echo import codec


class _Handover(msgspec.Struct, frozen=True, array_like=True):
    """groups: id, then (partition, offset, record value) per member."""

    newest_version: int
    groups: list[tuple[str, list[tuple[int, int, bytes]]]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Handover)


def pack(groups: Sequence[Group], newest_version: int) -> bytes:
    return _encoder.encode(
        _Handover(
            newest_version,
            [
                (group.group_id, [(m.partition, m.offset, codec.encode(m.trajectory).value) for m in group.members])
                for group in groups
            ],
        )
    )


def unpack(data: bytes) -> tuple[list[Group], int]:
    """What `pack` was given, to the bit."""
    found = _decoder.decode(data)
    return [
        Group(name, tuple(Member(partition, offset, codec.decode(value)) for partition, offset, value in members))
        for name, members in found.groups
    ], found.newest_version
