"""Bytes <-> record: Kafka key, headers and a MessagePack value. Pure; never unpickles; reads with plain `msgpack`.

Refuses to judge: it says what a record is or why it can't be read, and nothing about runs or staleness.

Key: the group id, so that a group's members share a partition, and so that a member whose group is decided is known by
its key alone. Headers (ASCII text, readable in any Kafka tool) carry
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

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from echo.errors import CorruptRecordError, RecordError, SchemaError
from echo.token_arrays import (
    TokenPair,
    WireArray,
    pack_ids,
    pack_logprobs,
    pack_mask,
    unpack_logprobs,
    unpack_mask,
    unpack_pairs,
)
from echo.trajectory import Sampling, Trajectory, field_problems, logprob_problems

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 0
SCHEMA = f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}"

Headers = list[tuple[str, bytes]]

_SCHEMA_BYTES = SCHEMA.encode()

MAX_NAME_BYTES = 1024
"""Of each of a record's run, trajectory and group ids: readers keep the ids of groups in memory."""

_MAX_SCHEMA_CHARS = 20
# Bytes of values that are decoded together: enough to make numpy's cost per call small, little enough to stay in a cache.
_TOGETHER_BYTES = 2**20


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


class Decoded(NamedTuple):
    """A sound record, and the highest of its token ids."""

    trajectory: Trajectory
    highest_id: int


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
    prompt_ids: WireArray
    completion_ids: WireArray
    logprobs: WireArray
    loss_mask: WireArray | None
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

    Raises CorruptRecordError where the record's own values are wrong (`field_problems`, `logprob_problems`).
    """
    return encode_many([trajectory])[0]


def encode_many(trajectories: Sequence[Trajectory]) -> list[EncodedRecord]:
    """Encode sound records, each as `encode` would, at less than their cost one by one: take whole groups.

    Raises CorruptRecordError for the first whose own values are wrong.
    """
    for trajectory in trajectories:
        _check_fields(trajectory)
    for at, wrong in _wrong_logprobs(trajectories).items():
        raise _unencodable(trajectories[at], wrong)
    prompts = [t.prompt_ids for t in trajectories]
    if all(prompt is prompts[0] for prompt in prompts):
        packed_prompts = pack_ids("prompt_ids", prompts[:1]) * len(prompts)
    else:
        packed_prompts = pack_ids("prompt_ids", prompts)
    completions = pack_ids("completion_ids", [t.completion_ids for t in trajectories])
    return [_encode(*parts) for parts in zip(trajectories, packed_prompts, completions, strict=True)]


def _check_fields(trajectory: Trajectory) -> None:
    wrong = field_problems(trajectory)
    if wrong:
        raise _unencodable(trajectory, wrong)
    for name in (trajectory.run_id, trajectory.trajectory_id, trajectory.group_id):
        # No character has more than 4 bytes in UTF-8.
        if len(name) > MAX_NAME_BYTES // 4 and len(name.encode()) > MAX_NAME_BYTES:
            raise CorruptRecordError(
                f"an id of trajectory {trajectory.trajectory_id[:40]!r}... has {len(name.encode())} bytes, at most "
                f"{MAX_NAME_BYTES} are allowed"
            )


def _unencodable(trajectory: Trajectory, wrong: Sequence[str]) -> CorruptRecordError:
    return CorruptRecordError(f"trajectory {trajectory.trajectory_id!r} can't be encoded: {'; '.join(wrong)}")


def _wrong_logprobs(trajectories: Sequence[Trajectory]) -> dict[int, list[str]]:
    """What is wrong with whose logprobs, by index: all together, and one by one only where something is."""
    if not trajectories or not logprob_problems(np.concatenate([t.logprobs for t in trajectories])):
        return {}
    return {at: wrong for at, t in enumerate(trajectories) if (wrong := logprob_problems(t.logprobs))}


def _encode(t: Trajectory, prompt_ids: WireArray, completion_ids: WireArray) -> EncodedRecord:
    group = t.group_id.encode()
    value = _Value(
        schema=SCHEMA,
        run_id=t.run_id,
        trajectory_id=t.trajectory_id,
        group_id=t.group_id,
        group_size=t.group_size,
        group_index=t.group_index,
        task=t.task,
        prompt_id=t.prompt_id,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=pack_logprobs(t.logprobs),
        loss_mask=pack_mask(t.loss_mask),
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
        ("schema", _SCHEMA_BYTES),
        ("run", t.run_id.encode()),
        ("trajectory", t.trajectory_id.encode()),
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
    (decoded,) = decode_many([value])
    if isinstance(decoded, RecordError):
        raise decoded
    return decoded.trajectory


def decode_many(values: Sequence[bytes | None]) -> list[Decoded | RecordError]:
    """Decode values, each as `decode` would, at less than their cost one by one; errors stand in the place of their values."""
    found: list[Decoded | RecordError] = []
    part: list[bytes | None] = []
    nbytes = 0
    for value in values:
        part.append(value)
        nbytes += len(value or b"")
        if nbytes >= _TOGETHER_BYTES:
            found += _decode_part(part)
            part, nbytes = [], 0
    return found + _decode_part(part)


def _decode_part(values: list[bytes | None]) -> list[Decoded | RecordError]:
    wires = [_decode_wire(value) for value in values]
    readable = [wire for wire in wires if isinstance(wire, _Value)]
    pairs = iter(unpack_pairs([(wire.prompt_ids, wire.completion_ids) for wire in readable]))
    found = [_trajectory(wire, next(pairs)) if isinstance(wire, _Value) else wire for wire in wires]
    sound = {at: decoded.trajectory for at, decoded in enumerate(found) if isinstance(decoded, Decoded)}
    places = list(sound)
    for at, wrong in _wrong_logprobs(list(sound.values())).items():
        found[places[at]] = _unsound(sound[places[at]], wrong)
    return found


def _decode_wire(value: bytes | None) -> _Value | RecordError:
    if not value:
        return CorruptRecordError("the record has no value")
    try:
        wire = _decoder.decode(value)
        if wire.schema != SCHEMA:
            check_schema(wire.schema)
        return wire
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        try:
            check_schema(_schema_of(value))
        except SchemaError as other_schema:
            return other_schema
        return CorruptRecordError(f"the value is not a record of schema {SCHEMA}: {error}")
    except SchemaError as error:
        return error


def _trajectory(wire: _Value, ids: TokenPair | CorruptRecordError) -> Decoded | RecordError:
    """The record, sound but for its logprobs' values."""
    if isinstance(ids, CorruptRecordError):
        return ids
    try:
        logprobs, loss_mask = unpack_logprobs(wire.logprobs), unpack_mask(wire.loss_mask, len(ids.completion))
    except CorruptRecordError as error:
        return error
    trajectory = Trajectory(
        run_id=wire.run_id,
        trajectory_id=wire.trajectory_id,
        group_id=wire.group_id,
        group_size=wire.group_size,
        group_index=wire.group_index,
        task=wire.task,
        prompt_id=wire.prompt_id,
        prompt_ids=ids.prompt,
        completion_ids=ids.completion,
        logprobs=logprobs,
        loss_mask=loss_mask,
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
    wrong = field_problems(trajectory)
    return Decoded(trajectory, ids.highest) if not wrong else _unsound(trajectory, wrong)


def _unsound(trajectory: Trajectory, wrong: Sequence[str]) -> CorruptRecordError:
    return CorruptRecordError(f"trajectory {trajectory.trajectory_id[:200]!r} is unsound: {'; '.join(wrong)}")


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


class _SchemaOnly(msgspec.Struct):
    schema: str


_schema_decoder = msgspec.msgpack.Decoder(_SchemaOnly)


def _schema_of(value: bytes) -> str:
    """The schema a value claims, so that a future major is told from garbage; our own schema where it claims none."""
    try:
        return _schema_decoder.decode(value).schema
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return SCHEMA
