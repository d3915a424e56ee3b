"""Dead letters keep what could not be used, byte for byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.dead_letter import OVERHEAD_BYTES, unwrap, wrap
from echo.errors import RecordError
from echo.log import LogRecord

_names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20) | st.sampled_from(
    ["run", "echo.reason", "echo.detail", "echo.origin", "echo.null"]
)
_headers = st.lists(st.tuples(_names, st.none() | st.binary(max_size=20)), max_size=6)
_maybe_bytes = st.none() | st.binary(max_size=40)


def at(headers: list[tuple[str, bytes | None]], key: bytes | None, value: bytes | None) -> LogRecord:
    return LogRecord("t", 3, 17, key, headers, value, 0)


@given(_headers, _maybe_bytes, _maybe_bytes, st.text(max_size=30))
def test_what_was_wrapped_comes_back_whole(
    headers: list[tuple[str, bytes | None]], key: bytes | None, value: bytes | None, detail: str
) -> None:
    record = at(headers, key, value)
    sent_key, sent_headers, sent_value = wrap(record, "corrupt", detail)
    letter = unwrap(at(sent_headers, sent_key, sent_value))
    assert (letter.key, letter.headers, letter.value) == (key, headers, value)
    assert (letter.reason, letter.origin) == ("corrupt", "t[3]@17")
    assert letter.detail == detail.encode(errors="backslashreplace").decode()


def test_a_dead_letter_of_a_dead_letter_tells_the_last_reason() -> None:
    key, headers, value = wrap(at([], None, b"v"), "first", "")
    again = wrap(at(list(headers), key, value), "second", "")
    letter = unwrap(at(again[1], again[0], again[2]))
    assert letter.reason == "second"
    assert unwrap(at(letter.headers, letter.key, letter.value)).key is None


@given(st.text(max_size=5000), st.text(max_size=200))
def test_it_is_larger_than_its_original_by_a_bounded_amount(detail: str, reason: str) -> None:
    _, headers, _ = wrap(at([], None, None), reason, detail)
    assert sum(len(name) + len(value or b"") for name, value in headers) + 32 * len(headers) <= OVERHEAD_BYTES
    assert all((value or b"").decode() is not None for _, value in headers), "cut between characters"


@pytest.mark.parametrize("headers", [[], [("echo.reason", b"x")], [("echo.detail", b""), ("echo.origin", b"")]])
def test_another_record_is_not_taken_for_one(headers: list[tuple[str, bytes | None]]) -> None:
    with pytest.raises(RecordError, match=r"t\[3\]@17: not a dead letter"):
        unwrap(at(headers, b"k", b"v"))
