"""How a record that can't be used is kept: its original bytes, with the reason beside them. Pure.

Refuses to interpret the record: key and value go through untouched, whatever they hold.

A dead letter's value and key are the original ones, and its headers are the original headers, in order, followed by

    echo.reason   a short name, as in the metrics
    echo.detail   one line for people
    echo.origin   where the record stood: "topic[partition]@offset"
    echo.null     only where the original had no key or no value (they become empty bytes): "key", "value" or "key,value"
"""

from typing import NamedTuple

from echo.errors import RecordError
from echo.log import LogRecord

_REASON, _DETAIL, _ORIGIN, _NULL = "echo.reason", "echo.detail", "echo.origin", "echo.null"
_MAX_REASON_BYTES = 64
_MAX_DETAIL_BYTES = 1024

OVERHEAD_BYTES = 4096
"""A dead letter is never larger than its original by more than this; its topic and producer must take that much more."""


class DeadLetter(NamedTuple):
    """What a dead letter keeps. `origin` is "topic[partition]@offset"; key, headers and value are the original ones."""

    reason: str
    detail: str
    origin: str
    key: bytes | None
    headers: list[tuple[str, bytes | None]]
    value: bytes | None


def wrap(record: LogRecord, reason: str, detail: str) -> tuple[bytes, list[tuple[str, bytes | None]], bytes]:
    """The key, headers and value of the dead letter for `record`. A long detail is cut."""
    headers = [
        *record.headers,
        (_REASON, _cut(reason, _MAX_REASON_BYTES)),
        (_DETAIL, _cut(detail, _MAX_DETAIL_BYTES)),
        (_ORIGIN, record.where.encode()),
    ]
    absent = [name for name, part in (("key", record.key), ("value", record.value)) if part is None]
    if absent:
        headers.append((_NULL, ",".join(absent).encode()))
    return record.key or b"", headers, record.value or b""


def unwrap(record: LogRecord) -> DeadLetter:
    """Read a record of the dead-letter topic. Raises RecordError naming where it stands, if it is not a dead letter."""
    names = [name for name, _ in record.headers]
    # Ours come last: a dead letter that became a record again may carry older ones before them.
    start = len(names) - 1 - names[::-1].index(_REASON) if _REASON in names else len(names)
    ours = {name: (value or b"").decode(errors="backslashreplace") for name, value in record.headers[start:]}
    if not {_REASON, _DETAIL, _ORIGIN} <= ours.keys():
        raise RecordError(f"{record.where}: not a dead letter: it lacks the headers {_REASON}, {_DETAIL} and {_ORIGIN}")
    absent = ours.get(_NULL, "").split(",")
    return DeadLetter(
        reason=ours[_REASON],
        detail=ours[_DETAIL],
        origin=ours[_ORIGIN],
        key=None if "key" in absent else record.key,
        headers=list(record.headers[:start]),
        value=None if "value" in absent else record.value,
    )


def _cut(text: str, limit: int) -> bytes:
    raw = text.encode(errors="backslashreplace")
    return raw if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore").encode() + b"..."
