"""The end of a batch that can't be unpacked is found exactly, in few questions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.kafka.batch_end import BatchEnd


def search(first: int, end: int, log_end: int) -> int:
    """Ask a log that holds the batch [first, end) and single records after it; the number of questions."""
    found, questions = BatchEnd(first, log_end), 0
    while (offset := found.ask) is not None:
        questions += 1
        assert first < offset < log_end
        found.inside() if offset < end else found.beyond(offset)
    assert found.end == end
    return questions


@given(first=st.integers(0, 2**60), size=st.integers(1, 2**31), after=st.integers(0, 2**40))
def test_any_batch_ends_where_it_ends(first: int, size: int, after: int) -> None:
    questions = search(first, first + size, first + size + after)
    assert questions <= 2 * size.bit_length() + 2


@pytest.mark.parametrize(("size", "after", "questions"), [(1, 0, 0), (1, 1_000_000, 1), (2, 1_000_000, 3)])
def test_small_batches_take_few_questions(size: int, after: int, questions: int) -> None:
    assert search(7, 7 + size, 7 + size + after) == questions


def test_another_batch_that_can_not_be_unpacked_ends_the_search_where_it_begins() -> None:
    """It is reported by its first offset, which is nearer than the offset asked for."""
    found = BatchEnd(10, 1000)
    while found.ask is not None and found.ask < 18:
        found.inside()
    assert found.ask == 25
    found.beyond(18)
    assert (found.ask, found.end) == (None, 18)
