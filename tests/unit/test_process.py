"""What every process does alike: log lines on a full disk, the log files of children, run files that can't be written."""

import fcntl
import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from echo.config import RunConfig
from echo.errors import ConfigError
from echo.process import Child, configure_logging, is_readable
from echo.run_file import load, save
from tests.conftest import ROOT
from tests.helpers import full_disk

SPEAKS = """
import structlog
from echo.process import configure_logging
configure_logging()
for number in range(2000):
    structlog.get_logger("test").info("a line", number=number)
print("alive")
"""


def test_a_process_whose_log_goes_to_a_full_disk_lives_on() -> None:
    with open("/dev/full", "w") as full:
        made = subprocess.run([sys.executable, "-c", SPEAKS], cwd=ROOT, stdout=subprocess.PIPE, stderr=full, check=False)
    assert (made.returncode, made.stdout) == (0, b"alive\n")


def test_lines_that_were_lost_are_counted_in_the_next_that_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    configure_logging()
    log = structlog.get_logger("test")
    monkeypatch.setattr(sys, "stderr", Full())
    log.info("first")
    log.info("second")
    monkeypatch.setattr(sys, "stderr", wide := io.StringIO())
    log.info("third")
    log.info("fourth")
    lines = wide.getvalue().splitlines()
    assert lines[0] == "2 log lines could not be written here"
    assert [line.rpartition(" ")[2] for line in lines[1:]] == ["third", "fourth"]


def test_a_child_whose_log_can_not_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the log of idle, .*idle\.log, can't be written: No such file or directory: free"):
        Child("idle", [sys.executable, "-c", ""], log_path=tmp_path / "away" / "idle.log", env={})


def test_a_run_file_on_a_full_disk_is_one_error_and_the_one_before_stands(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    run = RunConfig.model_validate({"run_id": "first", "model": {"path": "tiny"}})
    save(run, path)
    with full_disk(10), pytest.raises(ConfigError, match=r"run\.yaml can't be written: File too large: free space there"):
        save(run.model_copy(update={"run_id": "second"}), path)
    assert load(path).run_id == "first"
    assert [one.name for one in tmp_path.iterdir()] == ["run.yaml"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_process_with_many_connections_still_reads_what_its_children_tell() -> None:
    """A trainer whose weight server is started again, while strangers hold descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        receiving, sending = os.pipe()
        high = fcntl.fcntl(receiving, fcntl.F_DUPFD_CLOEXEC, 1500)
        assert not is_readable(high, 0.0)
        os.write(sending, b"9103\n")
        assert is_readable(high, 5.0)
        assert os.read(high, 64) == b"9103\n"
        os.close(sending)
        assert is_readable(high, 5.0), "the end is something to read, too"
        for one in (receiving, high):
            os.close(one)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
