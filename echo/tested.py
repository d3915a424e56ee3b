"""The versions that Echo's tests ran with: printed as constraints for pip, and compared with what is installed.

    pip install --no-deps echo-rl
    python -m echo.tested > constraints.txt
    pip install -c constraints.txt 'echo-rl[tasks]'

Imports nothing but the standard library until it compares: the second line runs before any dependency is installed.
"""

import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, Protocol

IMPORTANT = ("accelerate", "confluent-kafka", "peft", "safetensors", "tokenizers", "torch", "transformers")
"""Libraries that sample, train, or carry records and weights: a newer release of one may change what a run does."""


class Newer(NamedTuple):
    """A library whose installed version is above the one that the tests ran with."""

    name: str
    installed: str
    tested: str

    def __str__(self) -> str:
        return f"{self.name} {self.installed} (tested: {self.tested})"


class Log(Protocol):
    def warning(self, event: str, **fields: str) -> object: ...


def constraints() -> str:
    """The constraints file of this release: inside the installed package, or in `deploy` of a source tree."""
    package = Path(__file__).resolve().parent
    packaged = package / "constraints.txt"
    return (packaged if packaged.exists() else package.parent / "deploy" / "constraints.txt").read_text()


def pins(text: str) -> dict[str, str]:
    """Name -> version of a constraints file's lines `name==version`, names as packages are called: "confluent-kafka"."""
    lines = (line.partition("#")[0].strip().partition("==") for line in text.splitlines())
    return {name.lower().replace("_", "-"): version for name, equal, version in lines if equal}


def newer(tested: Mapping[str, str], installed: Mapping[str, str]) -> list[Newer]:
    """What is installed in a version above the tested one, by name.

    Builds of one release are equal ("2.13.0+cpu", "2.13.0+cu130"). A version that can't be compared counts as newer: it is a
    build of somebody's own.
    """
    from packaging.version import InvalidVersion, Version

    def is_above(version: str, limit: str) -> bool:
        try:
            return Version(Version(version).public) > Version(limit)
        except InvalidVersion:
            return True

    names = sorted(tested.keys() & installed.keys())
    return [Newer(name, installed[name], tested[name]) for name in names if is_above(installed[name], tested[name])]


def warn_of_newer(log: Log) -> None:
    """One warning, if there is an important library above its tested version; it names all of them, and the remedy."""
    installed = {}
    for name in IMPORTANT:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # An extra that is not wanted here.
            continue
    if found := newer(pins(constraints()), installed):
        log.warning(
            "newer than the tested versions: if anything fails or learns badly, install the tested ones",
            versions=", ".join(map(str, found)),
            remedy="python -m echo.tested > constraints.txt; pip install -c constraints.txt echo-rl",
        )


if __name__ == "__main__":
    sys.stdout.write(constraints())
