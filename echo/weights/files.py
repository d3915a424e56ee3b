"""What a store asks of the file system: locks that die with their holder, folders made durable, listings without surprises.

Refuses to know what the files mean.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echo.errors import WeightsError
from echo.waiting import Watch


class BusyError(WeightsError):
    """A lock was not free in time."""


@contextmanager
def locked(path: Path, *, exclusive: bool, wait_s: float, waiting_s: float = 10.0) -> Iterator[None]:
    """Hold a lock, which the kernel takes back when the process ends in any way. Raises BusyError after `wait_s`.

    waiting_s: how often the wait speaks.
    """
    deadline = time.monotonic() + wait_s
    watch = Watch(f"the lock {path}", lambda: f"another process is at work here; for {wait_s:g} s at most", limit_s=waiting_s)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BusyError(f"{path}: another process is at work here, for {wait_s:g} s now", retriable=True) from None
                watch.check()
                # flock knows no timeout.
                time.sleep(0.01)
        watch.progress()
        yield
    finally:
        os.close(descriptor)


def names(folder: Path) -> list[str]:
    """What lies in a folder, sorted; nothing where there is no folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or removed in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
