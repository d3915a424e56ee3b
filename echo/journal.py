"""The run's journal: one JSON line per optimiser step, saying exactly which records it resolved and how.

Refuses to be a second truth: a checkpoint says how many lines of the journal count; those after them are cut off on resume,
since what they say is done again. With it, produced = trained + dropped + dead-lettered + pending can be counted from the
log by anyone, and a step's batch can be found again.

    {"step": 3, "version": 3, "resolved": {"trained": {"0": [[16, 32]]}, "stale": {"2": [[5, 6]]}}, "reward_mean": 0.4, ...}

"resolved" maps reason -> partition -> half-open offset intervals that hold exactly the records resolved since the line before.
Under "lost" they are offsets that were deleted before they were read, and that the run was allowed to pass over. A line with
"topic_anew" says that the topic was deleted and made anew, at which frontiers of the former one: offsets begin anew after it.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from echo.errors import CheckpointError
from echo.weights.files import sync_folder

FILE_NAME = "journal.jsonl"

Interval = tuple[int, int]
"""Half open: [first, last + 1)."""


def merged(runs: Iterable[Sequence[int]]) -> list[Interval]:
    """Half-open intervals that cover exactly what half-open runs do, in order and as few as can be."""
    found: list[Interval] = []
    for first, end in sorted((first, end) for first, end in runs):
        if found and found[-1][1] >= first:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((first, end))
    return found


def covers(spans: Iterable[Sequence[int]]) -> Iterator[int]:
    """The offsets that half-open intervals cover."""
    for first, end in spans:
        yield from range(first, end)


def parse(line: str | bytes) -> dict[str, Any]:
    """One line. Raises ValueError where it is none."""
    found = json.loads(line)
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        raise ValueError("a line is an object with a step")
    return found


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal. Raises CheckpointError for a line that is none; a last line without its end is left out."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield parse(line)
            except ValueError as error:
                raise CheckpointError(f"{path}:{number}: not a line of a journal: {error}") from None


class Journal:
    """Appends lines, each whole or not at all; `sync` makes them durable.

    lines: how many of those there are count; opening cuts off the others.
    Opening, `append`, `sync` and `close` raise CheckpointError if the disk is full or can't be written.
    """

    def __init__(self, folder: Path, *, lines: int) -> None:
        self.path = folder / FILE_NAME
        temporary = self.path.with_suffix(".tmp")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept = list(islice(read(self.path), lines)) if self.path.exists() else []
            with temporary.open("w") as out:
                for line in kept:
                    out.write(json.dumps(line) + "\n")
                out.flush()
                os.fsync(out.fileno())
            temporary.rename(self.path)
            sync_folder(folder)
            # Unbuffered: what could not be written is not tried again behind our back.
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise self._unwritable(error) from error
        self.lines = len(kept)
        self._failed = False

    def append(self, line: Mapping[str, Any]) -> None:
        raw = memoryview((json.dumps(line) + "\n").encode())
        end = os.fstat(self._file.fileno()).st_size
        try:
            while raw:
                # A disk that is nearly full takes a part, and refuses the next call.
                raw = raw[self._file.write(raw) :]
        except OSError as error:
            self._failed = True
            with suppress(OSError):
                self._file.truncate(end)
            raise self._unwritable(error) from error
        self.lines += 1

    def sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._failed = True
            raise self._unwritable(error) from error

    def close(self) -> None:
        try:
            # After a failure that ended the process there is nothing new to make durable, and its error stands.
            if not self._failed:
                self.sync()
        finally:
            self._file.close()

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: can't be written: {error.strerror}: free space on its disk, or set checkpoint.dir to a folder on "
            "another one; what was journaled before stands, and the run resumes from its last checkpoint"
        )
