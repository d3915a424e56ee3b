"""A stop in a process's first second: real processes that get a SIGTERM at the import of one module, so at an exact moment."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from echo.stopping import StopSignal
from tests.conftest import ROOT
from tests.e2e.test_produce_process import save_tokenizer

RUN_FILE = """
run_id: early
model: {path: model}
task: {params: {dataset: spell_backward}}
broker: {settings: {bootstrap.servers: "127.0.0.1:1"}}
metrics: {train_port: 0, produce_port: 0}
"""
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
MODULES = {
    "echo-train": "consumers.cli",
    "echo-produce": "producers.cli",
    "echo-weights": "echo.cli.weights",
    "echo-demo": "echo.cli.demo",
    "echo-broker": "echo.cli.broker",
}
# What the demo ends with after any stop.
STATUS = {"echo-demo": 130}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much of a model as is looked at before the broker."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    return folder


def run_program(program: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    (folder / "run.yaml").write_text(RUN_FILE)
    path = os.pathsep.join([str(ROOT / "tests" / "early"), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, *program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def arguments(name: str) -> list[str]:
    return {"echo-weights": ["serve", "weights", "--port", "0"], "echo-demo": [], "echo-broker": []}.get(name, ["run.yaml"])


def as_installed(name: str) -> list[str]:
    """What pip makes of a script's entry point."""
    module, _, function = SCRIPTS[name].partition(":")
    return ["-c", f"import sys; from {module} import {function}; sys.exit({function}())", *arguments(name)]


def as_module(name: str) -> list[str]:
    return ["-m", MODULES[name], *arguments(name)]


def assert_stopped(process: subprocess.Popen[str], name: str) -> None:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == STATUS.get(name, 0), output
    assert "Traceback" not in output


@pytest.mark.parametrize("moment", ["typer", "echo.process", "structlog", "pydantic"])
@pytest.mark.parametrize("name", MODULES)
def test_a_stop_in_the_first_second_is_a_planned_one(tmp_path: Path, name: str, moment: str) -> None:
    """typer: nothing but the command's first lines has run yet."""
    assert_stopped(run_program(as_module(name), tmp_path, STOP_AT_IMPORT=moment), name)


@pytest.mark.parametrize("name", MODULES)
def test_the_installed_commands_catch_it_as_well(tmp_path: Path, name: str) -> None:
    assert_stopped(run_program(as_installed(name), tmp_path, STOP_AT_IMPORT="typer"), name)


@pytest.mark.parametrize("name", ["echo-train", "echo-produce"])
def test_a_stop_during_the_longest_import_begins_nothing(tmp_path: Path, name: str) -> None:
    process = run_program(as_module(name), tmp_path, STOP_AT_IMPORT="torch" if name == "echo-train" else "confluent_kafka")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.splitlines()[-1] == f"{name}: stopped before it began"


@pytest.mark.parametrize("name", ["echo-train", "echo-produce"])
def test_a_stop_while_the_broker_is_waited_for_is_a_planned_one(tmp_path: Path, tiny_model: Path, name: str) -> None:
    process = run_program([*as_module(name), f"model.path={tiny_model}", "limits.waiting_s=0.2"], tmp_path)
    assert process.stdout is not None
    said = ""
    while "waiting for the broker" not in said:
        said = process.stdout.readline()
        assert said, process.communicate()
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.splitlines()[-1].startswith(f"{name}: stopped while waiting for the broker: ")


def test_a_command_that_runs_to_its_end_is_ended_by_the_first_signal(tmp_path: Path) -> None:
    process = run_program(["-m", "echo.cli.weights", "ls", "weights"], tmp_path, STOP_AT_IMPORT="echo.run_file")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM


def test_what_is_to_be_called_at_a_stop_is_called_also_after_it() -> None:
    stop, called = StopSignal(), []
    stop.request()
    stop.on_stop(lambda: called.append(True))
    assert called == [True]
