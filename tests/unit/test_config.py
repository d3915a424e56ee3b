"""One run file: strict, helpful about mistakes, silent about secrets."""

from pathlib import Path

import pytest

from echo.config import RunConfig
from echo.errors import ConfigError
from echo.run_file import dump, load, save


def write(folder: Path, text: str = "run_id: r1\nmodel: {path: some/model}\n") -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_defaults_are_those_of_the_guide(tmp_path: Path) -> None:
    run = load(write(tmp_path))
    assert (run.max_staleness, run.sampling.group_size, run.learner.tis_cap, run.learner.clip_low) == (4, 8, 2.0, 0.2)
    assert run.limits.record_bytes == 16 * 2**20
    assert run.versions_kept == 6
    assert (run.metrics.train_port, run.metrics.produce_port, run.weights.port) == (9101, 9102, 9103)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learner.lrr=1", "unknown key learner.lrr: did you mean learner.lr?"),
        ("max_stalenes=1", "did you mean max_staleness?"),
        ("batch.groups_per_stp=1", "did you mean batch.groups_per_step?"),
        ("learner.lr=fast", "learner.lr"),
        ("learner", "is not KEY=VALUE"),
        ("run_id=a/b", "run_id"),
        ("max_staleness.x=1", "max_staleness"),
        ("weights.keep=3", "max_staleness + 2"),
        ("learner.lr={", "not a YAML value"),
    ],
)
def test_a_wrong_override_is_explained(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path), [override])
    assert says in str(caught.value)


def test_an_override_reaches_keys_that_hold_dots(tmp_path: Path) -> None:
    run = load(write(tmp_path), ["broker.settings.bootstrap.servers=h1:9092,h2:9092", "learner.lr=1e-4"])
    assert run.broker.settings["bootstrap.servers"] == "h1:9092,h2:9092"
    assert run.learner.lr == 1e-4


def test_secrets_never_show_and_are_saved_for_the_owner_only(tmp_path: Path) -> None:
    run = load(write(tmp_path), ["broker.settings.sasl.password=hunter2", "weights.token=s3cret"])
    for shown in (repr(run), str(run), dump(run)):
        assert "hunter2" not in shown
        assert "s3cret" not in shown
    saved = tmp_path / "saved.yaml"
    save(run, saved)
    assert saved.stat().st_mode & 0o077 == 0
    assert load(saved) == run


@pytest.mark.parametrize("text", ["[1, 2]", "a: b: c", "run_id: r1"])
def test_a_file_that_is_no_run_file_names_itself(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load(write(tmp_path, text))


def test_a_missing_file_names_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load(tmp_path / "nowhere.yaml")


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    run = load(write(tmp_path), ["model.path=tiny", "weights.dir=w", "checkpoint.dir=/abs"])
    assert run.model.path == str(tmp_path / "tiny")
    assert run.weights.dir == tmp_path / "w"
    assert run.checkpoint.dir == Path("/abs")


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a folder of that name, which nobody dares to remove. A user that is none stays as it is written."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = load(write(tmp_path), ["model.path=~nobody-of-this-name/tiny", "weights.dir=~/w", "checkpoint.dir=~/c"])
    assert run.model.path == str(tmp_path / "~nobody-of-this-name" / "tiny")
    assert (run.weights.dir, run.checkpoint.dir) == (tmp_path / "home" / "w", tmp_path / "home" / "c")


def test_a_file_that_is_no_text_names_itself(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"run_id: \xff\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: no text in UTF-8, as a run file is: invalid start byte at byte 8"):
        load(tmp_path / "run.yaml")


@pytest.mark.parametrize("key", ["sasl.password", "security.protocol"])
@pytest.mark.parametrize("value", ["", "[a]"])
def test_a_broker_setting_without_one_value_is_refused(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.yaml: broker\.settings: {key} takes one value: give it, or leave"):
        load(write(tmp_path), [f"broker.settings.{key}={value}"])


def test_a_hub_id_is_left_alone(tmp_path: Path) -> None:
    assert load(write(tmp_path)).model.path == "some/model"


def test_every_field_has_a_place_in_the_schema() -> None:
    schema = RunConfig.model_json_schema()
    assert "max_staleness" in schema["properties"]
    assert schema["additionalProperties"] is False
