"""A disk that may get full: a tmpfs of a few megabytes, which only root can mount."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SIZE = "48m"


@contextmanager
def mounted(folder: Path, say: Callable[[str], object]) -> Iterator[Path | None]:
    """The folder, with the file system mounted there; None, and the reason said, if that is not allowed."""
    folder.mkdir(parents=True)
    if os.geteuid() != 0:
        say("no disk gets full: only root may mount a file system of its own")
        yield None
        return
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(folder)], capture_output=True, text=True, timeout=30.0
    )
    if done.returncode != 0:
        say(f"no disk gets full: {done.stderr.strip()}")
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30.0)
