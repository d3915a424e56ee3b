"""Any record can be shown, and none does harm to the terminal or the JSON that shows it."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo import codec, control, dead_letter
from echo.cli.show import run_of, to_json, to_text
from echo.log import LogRecord
from echo.topics import TopicNames
from tests.helpers import make_trajectory

ROLES = TopicNames._fields


def trajectory_record(**overrides: Any) -> LogRecord:
    encoded = codec.encode(make_trajectory(**overrides))
    return LogRecord("trajectories", 2, 40, encoded.key, list(encoded.headers), encoded.value, 1_700_000_000_000)


def test_a_trajectory_shows_headers_first_then_what_its_value_says() -> None:
    record = trajectory_record(run_id="run-a", reward=0.5, spans=((0, 6), (2, 7)), loss_mask=np.array([1, 1, 0, 1], np.bool_))
    seen = to_json("trajectories", record)
    assert dict(seen["headers"])["run"] == "run-a"
    assert (seen["record"]["reward"], seen["record"]["spans"], seen["record"]["trained_tokens"]) == (0.5, [[0, 6], [2, 7]], 3)
    assert "completion_ids" not in seen["record"]
    first, second = to_text(seen).splitlines()
    assert first.startswith("trajectories[2]@40 2023-11-14T22:13:20.000+00:00 key=")
    assert "min_version=6 max_version=7" in first
    assert "reward=0.5" in second
    assert "spans=[[0,6],[2,7]]" in second


def test_full_shows_the_arrays() -> None:
    seen = to_json("trajectories", trajectory_record(), full=True)
    assert seen["record"]["completion_ids"] == [17, 4, 9, 2]
    assert "    completion_ids [17,4,9,2]" in to_text(seen).splitlines()


def test_headers_that_tell_another_story_than_the_value_are_a_problem() -> None:
    record = trajectory_record(spans=((0, 3),))
    lying = record._replace(headers=[(n, b"9" if n == "min_version" else v) for n, v in record.headers])
    assert "headers and value differ" in to_json("trajectories", lying)["problem"]


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("control", control.EndOfRun(run_id="run-a", sequence=0, version=3, step=3, reason="done", created=1.0)),
        (
            "requests",
            control.Request(
                run_id="run-a",
                request_id="r",
                producer="p.1",
                version=1,
                step=1,
                first_prompt=8,
                group_ids=("g",),
                seed=3,
                issue=0,
                created=1.0,
            ),
        ),
    ],
)
def test_messages_show_their_fields(role: str, message: Any) -> None:
    record = LogRecord(role, 0, 1, control.key(message), [], control.encode(message), 0)
    seen = to_json(role, record)
    assert seen["record"] == json.loads(control.encode(message))
    assert run_of(role, record) == "run-a"


def test_a_dead_letter_shows_reason_origin_and_the_original_headers() -> None:
    original = trajectory_record(run_id="run-a")
    key, headers, value = dead_letter.wrap(original._replace(value=b"junk"), "corrupt", "no map")
    record = LogRecord("dead_letter", 0, 0, key, list(headers), value, 0)
    seen = to_json("dead_letter", record)
    assert seen["record"] == {
        "reason": "corrupt",
        "detail": "no map",
        "origin": "trajectories[2]@40",
        "bytes": 4,
        "value": b"junk".hex(),
    }
    assert [name for name, _ in seen["headers"]] == [name for name, _ in original.headers]
    assert run_of("dead_letter", record) == "run-a"


def test_what_cannot_be_read_says_so_and_shows_its_first_bytes() -> None:
    text = to_text(to_json("trajectories", trajectory_record()._replace(value=b"\x1b[2J" * 20)))
    assert "! not readable: " in text
    assert b"\x1b[2J".hex() in text
    assert "\x1b" not in text


_bytes = st.none() | st.binary(max_size=60) | st.text(max_size=30).map(str.encode) | st.just(trajectory_record().value)
_headers = st.lists(st.tuples(st.text(max_size=10) | st.sampled_from(["schema", "run", "echo.reason"]), _bytes), max_size=5)


@given(st.sampled_from(ROLES), _bytes, _headers, _bytes, st.integers(-(2**63), 2**63 - 1), st.booleans())
def test_no_record_stops_it(
    role: str, key: bytes | None, headers: list[tuple[str, bytes | None]], value: bytes | None, moment: int, full: bool
) -> None:
    record = LogRecord("t", 0, 0, key, headers, value, moment)
    seen = to_json(role, record, full=full)
    assert json.loads(json.dumps(seen, allow_nan=False)) == seen
    assert all(line.isprintable() for line in to_text(seen).split("\n"))
    run_of(role, record)


@given(st.sampled_from([float("nan"), float("inf")]))
def test_a_value_that_json_does_not_know_becomes_text(number: float) -> None:
    record = trajectory_record()
    fields = msgspec.msgpack.decode(record.value or b"")
    fields["sampling"]["top_p"] = number
    seen = to_json("trajectories", record._replace(value=msgspec.msgpack.encode(fields)))
    assert json.loads(json.dumps(seen, allow_nan=False))["record"]["sampling"]["top_p"] == str(number)
