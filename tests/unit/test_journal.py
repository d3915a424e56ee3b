"""The journal says which records each step resolved, and a resume cuts off what is done again."""

from pathlib import Path

import pytest

from echo import journal
from echo.errors import CheckpointError
from echo.journal import Journal
from tests.helpers import full_disk


def test_a_resume_keeps_only_the_lines_of_the_checkpoint(tmp_path: Path) -> None:
    """Also of two lines of one step, of which it has seen the first."""
    first = Journal(tmp_path, lines=0)
    for step in (1, 2, 2, 3):
        first.append({"step": step})
    assert first.lines == 4
    first.close()
    again = Journal(tmp_path, lines=2)
    again.append({"step": 7})
    again.close()
    assert [line["step"] for line in journal.read(first.path)] == [1, 2, 7]
    assert again.lines == 3


def test_a_new_run_begins_an_empty_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path, lines=0)
    first.append({"step": 1})
    first.close()
    Journal(tmp_path, lines=0).close()
    assert list(journal.read(first.path)) == []


def test_a_line_cut_by_a_crash_is_left_out_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / journal.FILE_NAME
    path.write_text('{"step": 1}\n{"step": 2')
    assert [line["step"] for line in journal.read(path)] == [1]
    path.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(CheckpointError, match=r"journal\.jsonl:2"):
        list(journal.read(path))


def test_a_full_disk_leaves_whole_lines_and_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    """The kernel takes a part of the line before it refuses: nothing of it stays, nor comes back when the journal is closed."""
    first = Journal(tmp_path, lines=0)
    first.append({"step": 1})
    size = first.path.stat().st_size
    with full_disk(size + 5):
        with pytest.raises(CheckpointError, match=r"journal\.jsonl: can't be written: File too large: free .*checkpoint\.dir"):
            first.append({"step": 2})
        assert first.path.stat().st_size == size
        first.close()
    assert [line["step"] for line in journal.read(first.path)] == [1]
    again = Journal(tmp_path, lines=1)
    again.append({"step": 2})
    again.close()
    assert [line["step"] for line in journal.read(first.path)] == [1, 2]


def test_a_journal_that_can_not_be_opened_is_as_it_was(tmp_path: Path) -> None:
    first = Journal(tmp_path, lines=0)
    for step in range(100):
        first.append({"step": step})
    first.close()
    before = first.path.read_bytes()
    with full_disk(200), pytest.raises(CheckpointError, match="File too large"):
        Journal(tmp_path, lines=100)
    assert first.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [journal.FILE_NAME]


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / journal.FILE_NAME
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n')
    with pytest.raises(CheckpointError, match=r"journal\.jsonl:2"):
        list(journal.read(path))
