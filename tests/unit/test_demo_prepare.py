"""What `echo-demo` refuses before it starts anything, and that a folder it refused for may be chosen again."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from echo.demo import prepare
from echo.errors import ConfigError, EchoError
from echo.run_file import load


def test_the_run_file_is_what_the_processes_read(tmp_path: Path) -> None:
    run, plan = prepare(tmp_path, seed=3, overrides=["learner.steps=7"], apache_home=None)
    assert load(tmp_path / "run.yaml") == run
    assert (run.seed, run.task.seed, run.producer.seed, run.learner.steps) == (3, 3, 3, 7)
    assert run.model.path == str(tmp_path / "model"), "where the tiny policy will be"
    assert plan.describe()


@pytest.mark.parametrize(
    ("overrides", "apache", "message"),
    [
        (["learner.step=7"], None, "unknown key learner.step: did you mean learner.steps?"),
        (["model.path=/nowhere/model"], None, "model.path: /nowhere/model is no folder"),
        ([], Path("/nowhere/kafka"), "/nowhere/kafka"),
        (["weights.serve=true"], None, "weights.serve: the demo itself starts the weight server"),
    ],
)
def test_what_is_refused_leaves_the_folder_free(
    tmp_path: Path, overrides: Sequence[str], apache: Path | None, message: str
) -> None:
    with pytest.raises(EchoError) as caught:
        prepare(tmp_path, seed=0, overrides=overrides, apache_home=apache)
    assert message in str(caught.value)
    prepare(tmp_path, seed=0, overrides=(), apache_home=None)


def test_an_own_model_is_found_from_where_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    run, _ = prepare(tmp_path / "out", seed=0, overrides=["model.path=mine"], apache_home=None)
    assert run.model.path == load(tmp_path / "out" / "run.yaml").model.path == str(tmp_path / "mine")


def test_a_folder_that_holds_a_run_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run_id: earlier\n")
    with pytest.raises(EchoError, match="holds a run already"):
        prepare(tmp_path, seed=0, overrides=(), apache_home=None)
    assert (tmp_path / "run.yaml").read_text() == "run_id: earlier\n"


def test_a_folder_that_holds_a_model_is_left_as_it_is(tmp_path: Path) -> None:
    """The tiny policy's folder is `model`, too."""
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="is not empty, it holds model: choose another --out"):
        prepare(tmp_path, seed=0, overrides=(), apache_home=None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_can_not_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file can't be written: File exists: choose another --out"):
        prepare(tmp_path / "file", seed=0, overrides=(), apache_home=None)
