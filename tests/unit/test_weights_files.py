"""What a store asks of the file system."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from echo.weights.files import BusyError, locked


def test_who_waits_for_a_lock_says_so_with_its_path_and_gives_up_in_time(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with locked(path, exclusive=True, wait_s=1.0), capture_logs() as said:
        with pytest.raises(BusyError, match="another process is at work here"):
            with locked(path, exclusive=False, wait_s=0.2, waiting_s=0.05):
                pass
    assert said[0]["event"].startswith(f"waiting for the lock {path}")
    assert "for 0.2 s at most" in said[0]["event"]


def test_a_lock_that_is_free_is_taken_in_silence(tmp_path: Path) -> None:
    with capture_logs() as said, locked(tmp_path / ".lock", exclusive=True, wait_s=1.0, waiting_s=0.0):
        pass
    assert said == []
