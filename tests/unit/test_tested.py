"""The tested versions: what counts as newer, the one warning of it when either side starts, and the file that pip is given."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from echo import tested
from echo.tested import IMPORTANT, Newer, constraints, newer, pins

ROOT = Path(__file__).resolve().parents[2]
SIDES = {"echo-train": "consumers.cli", "echo-produce": "producers.cli"}

releases = st.tuples(*[st.integers(0, 30)] * 3)


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


@given(release=releases, limit=releases)
def test_newer_is_a_higher_release_and_nothing_else(release: tuple[int, ...], limit: tuple[int, ...]) -> None:
    """As numbers: 5.10 comes after 5.9."""
    found = newer({"torch": _text(limit)}, {"torch": _text(release)})
    assert found == ([Newer("torch", _text(release), _text(limit))] if release > limit else [])


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.13", "2.13.0rc1", "2.12.9"])
def test_another_build_of_the_tested_release_is_not_newer(version: str) -> None:
    assert newer({"torch": "2.13.0"}, {"torch": version}) == []


@pytest.mark.parametrize("version", ["2.13.1", "2.14.0.dev20261101+cu130", "2.13.0.post1", "built-by-hand"])
def test_a_later_build_and_one_that_says_nothing_are_newer(version: str) -> None:
    assert [one.installed for one in newer({"torch": "2.13.0"}, {"torch": version})] == [version]


def test_a_library_without_a_pin_or_an_install_is_left_alone() -> None:
    assert newer({"torch": "2.13.0"}, {"peft": "9.0"}) == []


def test_pins_are_read_by_the_names_that_packages_are_called_by() -> None:
    text = "# note\nconfluent_kafka==2.16.1\nTorch==2.13.0  # CPU or GPU\n\nnumpy>=1\n"
    assert pins(text) == {"confluent-kafka": "2.16.1", "torch": "2.13.0"}


def test_every_important_library_has_a_tested_version() -> None:
    """And is a requirement of this project: `test_dependencies.py` holds the pins to those."""
    assert set(IMPORTANT) <= pins(constraints()).keys()
    assert {"torch", "transformers", "accelerate", "confluent-kafka"} <= set(IMPORTANT)


def _warnings(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> list[dict[str, object]]:
    def version(name: str) -> str:
        try:
            return installed[name]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(tested.metadata, "version", version)
    with capture_logs() as lines:
        tested.warn_of_newer(structlog.get_logger())
    return [dict(line) for line in lines]


def test_nothing_is_logged_for_tested_and_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _warnings(monkeypatch, pins(constraints())) == []
    assert _warnings(monkeypatch, dict.fromkeys(IMPORTANT, "0.1")) == []


def test_one_line_names_all_that_are_newer_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = _warnings(monkeypatch, pins(constraints()) | {"torch": "99.0", "transformers": "99.1"})
    assert line["log_level"] == "warning"
    assert str(line["versions"]).startswith("torch 99.0 (tested: ")
    assert "transformers 99.1 (tested: " in str(line["versions"])
    assert "pip install -c constraints.txt" in str(line["remedy"])


@pytest.mark.parametrize("command", SIDES)
def test_both_sides_log_it_at_their_start(command: str, tmp_path: Path) -> None:
    """A release that was installed over the tested one, as Python's metadata has it; a wrong metrics host ends the command."""
    release = tmp_path / "transformers-99.0.dist-info"
    release.mkdir()
    (release / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 99.0\n")
    run_file = tmp_path / "run.yaml"
    run_file.write_text("run_id: versions\nmodel: {path: none}\nmetrics: {host: 192.0.2.1}\n")
    done = subprocess.run(
        [sys.executable, "-m", SIDES[command], str(run_file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "transformers 99.0" in line]
    assert len(lines) == 1
    assert "warning" in lines[0]


def test_the_file_is_printed_before_any_dependency_is_installed() -> None:
    """`-S` leaves out site-packages."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "echo.tested"], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "deploy" / "constraints.txt").read_text()
