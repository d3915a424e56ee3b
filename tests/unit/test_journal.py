"""The journal says which records each step resolved, and a resume cuts off what is done again."""

from pathlib import Path

import pytest

from echo import journal
from echo.errors import CheckpointError
from echo.journal import Journal


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
