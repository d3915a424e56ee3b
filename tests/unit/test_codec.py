"""The record survives the wire, plain `msgpack` reads it, and nothing that is not a record gets through."""

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from echo import codec
from echo.errors import CorruptRecordError, SchemaError
from echo.trajectory import Sampling, Trajectory
from tests.helpers import make_trajectory

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    completion = draw(st.integers(1, 40))
    starts = draw(st.sets(st.integers(1, max(1, completion - 1)), max_size=3)) if completion > 1 else set()
    versions = sorted(draw(st.sets(st.integers(0, 10**6), min_size=len(starts) + 1, max_size=len(starts) + 1)))
    size = draw(st.integers(1, 8))
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    ids = st.integers(0, 2**31 - 1)
    return make_trajectory(
        run_id=draw(names),
        trajectory_id=draw(names),
        group_id=draw(names),
        group_size=size,
        group_index=draw(st.integers(0, size - 1)),
        prompt_ids=draw(hnp.arrays(np.int32, draw(st.integers(1, 30)), elements=ids)),
        completion_ids=draw(hnp.arrays(np.int32, completion, elements=ids)),
        logprobs=draw(hnp.arrays(dtype, completion, elements=st.floats(-60, 0, width=16))),
        loss_mask=draw(hnp.arrays(np.bool_, completion)),
        spans=tuple(zip([0, *sorted(starts)], versions, strict=True)),
        reward=draw(finite),
        reward_components=draw(st.dictionaries(names, finite, max_size=3)),
        sampling=Sampling(max_tokens=draw(st.integers(1, 1000)), seed=draw(st.none() | st.integers(0, 2**63 - 1))),
    )


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for name in Trajectory.__struct_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            assert a == b, name


@given(trajectories())
def test_round_trip_keeps_every_field_and_dtype(trajectory: Trajectory) -> None:
    record = codec.encode(trajectory)
    assert_same(trajectory, codec.decode(record.value))
    assert codec.decode_headers(record.headers) == codec.header_of(trajectory)
    assert record.key.decode() == trajectory.group_id


def test_plain_msgpack_reads_a_record() -> None:
    """A reader that knows only MessagePack and numpy gets at every array."""
    trajectory = make_trajectory(completion_ids=[1, 70_000], loss_mask=np.array([True, False]))
    plain = msgpack.unpackb(codec.encode(trajectory).value)
    assert plain["schema"] == "1.0"
    assert plain["spans"] == [[0, 0]]
    array = plain["completion_ids"]
    assert np.frombuffer(array["data"], np.dtype(array["dtype"])).tolist() == [1, 70_000]
    assert np.frombuffer(plain["loss_mask"]["data"], plain["loss_mask"]["dtype"]).tolist() == [True, False]


def test_a_newer_minor_schema_with_unknown_fields_is_read() -> None:
    record = codec.encode(make_trajectory())
    value = msgpack.unpackb(record.value) | {"schema": "1.7", "invented_later": [1, 2]}
    assert_same(make_trajectory(), codec.decode(msgpack.packb(value)))


def test_an_unknown_major_schema_is_refused_by_headers_and_by_value() -> None:
    record = codec.encode(make_trajectory())
    headers = [(name, b"2.0" if name == "schema" else value) for name, value in record.headers]
    with pytest.raises(SchemaError, match="major version 2"):
        codec.decode_headers(headers)
    value = {"schema": "2.0", "everything": "else"}
    with pytest.raises(SchemaError, match="major version 2"):
        codec.decode(msgpack.packb(value))


@pytest.mark.parametrize("missing", [name for name, _ in codec.encode(make_trajectory()).headers])
def test_a_missing_header_is_named(missing: str) -> None:
    headers = [(name, value) for name, value in codec.encode(make_trajectory()).headers if name != missing]
    with pytest.raises(CorruptRecordError, match=missing):
        codec.decode_headers(headers)


@pytest.mark.parametrize("value", [b"-1", b"+1", b"1_0", b" 1", b"", b"1.0", b"9" * 400, None, b"\xff"])
def test_a_header_that_is_no_count_is_refused(value: bytes | None) -> None:
    headers = [(n, value if n == "min_version" else v) for n, v in codec.encode(make_trajectory()).headers]
    with pytest.raises(CorruptRecordError):
        codec.decode_headers(headers)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"logprobs": np.array([np.nan] * 4, np.float32)}, "logprobs"),
        ({"logprobs": np.zeros(3, np.float32)}, "logprobs"),
        ({"loss_mask": np.ones(5, np.bool_)}, "loss_mask"),
        ({"completion_ids": []}, "completion_ids"),
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [-1]}, "negative"),
        ({"spans": ()}, "spans"),
        ({"spans": ((1, 0),)}, "spans"),
        ({"spans": ((0, 3), (2, 3))}, "spans"),
        ({"spans": ((0, 3), (4, 5))}, "span"),
        ({"spans": ((0, -1),)}, "negative"),
        ({"reward": float("inf")}, "reward"),
        ({"reward_components": {"format": float("nan")}}, "reward_components"),
        ({"group_index": 1}, "group_index"),
        ({"finish_reason": "tired"}, "finish_reason"),
        ({"group_id": ""}, "group_id"),
    ],
)
def test_an_unsound_record_is_not_encoded(overrides: dict[str, object], field: str) -> None:
    with pytest.raises(CorruptRecordError, match=field):
        codec.encode(make_trajectory(**overrides))


def test_an_unsound_value_is_not_decoded() -> None:
    """A foreign writer may skip the checks of `encode`; the reader makes them again."""
    plain = msgpack.unpackb(codec.encode(make_trajectory()).value)
    plain["logprobs"]["data"] = np.array([0, np.nan, 0, 0], "<f4").tobytes()
    with pytest.raises(CorruptRecordError, match="NaN"):
        codec.decode(msgpack.packb(plain))


@pytest.mark.parametrize("dtype", ["<i8", "|O", "<U4", "evil", ""])
def test_an_array_of_another_dtype_is_refused(dtype: str) -> None:
    plain = msgpack.unpackb(codec.encode(make_trajectory()).value)
    plain["completion_ids"]["dtype"] = dtype
    with pytest.raises(CorruptRecordError, match="completion_ids"):
        codec.decode(msgpack.packb(plain))


@settings(max_examples=300)
@given(trajectories(), st.data())
def test_damaged_bytes_give_a_record_error_or_a_sound_record(trajectory: Trajectory, data: st.DataObject) -> None:
    """Flips, cuts and garbage never raise anything but a RecordError."""
    raw = bytearray(codec.encode(trajectory).value)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        codec.decode(bytes(raw))
    except (CorruptRecordError, SchemaError):
        return


def test_token_versions_follow_the_spans() -> None:
    trajectory = make_trajectory(completion_ids=[1, 2, 3, 4], spans=((0, 6), (3, 9)))
    assert trajectory.token_versions().tolist() == [6, 6, 6, 9]
    assert (trajectory.min_policy_version, trajectory.max_policy_version) == (6, 9)
