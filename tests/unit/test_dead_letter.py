"""Dead letters keep what could not be used, byte for byte."""

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from echo.dead_letter import OVERHEAD_BYTES, unwrap, wrap
from echo.errors import RecordError
from echo.log import LogRecord
from tests.fakes.log import UnreadableHeaders

_names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20) | st.sampled_from(
    ["run", "echo.reason", "echo.detail", "echo.origin", "echo.null", "echo.offsets", "echo.cut"]
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


def nbytes(key: bytes, headers: list[tuple[str, bytes | None]], value: bytes) -> int:
    return len(key) + len(value) + sum(len(name.encode()) + len(content or b"") for name, content in headers)


def test_a_value_that_is_too_large_keeps_its_first_bytes_its_size_and_its_digest() -> None:
    value = bytes(range(256)) * 4096
    key, headers, kept = wrap(at([("run", b"r")], b"k", value), "corrupt", "why", max_bytes=600_000)
    letter = unwrap(at(headers, key, kept))
    assert nbytes(key, headers, kept) <= 600_000
    assert (letter.key, letter.headers, letter.value) == (b"k", [("run", b"r")], value[:65536])
    assert letter.cut == {"value": {"bytes": len(value), "blake3": blake3(value).hexdigest(), "kept": 65536}}


def test_headers_that_are_too_large_are_left_out_with_their_names_and_sizes() -> None:
    large: list[tuple[str, bytes | None]] = [("a", b"x" * 400_000), ("b" * 100_000, None)] * 2
    key, headers, value = wrap(at(large, b"k", b"v"), "corrupt", "why", max_bytes=600_000)
    letter = unwrap(at(headers, key, value))
    assert (letter.key, letter.headers, letter.value) == (b"k", [], b"v")
    assert letter.cut["headers"]["first"] == [["a", 400_000], ["b" * 40, 0]] * 2
    assert (letter.cut["headers"]["number"], letter.cut["headers"]["bytes"]) == (4, 1_000_042)


def test_a_key_that_is_too_large_is_cut_last() -> None:
    key, headers, value = wrap(at([], b"k" * 700_000, b"v"), "corrupt", "why", max_bytes=600_000)
    letter = unwrap(at(headers, key, value))
    assert (letter.key, letter.value, letter.cut["key"]["bytes"]) == (b"k" * 65536, b"v", 700_000)


@given(
    st.integers(0, 40_000), st.integers(0, 40_000), st.lists(st.tuples(_names, st.integers(0, 40_000)), max_size=30), st.text()
)
def test_no_letter_is_larger_than_its_topic_takes(
    key_bytes: int, value_bytes: int, sizes: list[tuple[str, int]], detail: str
) -> None:
    """And one whose original is within the records' limit is whole."""
    record = at([(name, b"h" * size) for name, size in sizes], b"k" * key_bytes, b"v" * value_bytes)
    key, headers, value = wrap(record, "corrupt", detail, max_bytes=30_000 + OVERHEAD_BYTES)
    assert nbytes(key, headers, value) + 32 * len(headers) <= 30_000 + OVERHEAD_BYTES + 32 * len(sizes)
    if nbytes(record.key or b"", list(record.headers), record.value or b"") + 10 * len(sizes) <= 30_000:
        assert unwrap(at(headers, key, value)).cut == {}
        assert (key, headers[: len(sizes)], value) == (record.key, record.headers, record.value)


def test_headers_that_can_not_be_read_cost_nothing_else_of_the_record() -> None:
    record = at([], b"k", b"v")._replace(headers=UnreadableHeaders())
    key, headers, value = wrap(record, "corrupt", "the name of a header is not UTF-8")
    letter = unwrap(at(headers, key, value))
    assert (letter.key, letter.headers, letter.value) == (b"k", [], b"v")
    assert "not UTF-8" in letter.cut["headers"]["problem"]
    with pytest.raises(RecordError, match=r"t\[3\]@17: not a dead letter: the name of a header is not UTF-8"):
        unwrap(record)


def test_a_letter_for_offsets_that_can_not_be_read_names_each() -> None:
    record = LogRecord("t-a@b", 3, 17, None, (), None, 0, "no codec knows it", 4)
    letter = unwrap(at(*[wrap(record, "unreadable", record.unreadable)[index] for index in (1, 0, 2)]))
    assert (letter.key, letter.value, letter.offsets) == (None, None, 4)
    assert list(letter.origins()) == [f"t-a@b[3]@{offset}" for offset in (17, 18, 19, 20)]
