"""Imports point one way, stay light where they must, and never reach for code that runs what it reads."""

import ast
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import consumers
import echo
import producers

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = (echo, producers, consumers)
SHIPPED = sorted(path for package in PACKAGES for path in (ROOT / package.__name__).rglob("*.py"))
SOURCES = SHIPPED + sorted((ROOT / "grafana").glob("*.py")) + sorted((ROOT / "deploy").glob("*.py"))

HEAVY = ("torch", "transformers", "vllm")
(PURE,) = (c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["name"].startswith("pure parts"))
# Of the pure parts, those that compute on tensors.
WITH_TORCH = {"consumers.advantages", "consumers.batching", "consumers.digest", "consumers.objectives"}

# Loading any of these formats can run code that is in the bytes.
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {"torch.load", "torch.save", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}

# Import name -> the declared dependency whose own interface it is.
BROUGHT_ALONG = {"starlette": "fastapi"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module


def _calls(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every call in a file."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def _loaded_by(*modules: str) -> set[str]:
    """Top-level packages in memory after a fresh interpreter imported these modules."""
    script = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_echo_and_the_commands_load_no_engine() -> None:
    """Every module of `echo`, and the two other commands: an inference host must answer --help without loading torch."""
    modules = [module.name for module in pkgutil.walk_packages(echo.__path__, "echo.")]
    assert "echo.codec" in modules
    assert _loaded_by(*modules, "producers.cli", "consumers.cli").isdisjoint(HEAVY)


def test_pure_parts_load_no_client_server_or_engine() -> None:
    """In memory, and not only by name: no import of theirs reaches Kafka, HTTP or an engine in any way."""
    pure = set(PURE["source_modules"])
    assert pure >= WITH_TORCH
    assert {"echo.staleness", "echo.codec", "consumers.groups", "consumers.objectives"} <= pure
    forbidden = {name for name in PURE["forbidden_modules"] if "." not in name}
    assert {"confluent_kafka", "httpx", "fastapi", "transformers", "vllm"} <= forbidden
    assert _loaded_by(*pure).isdisjoint(forbidden)
    assert _loaded_by(*(pure - WITH_TORCH)).isdisjoint({"torch"})


def test_the_import_contracts_are_kept() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(lint), "--no-cache"], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kafka_is_spoken_in_one_place() -> None:
    speakers = {_name(path) for path in SHIPPED for _, name in _imported(path) if name.partition(".")[0] == "confluent_kafka"}
    assert speakers
    assert not {speaker for speaker in speakers if not re.match(r"echo/(kafka(/\w+)?|topics)\.py$", speaker)}


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_nothing_is_unpickled(path: Path) -> None:
    imported = [(line, name) for line, name in _imported(path) if name.partition(".")[0] in UNSAFE_MODULES]
    called = [(line, name) for line, name in _calls(path) if name in UNSAFE_CALLS]
    assert not imported + called


@pytest.mark.parametrize("path", [path for path in SHIPPED if path.stat().st_size], ids=_name)
def test_a_file_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_what_is_imported_is_a_declared_dependency() -> None:
    """A package that only another one brings along may be gone with its next release."""
    project = PYPROJECT["project"]
    declared = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in declared}
    normal = {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    owners = metadata.packages_distributions()
    own = {package.__name__ for package in PACKAGES}
    strangers = {
        f"{_name(path)}:{line}: {name}"
        for path in SHIPPED
        for line, name in _imported(path)
        if (top := name.partition(".")[0]) not in own | sys.stdlib_module_names | BROUGHT_ALONG.keys()
        and not {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners.get(top, [top])} & normal
    }
    assert not strangers
