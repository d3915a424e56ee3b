"""Bytes <-> record: Kafka key, headers and a MessagePack value. Pure; never unpickles; reads with plain `msgpack`.

Refuses to judge: it says what a record is or why it can't be read, and nothing about runs or staleness.

Key: the group id, so that a group's members share a partition. Headers (ASCII text, readable in any Kafka tool) carry
all that a consumer needs to decide without touching the value:

    schema  run  trajectory  group  group_size  group_index  min_version  max_version  tokens

Value: a MessagePack map of the fields of `Trajectory`. An array is the map {"dtype": "<f4", "data": bytes}: raw,
little-endian, one-dimensional. `loss_mask` is nil where every token counts. Token ids are "<u2" where all are below 2**16 and
"<u4" where one is 2**24 or above; between them, as for most vocabularies, they are split, so that three bytes hold an id and
the high ones, mostly 0, compress well: {"dtype": "<u2", "data": low 16 bits, "high": one byte per id, bits 16 to 23}:

    ids = np.frombuffer(array["data"], "<u2") + 65536 * np.frombuffer(array["high"], "u1").astype("i4")

Compatibility. The schema is MAJOR.MINOR. A minor step may add fields, which older readers ignore and newer readers
default; it never changes or removes one. A major step may do anything, and a reader refuses majors it does not know
with `SchemaError`, from the header alone.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from echo.errors import CorruptRecordError, SchemaError
from echo.trajectory import Sampling, Trajectory, problems

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 0
SCHEMA = f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}"

Headers = list[tuple[str, bytes]]

_SCHEMA_BYTES = SCHEMA.encode()

_U1, _U2, _I4 = np.dtype("u1"), np.dtype("<u2"), np.dtype("<i4")
_TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"<u2": _U2, "<u4": np.dtype("<u4")}
_LOGPROB_DTYPES: dict[str, np.dtype[Any]] = {"<f4": np.dtype("<f4"), "<f2": np.dtype("<f2")}
_MASK_DTYPES: dict[str, np.dtype[Any]] = {"|b1": np.dtype("|b1")}
# What most loss masks are: records share it, read only.
_ALL_TRUE = np.ones(2**16, dtype=np.bool_)
_ALL_TRUE.flags.writeable = False

MAX_NAME_BYTES = 1024
"""Of each of a record's run, trajectory and group ids: readers keep the ids of groups in memory."""

_MAX_TOKEN_ID = 2**31 - 1
_MAX_SCHEMA_CHARS = 20


class EncodedRecord(NamedTuple):
    """What goes to Kafka."""

    key: bytes
    headers: Headers
    value: bytes


class RecordHeader(NamedTuple):
    """What the headers say: enough to decide about a record."""

    run_id: str
    trajectory_id: str
    group_id: str
    group_size: int
    group_index: int
    min_policy_version: int
    max_policy_version: int
    token_count: int


class _Array(msgspec.Struct, omit_defaults=True, gc=False):
    dtype: str
    data: bytes
    high: bytes | None = None


class _Value(msgspec.Struct, kw_only=True, gc=False):
    """The wire form of the value. Field names are the schema: see the compatibility rule above."""

    schema: str
    run_id: str
    trajectory_id: str
    group_id: str
    group_size: int
    group_index: int
    task: str
    prompt_id: str
    prompt_ids: _Array
    completion_ids: _Array
    logprobs: _Array
    loss_mask: _Array | None
    spans: list[tuple[int, int]]
    reward: float
    reward_components: dict[str, float]
    finish_reason: str
    sampling: Sampling
    engine: str
    model: str
    producer_id: str
    sequence_number: int
    started_at: float
    finished_at: float


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Value)


def encode(trajectory: Trajectory) -> EncodedRecord:
    """Encode a sound record.

    Raises CorruptRecordError where the record's own values are wrong (`trajectory.problems`).
    """
    wrong = problems(trajectory)
    if wrong:
        raise CorruptRecordError(f"trajectory {trajectory.trajectory_id!r} can't be encoded: {'; '.join(wrong)}")
    t = trajectory
    run, name, group = t.run_id.encode(), t.trajectory_id.encode(), t.group_id.encode()
    longest = max(len(run), len(name), len(group))
    if longest > MAX_NAME_BYTES:
        raise CorruptRecordError(
            f"an id of trajectory {name[:40]!r}... has {longest} bytes, at most {MAX_NAME_BYTES} are allowed"
        )
    value = _Value(
        schema=SCHEMA,
        run_id=t.run_id,
        trajectory_id=t.trajectory_id,
        group_id=t.group_id,
        group_size=t.group_size,
        group_index=t.group_index,
        task=t.task,
        prompt_id=t.prompt_id,
        prompt_ids=_pack_ids("prompt_ids", t.prompt_ids),
        completion_ids=_pack_ids("completion_ids", t.completion_ids),
        logprobs=_pack_logprobs(t.logprobs),
        loss_mask=_pack_mask(t.loss_mask),
        spans=list(t.spans),
        reward=float(t.reward),
        reward_components=t.reward_components,
        finish_reason=t.finish_reason,
        sampling=t.sampling,
        engine=t.engine,
        model=t.model,
        producer_id=t.producer_id,
        sequence_number=t.sequence_number,
        started_at=t.started_at,
        finished_at=t.finished_at,
    )
    headers: Headers = [
        ("schema", SCHEMA.encode()),
        ("run", run),
        ("trajectory", name),
        ("group", group),
        ("group_size", b"%d" % t.group_size),
        ("group_index", b"%d" % t.group_index),
        ("min_version", b"%d" % t.min_policy_version),
        ("max_version", b"%d" % t.max_policy_version),
        ("tokens", b"%d" % t.token_count),
    ]
    return EncodedRecord(group, headers, _encoder.encode(value))


def decode_headers(headers: Iterable[tuple[str, bytes | None]] | None) -> RecordHeader:
    """Read the headers alone.

    Raises SchemaError for an unknown major version, CorruptRecordError for missing or unreadable headers.
    """
    found = dict(headers or ())
    schema = found.get("schema")
    if schema is None:
        raise CorruptRecordError("header 'schema' is missing: not an Echo trajectory record")
    if schema != _SCHEMA_BYTES:
        check_schema(schema)
    try:
        return RecordHeader(
            _text(found["run"]),
            _text(found["trajectory"]),
            _text(found["group"]),
            _count(found["group_size"]),
            _count(found["group_index"]),
            _count(found["min_version"]),
            _count(found["max_version"]),
            _count(found["tokens"]),
        )
    except KeyError as error:
        raise CorruptRecordError(f"header {error} is missing") from None
    except ValueError as error:
        raise CorruptRecordError(f"a header can't be read: {error}") from None


def check_schema(schema: bytes | str | None) -> None:
    """Raise SchemaError unless this reader knows the schema's major version."""
    text = schema.decode("ascii", "replace") if isinstance(schema, bytes) else str(schema)
    major, _, minor = text.partition(".")
    # isdigit() alone would take digits of other scripts, and more of them than int() reads.
    if not (major.isdigit() and minor.isdigit() and text.isascii() and len(text) <= _MAX_SCHEMA_CHARS):
        raise SchemaError(f"schema {text[:40]!r} is not MAJOR.MINOR")
    if int(major) != SCHEMA_MAJOR:
        raise SchemaError(f"schema {text} has major version {major}, this reader knows {SCHEMA_MAJOR}: upgrade it")


def decode(value: bytes | None) -> Trajectory:
    """Decode a value.

    Raises SchemaError for an unknown major version, CorruptRecordError for bytes or values that are not a sound record.
    The arrays are read-only views of `value`, or widened copies.
    """
    if not value:
        raise CorruptRecordError("the record has no value")
    try:
        wire = _decoder.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        check_schema(_schema_of(value))
        raise CorruptRecordError(f"the value is not a record of schema {SCHEMA}: {error}") from None
    if wire.schema != SCHEMA:
        check_schema(wire.schema)
    prompt_ids, completion_ids = _unpack_both(wire.prompt_ids, wire.completion_ids)
    trajectory = Trajectory(
        run_id=wire.run_id,
        trajectory_id=wire.trajectory_id,
        group_id=wire.group_id,
        group_size=wire.group_size,
        group_index=wire.group_index,
        task=wire.task,
        prompt_id=wire.prompt_id,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=_unpack("logprobs", wire.logprobs, _LOGPROB_DTYPES),
        loss_mask=_unpack_mask(wire.loss_mask, len(completion_ids)),
        spans=tuple(wire.spans),
        reward=wire.reward,
        reward_components=wire.reward_components,
        finish_reason=wire.finish_reason,
        sampling=wire.sampling,
        engine=wire.engine,
        model=wire.model,
        producer_id=wire.producer_id,
        sequence_number=wire.sequence_number,
        started_at=wire.started_at,
        finished_at=wire.finished_at,
    )
    wrong = problems(trajectory)
    if wrong:
        raise CorruptRecordError(f"trajectory {wire.trajectory_id[:200]!r} is unsound: {'; '.join(wrong)}")
    return trajectory


def header_of(trajectory: Trajectory) -> RecordHeader:
    """What the headers of a record must say; a reader compares, so that headers and value can't tell different stories."""
    t = trajectory
    return RecordHeader(
        t.run_id,
        t.trajectory_id,
        t.group_id,
        t.group_size,
        t.group_index,
        t.min_policy_version,
        t.max_policy_version,
        t.token_count,
    )


def _text(raw: bytes | None) -> str:
    if raw is None:
        raise ValueError("null")
    if len(raw) > MAX_NAME_BYTES:
        raise ValueError(f"{raw[:40]!r}... has {len(raw)} bytes, at most {MAX_NAME_BYTES} are allowed")
    return raw.decode()


# Counts repeat from record to record: looking one up costs less than half of reading it. Failures are not kept.
@lru_cache(maxsize=4096)
def _count(raw: bytes | None) -> int:
    # int() alone would take "+1", "1_0" and blanks, and digits without end.
    if raw is None or len(raw) > 19 or not raw.isdigit():
        raise ValueError(f"{raw if raw is None else raw[:40]!r} is not a count")
    return int(raw)


def _pack_ids(name: str, ids: npt.NDArray[np.int32]) -> _Array:
    ids = np.ascontiguousarray(ids, dtype=_I4)
    highest = int(np.maximum.reduce(ids.view("<u4"))) if len(ids) else 0
    if highest > _MAX_TOKEN_ID:
        raise CorruptRecordError(f"{name} holds a negative token id")
    if highest < 2**16:
        return _Array("<u2", ids.astype(_U2).tobytes())
    if highest < 2**24:
        return _Array("<u2", ids.view(_U2)[::2].tobytes(), ids.view(_U1)[2::4].tobytes())
    return _Array("<u4", ids.tobytes())


def _pack_logprobs(logprobs: npt.NDArray[Any]) -> _Array:
    dtype = "<f2" if logprobs.dtype == np.float16 else "<f4"
    return _Array(dtype, logprobs.astype(_LOGPROB_DTYPES[dtype], copy=False).tobytes())


def _pack_mask(mask: npt.NDArray[np.bool_]) -> _Array | None:
    data = mask.astype(np.bool_, copy=False).tobytes()
    return _Array("|b1", data) if b"\0" in data else None


def _unpack(name: str, array: _Array, allowed: dict[str, np.dtype[Any]]) -> npt.NDArray[Any]:
    """The values as they lie in the record. `high` belongs to token ids and is left to `_unpack_ids`."""
    dtype = allowed.get(array.dtype)
    if dtype is None:
        raise CorruptRecordError(f"{name} has dtype {array.dtype[:20]!r}, not one of {', '.join(allowed)}")
    if len(array.data) % dtype.itemsize:
        raise CorruptRecordError(f"{name} has {len(array.data)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(array.data, dtype=dtype)


def _unpack_mask(array: _Array | None, completion: int) -> npt.NDArray[np.bool_]:
    if array is None:
        return _ALL_TRUE[:completion] if completion <= len(_ALL_TRUE) else np.ones(completion, dtype=np.bool_)
    values = _unpack("loss_mask", array, _MASK_DTYPES)
    if array.data.translate(None, b"\0\1"):
        raise CorruptRecordError("loss_mask holds a byte other than 0 and 1")
    return values


def _unpack_both(prompt: _Array, completion: _Array) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Prompt and completion ids. Most records split both: their bytes are joined in one go, which is cheaper than two."""
    if prompt.high is not None and completion.high is not None and prompt.dtype == completion.dtype == "<u2":
        size, whole = len(prompt.high), len(prompt.high) + len(completion.high)
        if len(prompt.data) == 2 * size and len(completion.data) == 2 * (whole - size):
            ids = _join(prompt.data + completion.data, prompt.high + completion.high)
            return ids[:size], ids[size:]
    return _unpack_ids("prompt_ids", prompt), _unpack_ids("completion_ids", completion)


def _unpack_ids(name: str, array: _Array) -> npt.NDArray[np.int32]:
    values = _unpack(name, array, _TOKEN_DTYPES)
    if array.high is None:
        if array.dtype == "<u4" and len(values) and int(np.maximum.reduce(values)) > _MAX_TOKEN_ID:
            raise CorruptRecordError(f"{name} holds a token id above {_MAX_TOKEN_ID}")
        return values.astype(np.int32)
    if array.dtype != "<u2" or len(array.high) != len(values):
        raise CorruptRecordError(f"{name} has {len(array.high)} high bytes for {len(values)} values of dtype {array.dtype}")
    return _join(array.data, array.high)


def _join(low: bytes, high: bytes) -> npt.NDArray[np.int32]:
    """Ids of their low 16 bits and the byte above them."""
    halves = np.empty((len(high), 2), dtype=_U2)
    halves[:, 0] = np.frombuffer(low, dtype=_U2)
    halves[:, 1] = np.frombuffer(high, dtype=_U1)
    return halves.view(_I4).reshape(len(high)).astype(np.int32, copy=False)


class _SchemaOnly(msgspec.Struct):
    schema: str


_schema_decoder = msgspec.msgpack.Decoder(_SchemaOnly)


def _schema_of(value: bytes) -> str:
    """The schema a value claims, so that a future major is told from garbage; our own schema where it claims none."""
    try:
        return _schema_decoder.decode(value).schema
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return SCHEMA
