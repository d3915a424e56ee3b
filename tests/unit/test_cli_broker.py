"""echo-broker as people use it: from start to Ctrl-C, and its exit codes."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from echo.broker import BrokerPlan
from echo.kafka import KafkaLogAdmin

PROGRAM = [sys.executable, "-m", "echo.cli.broker"]


def environment(**more: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name != "KAFKA_HOME"}, **more}


def finish(*arguments: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PROGRAM, *arguments], env=env or environment(), capture_output=True, text=True, timeout=60, check=False
    )


def run_until_ready(*arguments: str, stop: signal.Signals) -> tuple[int, str]:
    """Start, read until it says how to stop it, use the run file's lines that it printed, stop: status and output."""
    command = [*PROGRAM, *arguments]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        assert program.stdout is not None
        lines: list[str] = []
        for line in program.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        printed = "".join(lines)
        section = printed[printed.index("broker:\n  settings:") :].split("\n\n")[0]
        settings = yaml.safe_load(section)["broker"]["settings"]
        assert KafkaLogAdmin(settings, client_id="t").nodes(10.0)
        brokers = psutil.Process(program.pid).children(recursive=True)
        assert brokers
        program.send_signal(stop)
        status = program.wait(60)
        assert not [broker for broker in brokers if broker.is_running()]
        return status, printed


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_it_runs_tansu_until_it_is_stopped(tmp_path: Path, stop: signal.Signals) -> None:
    """It says which broker and its limits, prints lines for a run file that work, ends with 0 and leaves nothing behind."""
    status, printed = run_until_ready("--data", str(tmp_path), stop=stop)
    assert status == 0
    assert printed.startswith("broker: Tansu, embedded")
    assert "in memory only" in printed.splitlines()[0]


@pytest.mark.kafka
def test_it_runs_apache_kafka(apache_plan: BrokerPlan, tmp_path: Path) -> None:
    """With --apache, records in --data."""
    status, printed = run_until_ready("--apache", str(apache_plan.home), "--data", str(tmp_path), stop=signal.SIGINT)
    assert status == 0
    assert printed.startswith("broker: Apache Kafka 4.")
    assert (tmp_path / "cluster.json").exists()


def test_a_broker_that_can_not_start_is_status_1(tmp_path: Path) -> None:
    """One line on standard error, no traceback."""
    done = finish("--apache", str(tmp_path / "nowhere"), "--data", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("echo-broker: --apache: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_data_folder_that_can_not_be_is_status_1(tmp_path: Path) -> None:
    """Of Tansu, too, which keeps its log there."""
    (tmp_path / "file").touch()
    done = finish("--data", str(tmp_path / "file"))
    assert done.returncode == 1
    assert done.stderr == f"echo-broker: data folder {tmp_path / 'file'}: Not a directory: choose another one\n"


@pytest.mark.parametrize("arguments", [("--nodes", "2"), ("--nodes", "3"), ("--port", "99999"), ("--nonsense",)])
def test_a_wrong_command_line_is_status_2(arguments: tuple[str, ...]) -> None:
    """Three nodes without a home included."""
    assert finish(*arguments).returncode == 2


def test_a_broker_that_dies_ends_it_with_status_1(tmp_path: Path) -> None:
    """It does not go on as if there were one."""
    command = [*PROGRAM, "--data", str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert any("Ctrl-C" in line for line in program.stdout)
        (guard,) = psutil.Process(program.pid).children()
        (broker,) = guard.children()
        broker.kill()
        assert program.wait(60) == 1
        assert "its records with it" in program.stderr.read()
