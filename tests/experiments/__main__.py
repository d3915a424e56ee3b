"""Run an experiment of the laboratory, and say whether it shows what it must.

    python -m tests.experiments parity --seeds 5 --json out.json --plot out.png
    python -m tests.experiments staleness --seeds 5 --json out.json --plot out.png
    python -m tests.experiments overlap --json out.json --plot out.png

`--work DIR` keeps models and finished runs there, and goes on from them: give it a new folder after the code has changed.
The last line printed says what is missed, or that nothing is; the exit status is then 1, or 0.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class Name(StrEnum):
    parity = "parity"
    staleness = "staleness"
    overlap = "overlap"


def main(
    name: Annotated[Name, typer.Argument(help="The experiment.")],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 0, 1, ... (overlap needs none).")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the result.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Where to draw it, as PNG.")] = None,
    work: Annotated[Path | None, typer.Option(help="Keeps models and finished runs. Default: a temporary folder.")] = None,
) -> None:
    """Measure, conclude, and exit non-zero where a line of what must be shown is missed."""
    # Before torch is loaded: bits depend on the number of threads.
    os.environ.update(_ENVIRONMENT)
    import torch

    from echo.process import configure_logging

    configure_logging(level="error")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="echo-experiment-") as temporary:
        folder = (work or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        result, missed = _EXPERIMENTS[name](folder, range(seeds), plot_file)
    sys.exit(tell(name, result, missed, json_file))


def tell(name: str, result: Mapping[str, Any], missed: Sequence[str], json_file: Path | None) -> int:
    """Print the result and, as the last line, the verdict; returns the exit status."""
    text = json.dumps(result)
    typer.echo(text)
    if json_file is not None:
        json_file.write_text(text + "\n")
    typer.echo(f"{name} misses: {'; '.join(missed)}" if missed else f"{name} shows all that it must")
    return 1 if missed else 0


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _parity(work: Path, seeds: Sequence[int], plot_file: Path | None) -> tuple[dict[str, Any], list[str]]:
    from tests.experiments import parity

    runs = parity.collect(work, seeds=seeds, say=_say)
    result = parity.conclude(runs)
    if plot_file is not None:
        parity.plot(runs, plot_file)
    return result, parity.misses(result)


def _staleness(work: Path, seeds: Sequence[int], plot_file: Path | None) -> tuple[dict[str, Any], list[str]]:
    from tests.experiments import staleness

    runs = staleness.collect(work, seeds=seeds, say=_say)
    result = staleness.conclude(runs)
    _say(staleness.table(result))
    if plot_file is not None:
        staleness.plot(runs, plot_file)
    return result, staleness.misses(result)


def _overlap(work: Path, seeds: Sequence[int], plot_file: Path | None) -> tuple[dict[str, Any], list[str]]:
    from tests.experiments import overlap

    found = overlap.collect(work, say=_say)
    result = overlap.conclude(found)
    if plot_file is not None:
        overlap.plot(found, plot_file)
    return result, overlap.misses(result)


_EXPERIMENTS = {Name.parity: _parity, Name.staleness: _staleness, Name.overlap: _overlap}


if __name__ == "__main__":
    typer.run(main)
