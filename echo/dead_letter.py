"""How a record that can't be used is kept: its original bytes, with the reason beside them. Pure.

Refuses to interpret the record: key and value go through untouched, whatever they hold.

A dead letter's value and key are the original ones, and its headers are the original headers, in order, followed by

    echo.reason   a short name, as in the metrics
    echo.detail   one line for people
    echo.origin   where the record stood: "topic[partition]@offset"
    echo.null     only if the original had no key or no value (they become empty bytes): "key", "value" or "key,value"
    echo.offsets  only for offsets that can't be read, which have neither: how many they are, from `echo.origin` on
    echo.cut      only if the original is too large to be kept whole, or its headers can't be read: JSON that says of each part
                  that is not whole ("value", "headers", "key") its "bytes", its "blake3", and how many first bytes are "kept"

Of a value or a key that is too large, the first bytes are kept. Headers that are too large are left out, and `echo.cut` has
names and sizes of the first: {"headers": {"number": 7, "bytes": 20000000, "blake3": "...", "first": [["run", 9], ...]}}.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from blake3 import blake3

from echo.errors import RecordError
from echo.log import LogRecord

_REASON, _DETAIL, _ORIGIN, _NULL = "echo.reason", "echo.detail", "echo.origin", "echo.null"
_OFFSETS, _CUT = "echo.offsets", "echo.cut"
_MAX_REASON_BYTES = 64
_MAX_DETAIL_BYTES = 1024
_MAX_NAME_CHARS = 40
# Of a key or a value that is cut, at most so much is kept.
_KEPT_BYTES = 65536
# What a header takes beside its name and value, at most.
_HEADER_BYTES = 10

OVERHEAD_BYTES = 4096
"""A dead letter is never larger than its original by more than this; its topic and producer must take that much more."""

_Header = tuple[str, bytes | None]


class DeadLetter(NamedTuple):
    """What a dead letter keeps. `origin` is "topic[partition]@offset"; key, headers and value are the original ones.

    offsets: how many it stands for, more than 1 only if they could not be read. cut: what `echo.cut` says of parts that are not
    whole; empty if all are.
    """

    reason: str
    detail: str
    origin: str
    key: bytes | None
    headers: list[_Header]
    value: bytes | None
    offsets: int = 1
    cut: dict[str, Any] = {}  # noqa: RUF012

    def origins(self) -> Iterator[str]:
        """Where each of its offsets stood."""
        place, _, offset = self.origin.rpartition("@")
        if self.offsets == 1 or not offset.isdecimal():
            yield self.origin
        else:
            yield from (f"{place}@{number}" for number in range(int(offset), int(offset) + self.offsets))


def wrap(record: LogRecord, reason: str, detail: str, *, max_bytes: int | None = None) -> tuple[bytes, list[_Header], bytes]:
    """The key, headers and value of the dead letter for `record`. A long detail is cut.

    max_bytes: if key, headers and value would take more, the value is cut; if that is not enough, the headers, then the key.
    """
    key, value = record.key or b"", record.value or b""
    headers, problem = record.known_headers()
    ours: list[_Header] = [
        (_REASON, _cut(reason, _MAX_REASON_BYTES)),
        (_DETAIL, _cut(detail, _MAX_DETAIL_BYTES)),
        (_ORIGIN, record.where.encode()),
    ]
    absent = [name for name, part in (("key", record.key), ("value", record.value)) if part is None]
    if absent:
        ours.append((_NULL, ",".join(absent).encode()))
    if record.unreadable:
        ours.append((_OFFSETS, b"%d" % record.span))
    cut: dict[str, Any] = {"headers": {"problem": problem}} if problem else {}
    if max_bytes is not None:
        kept = min(_KEPT_BYTES, max_bytes // 8)
        limit = max_bytes - OVERHEAD_BYTES * 3 // 4 if max_bytes > 2 * OVERHEAD_BYTES else max_bytes * 3 // 4
        if len(key) + len(value) + _nbytes(headers) > limit and len(value) > kept:
            cut["value"], value = _described(value, kept), value[:kept]
        if len(key) + len(value) + _nbytes(headers) > limit and headers:
            cut["headers"], headers = _described_headers(headers, kept), []
        if len(key) + len(value) > limit and len(key) > kept:
            cut["key"], key = _described(key, kept), key[:kept]
    if cut:
        ours.append((_CUT, json.dumps(cut).encode()))
    return key, [*headers, *ours], value


def unwrap(record: LogRecord) -> DeadLetter:
    """Read a record of the dead-letter topic. Raises RecordError naming where it stands, if it is not a dead letter."""
    known, problem = record.known_headers()
    names = [name for name, _ in known]
    # Ours come last: a dead letter that became a record again may carry older ones before them.
    start = len(names) - 1 - names[::-1].index(_REASON) if _REASON in names else len(names)
    ours = {name: (value or b"").decode(errors="backslashreplace") for name, value in known[start:]}
    if not {_REASON, _DETAIL, _ORIGIN} <= ours.keys():
        lacking = problem or f"it lacks the headers {_REASON}, {_DETAIL} and {_ORIGIN}"
        raise RecordError(f"{record.where}: not a dead letter: {lacking}")
    absent = ours.get(_NULL, "").split(",")
    offsets = ours.get(_OFFSETS, "1")
    return DeadLetter(
        reason=ours[_REASON],
        detail=ours[_DETAIL],
        origin=ours[_ORIGIN],
        key=None if "key" in absent else record.key,
        headers=list(known[:start]),
        value=None if "value" in absent else record.value,
        offsets=int(offsets) if offsets.isdecimal() and len(offsets) < 20 else 1,
        cut=_parsed(ours.get(_CUT)),
    )


def _nbytes(headers: list[_Header]) -> int:
    return sum(len(name.encode()) + len(value or b"") + _HEADER_BYTES for name, value in headers)


def _described(raw: bytes, kept: int) -> dict[str, Any]:
    return {"bytes": len(raw), "blake3": blake3(raw).hexdigest(), "kept": kept}


def _described_headers(headers: list[_Header], kept: int) -> dict[str, Any]:
    digest = blake3()
    for name, value in headers:
        digest.update(name.encode())
        digest.update(value or b"")
    first: list[list[Any]] = []
    room = min(kept, OVERHEAD_BYTES // 4)
    for name, value in headers:
        shown = [name[:_MAX_NAME_CHARS], len(value or b"")]
        room -= len(json.dumps(shown)) + 2
        if room < 0:
            break
        first.append(shown)
    return {"number": len(headers), "bytes": _nbytes(headers), "blake3": digest.hexdigest(), "first": first}


def _parsed(cut: str | None) -> dict[str, Any]:
    """Others may write into the topic, too: what is no object says nothing."""
    try:
        found = json.loads(cut or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _cut(text: str, limit: int) -> bytes:
    raw = text.encode(errors="backslashreplace")
    return raw if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore").encode() + b"..."
