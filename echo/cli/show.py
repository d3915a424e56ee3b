"""Records of Echo's topics made readable: as JSON for tools, as text for people. Pure.

Never fails on a record, whatever it holds: what can't be read is shown as such, with the reason and its first bytes.
Control characters of a record never reach a terminal.
"""

import json
import math
from datetime import UTC, datetime
from typing import Any

import msgspec

from echo import codec, control, dead_letter
from echo.errors import ControlError, RecordError
from echo.log import LogRecord
from echo.trajectory import Trajectory

_HEAD_BYTES = 32


def run_of(role: str, record: LogRecord) -> str | None:
    """The run a record belongs to; None where it does not say so readably."""
    if role in ("trajectories", "dead_letter"):
        run = dict(record.known_headers()[0]).get("run")
        return None if run is None else run.decode(errors="backslashreplace")
    try:
        return _message(role, record).run_id
    except ControlError:
        return None


def to_json(role: str, record: LogRecord, *, full: bool = False) -> dict[str, Any]:
    """A record as plain data.

    {"topic", "partition", "offset", "timestamp_ms", "key", "headers": [[name, value]], "bytes", "record": {...}}; "bytes" is
    the size of the value. Where something is wrong with it there is "problem", and "record" is null if it can't be read. Of
    offsets that no client can read, "offsets" is their number.
    Bytes are shown as text, those that are not UTF-8 as \\xNN. full: also a trajectory's arrays, and whole values in hex.
    """
    seen: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": _text(record.key),
        "headers": [[name, _text(value)] for name, value in record.known_headers()[0]],
        "bytes": len(record.value or b""),
        "record": None,
    }
    if record.unreadable:
        return {**seen, "offsets": record.span, "problem": f"not readable: {record.unreadable}"}
    try:
        if role == "trajectories":
            header = codec.decode_headers(record.headers)
            trajectory = codec.decode(record.value)
            seen["record"] = _trajectory(trajectory, full)
            if codec.header_of(trajectory) != header:
                seen["problem"] = f"headers and value differ: the value is of {codec.header_of(trajectory)}"
        elif role == "dead_letter":
            letter = dead_letter.unwrap(record)
            seen["headers"] = [[name, _text(value)] for name, value in letter.headers]
            seen["record"] = {
                "reason": letter.reason,
                "detail": letter.detail,
                "origin": letter.origin,
                "bytes": len(letter.value or b""),
                **({"offsets": letter.offsets} if letter.offsets > 1 else {}),
                **({"cut": letter.cut} if letter.cut else {}),
                "value": _hex(letter.value, None if full else _HEAD_BYTES),
            }
        else:
            seen["record"] = _finite(msgspec.to_builtins(_message(role, record)))
    except (RecordError, ControlError) as error:
        seen["problem"] = f"not readable: {error}"
        seen["value"] = _hex(record.value, None if full else _HEAD_BYTES)
    return seen


def to_text(seen: dict[str, Any]) -> str:
    """The data of `to_json` for people: where and when it stands, its headers, then what it says, indented."""
    moment = datetime.fromtimestamp(max(0, min(seen["timestamp_ms"], 253402300799000)) / 1000, UTC).isoformat(
        timespec="milliseconds"
    )
    place = f"{seen['topic']}[{seen['partition']}]@{seen['offset']}"
    first = [place, moment, f"key={_word(seen['key'])}", *(f"{_word(name)}={_word(value)}" for name, value in seen["headers"])]
    lines = [" ".join(first)]
    if "problem" in seen:
        lines.append(f"    ! {_printable(seen['problem'])}")
    if "value" in seen:
        lines.append(f"    {seen['bytes']} bytes: {seen['value']}")
    if seen["record"] is not None:
        fields = dict(seen["record"])
        short = {name: value for name, value in fields.items() if not _is_array(value)}
        lines.append("    " + " ".join(f"{name}={_word(value)}" for name, value in short.items()))
        lines.extend(f"    {name} {_word(value)}" for name, value in fields.items() if _is_array(value))
    return "\n".join(lines)


def _is_array(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and not isinstance(value[0], list | str)


def _message(role: str, record: LogRecord) -> control.ControlMessage | control.Request | control.Heartbeat:
    if role == "control":
        return control.decode_control(record.value, record.where)
    if role == "requests":
        return control.decode_request(record.value, record.where)
    return control.decode_heartbeat(record.value, record.where)


def _trajectory(t: Trajectory, full: bool) -> dict[str, Any]:
    trained = int(t.loss_mask.sum())
    summary: dict[str, Any] = {
        "reward": t.reward,
        "reward_components": t.reward_components,
        "finish_reason": t.finish_reason,
        "prompt_tokens": len(t.prompt_ids),
        "completion_tokens": len(t.completion_ids),
        "trained_tokens": trained,
        "spans": [list(span) for span in t.spans],
        "mean_logprob": float(t.logprobs[t.loss_mask].mean(dtype="float64")) if trained else None,
        "seconds": t.finished_at - t.started_at,
        "task": t.task,
        "prompt_id": t.prompt_id,
        "producer_id": t.producer_id,
        "sequence_number": t.sequence_number,
        "engine": t.engine,
        "model": t.model,
        "sampling": msgspec.to_builtins(t.sampling),
    }
    if full:
        for name in ("prompt_ids", "completion_ids", "logprobs", "loss_mask"):
            summary[name] = getattr(t, name).tolist()
    return _finite(summary)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode(errors="backslashreplace")


def _hex(raw: bytes | None, limit: int | None) -> str | None:
    if raw is None:
        return None
    return raw.hex() if limit is None or len(raw) <= limit else raw[:limit].hex() + "..."


def _word(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.3f}"
    if isinstance(value, list | dict):
        return _printable(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    text = _printable(str(value))
    return text if text and " " not in text else f'"{text}"'


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
