"""docs/dependencies.md and pyproject.toml name the same requirements, each with its reason, and none is for nothing."""

import ast
import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from echo.tested import pins

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements} - {PROJECT["name"]}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _tables() -> dict[str, list[list[str]]]:
    """Heading -> rows of the table below it, cell by cell."""
    tables: dict[str, list[list[str]]] = {}
    heading = ""
    for line in (ROOT / "docs/dependencies.md").read_text().splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| `"):
            tables.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split(" | ")])
    return tables


def test_every_requirement_is_explained_once_where_it_belongs() -> None:
    named = {heading: [row[0].strip("|` ") for row in rows] for heading, rows in _tables().items()}
    extras = set().union(*(_names(requirements) for extra, requirements in EXTRAS.items() if extra != "dev"))
    assert named["Core"] == sorted(_names(PROJECT["dependencies"]))
    assert named["Extras"] == sorted(extras)
    assert named["Development"] == sorted(_names(EXTRAS["dev"]))


def test_an_extra_is_the_one_that_pulls_it_in() -> None:
    for requirement, extra, *_ in _tables()["Extras"]:
        assert requirement.strip("|` ") in _names(EXTRAS[extra.strip("`")])


def test_every_requirement_has_a_reason_a_licence_and_a_way_out() -> None:
    for heading, rows in _tables().items():
        for row in rows:
            assert len(row) == {"Extras": 5, "Ranges": 2}.get(heading, 4), row
            assert all(row), row


def test_every_core_dependency_is_imported() -> None:
    imported = set()
    for folder in ("echo", "producers", "consumers", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.partition(".")[0])
    owners = metadata.packages_distributions()
    used = {_normal(owner) for name in imported for owner in owners.get(name, ())}
    assert {_normal(name) for name in _names(PROJECT["dependencies"])} <= used


def _requirements() -> list[Requirement]:
    """Every requirement of the project, extras included, but its own extras."""
    texts = PROJECT["dependencies"] + [text for texts in EXTRAS.values() for text in texts]
    return [made for text in texts if (made := Requirement(text)).name != PROJECT["name"]]


def test_the_tested_versions_satisfy_the_project() -> None:
    """deploy/constraints.txt pins every requirement of a development install, each within its range."""
    tested = pins((ROOT / "deploy/constraints.txt").read_text())
    needed = [requirement for requirement in _requirements() if requirement.name != "vllm"]
    outside = [
        str(requirement) for requirement in needed if tested.get(_normal(requirement.name), "0") not in requirement.specifier
    ]
    assert not outside


def test_every_range_has_a_floor_or_is_one_version() -> None:
    """`make test-lowest` has nothing to go down to otherwise."""
    for requirement in _requirements():
        assert {part.operator for part in requirement.specifier} & {">=", "=="}, requirement


def test_every_upper_bound_has_its_reason() -> None:
    bounds = {f"{made.name}{part}" for made in _requirements() for part in made.specifier if part.operator == "<"}
    assert {row[0].strip("|` ") for row in _tables()["Ranges"]} == bounds
    assert "transformers" in {bound.partition("<")[0] for bound in bounds}
