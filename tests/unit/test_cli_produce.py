"""echo-produce as people call it: what it answers at once, and how it fails."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from producers.cli import app, default_id

RUN = {"run_id": "cli-run", "model": {"path": "some/model"}, "weights": {"token": "s3cret-token"}}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return path


def _cpu_s() -> float:
    """Seconds of a core that this process's ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_answers_at_once() -> None:
    """In seconds of a core, and the best of three: a busy machine is not what is measured."""
    seconds = []
    for _ in range(3):
        before = _cpu_s()
        done = subprocess.run([sys.executable, "-m", "producers.cli", "--help"], capture_output=True, text=True, timeout=60)
        seconds.append(_cpu_s() - before)
        assert done.returncode == 0
        assert "RUN_FILE" in done.stdout
    assert min(seconds) < 0.7


def test_dry_run_prints_the_resolved_file_without_secrets(run_file: Path) -> None:
    result = CliRunner().invoke(app, [str(run_file), "sampling.group_size=3", "--dry-run"])
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["sampling"]["group_size"] == 3
    assert "s3cret-token" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sampling.group_sise=3"], "sampling.group_size"),
        (["sampling.group_size=0"], "sampling.group_size"),
        (["--id", "a/b"], "--id 'a/b'"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(run_file: Path, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, [str(run_file), *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_missing_run_file_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert "none.yaml" in result.stderr


def test_an_occupied_metrics_port_names_its_key(run_file: Path) -> None:
    from prometheus_client import CollectorRegistry

    from echo.metrics_server import MetricsServer

    other = MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, key="test")
    try:
        command = [sys.executable, "-m", "producers.cli", str(run_file), f"metrics.produce_port={other.port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        other.close()
    assert done.returncode == 2
    assert f"metrics.produce_port: 127.0.0.1:{other.port} can't be listened on" in done.stderr.splitlines()[-1]


def test_hosts_whose_long_names_differ_at_their_end_have_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods of one deployment do, and each runs its producer as process 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    ids = []
    for pod in ("x2x4z", "q8w9k"):
        name = f"reinforcement-learning-echo-producers-7d9f8b6c5d-{pod}"
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        ids.append(default_id())
    assert ids == [f"learning-echo-producers-7d9f8b6c5d-{pod}-1"[-42:] for pod in ("x2x4z", "q8w9k")]


def test_the_default_id_fits_topic_keys_and_ids() -> None:
    import re

    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", default_id())
