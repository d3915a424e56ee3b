"""The record survives the wire, plain `msgpack` reads it, and nothing that is not a record gets through."""

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from echo import codec
from echo.errors import CorruptRecordError, SchemaError
from echo.trajectory import MAX_REWARD, Sampling, Trajectory
from tests.helpers import make_trajectory

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=20)
rewards = st.floats(-MAX_REWARD, MAX_REWARD)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    completion = draw(st.integers(1, 40))
    starts = draw(st.sets(st.integers(1, max(1, completion - 1)), max_size=3)) if completion > 1 else set()
    versions = sorted(draw(st.sets(st.integers(0, 10**6), min_size=len(starts) + 1, max_size=len(starts) + 1)))
    size = draw(st.integers(1, 8))
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    # Each of the three layouts of token ids.
    ids = st.integers(0, draw(st.sampled_from([2**16 - 1, 2**24 - 1, 2**31 - 1])))
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
        reward=draw(rewards),
        reward_components=draw(st.dictionaries(names, rewards, max_size=3)),
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
    low, high = plain["completion_ids"]["data"], plain["completion_ids"]["high"]
    assert plain["completion_ids"]["dtype"] == "<u2"
    assert (np.frombuffer(low, "<u2") + 65536 * np.frombuffer(high, "u1").astype("i4")).tolist() == [1, 70_000]
    prompt = plain["prompt_ids"]
    assert np.frombuffer(prompt["data"], prompt["dtype"]).tolist() == [5, 6, 7]
    assert "high" not in prompt
    assert np.frombuffer(plain["loss_mask"]["data"], plain["loss_mask"]["dtype"]).tolist() == [True, False]


@pytest.mark.parametrize(
    ("highest", "dtype", "bytes_per_id"), [(2**16 - 1, "<u2", 2), (2**16, "<u2", 3), (2**24 - 1, "<u2", 3), (2**24, "<u4", 4)]
)
def test_ids_take_as_few_bytes_as_their_highest_needs(highest: int, dtype: str, bytes_per_id: int) -> None:
    ids = [0, 1, highest]
    record = codec.encode(make_trajectory(prompt_ids=ids))
    array = msgpack.unpackb(record.value)["prompt_ids"]
    assert (array["dtype"], len(array["data"]) + len(array.get("high", b""))) == (dtype, len(ids) * bytes_per_id)
    assert codec.decode(record.value).prompt_ids.tolist() == ids


def test_plain_uint32_ids_are_read_whatever_their_size() -> None:
    """A foreign writer need not split."""
    plain = msgpack.unpackb(codec.encode(make_trajectory()).value)
    plain["completion_ids"] = {"dtype": "<u4", "data": np.array([17, 4, 9, 2], "<u4").tobytes()}
    assert_same(make_trajectory(), codec.decode(msgpack.packb(plain)))


@pytest.mark.parametrize(
    "array",
    [
        {"dtype": "<u2", "data": b"\0" * 8, "high": b"\0" * 3},
        {"dtype": "<u4", "data": b"\0" * 16, "high": b"\0" * 4},
        {"dtype": "<u2", "data": b"\0" * 7},
        {"dtype": "<u4", "data": b"\xff" * 16},
    ],
)
def test_ids_whose_bytes_do_not_fit_are_refused(array: dict[str, object]) -> None:
    plain = msgpack.unpackb(codec.encode(make_trajectory()).value) | {"completion_ids": array}
    with pytest.raises(CorruptRecordError, match="completion_ids"):
        codec.decode(msgpack.packb(plain))


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


@pytest.mark.parametrize("schema", ["1", "1.x", "\u00b2.1", "\uff11.0", "9" * 5000 + ".0", "1.0\n", ""])
def test_a_schema_that_is_no_version_is_refused_by_headers_and_by_value(schema: str) -> None:
    """Also where int() and isdigit() are of another opinion."""
    record = codec.encode(make_trajectory())
    headers = [(name, schema.encode() if name == "schema" else value) for name, value in record.headers]
    with pytest.raises(SchemaError, match="is not MAJOR"):
        codec.decode_headers(headers)
    with pytest.raises(SchemaError, match="is not MAJOR"):
        codec.decode(msgpack.packb(msgpack.unpackb(record.value) | {"schema": schema}))


def test_ids_are_short_enough_to_be_remembered() -> None:
    long = "g" * (codec.MAX_NAME_BYTES + 1)
    with pytest.raises(CorruptRecordError, match="1025 bytes"):
        codec.encode(make_trajectory(group_id=long))
    headers = [(name, long.encode() if name == "group" else v) for name, v in codec.encode(make_trajectory()).headers]
    with pytest.raises(CorruptRecordError, match="1025 bytes"):
        codec.decode_headers(headers)


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
        ({"logprobs": np.array([0, 0, 0, -np.inf], np.float16)}, "logprobs"),
        ({"logprobs": np.array([0, np.inf, 0, 0], np.float32)}, "logprobs"),
        ({"logprobs": np.array([0, 0.01, 0, 0], np.float32)}, "not above 0"),
        ({"loss_mask": np.ones(5, np.bool_)}, "loss_mask"),
        ({"completion_ids": []}, "completion_ids"),
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [-1]}, "negative"),
        ({"spans": ()}, "spans"),
        ({"spans": ((1, 0),)}, "spans"),
        ({"spans": ((0, 3), (2, 3))}, "spans"),
        ({"spans": ((0, 3), (4, 5))}, "span"),
        ({"spans": ((0, -1),)}, "negative"),
        ({"spans": ((0, 2**63),)}, "above"),
        ({"reward": float("inf")}, "reward"),
        ({"reward": float("nan")}, "reward"),
        ({"reward": 1e31}, "reward"),
        ({"reward_components": {str(n): 0.0 for n in range(257)}}, "257 entries"),
        ({"task": "t" * 9000}, "text fields"),
        ({"sampling": Sampling(max_tokens=4, temperature=0.0)}, "temperature"),
        ({"sampling": Sampling(max_tokens=4, temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(max_tokens=4, logprob_mode="guessed")}, "logprob_mode"),
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
