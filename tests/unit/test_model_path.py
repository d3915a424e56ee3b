"""`model.path` that is neither a folder nor on the hub: both commands say the same, in one line, and ask nobody in vain."""

from collections.abc import Callable
from pathlib import Path

import pytest

from consumers.model import Policy
from echo.errors import ConfigError, EchoError
from echo.model_path import names_folder, unloadable
from echo.run_file import load
from producers.engines.transformers import TransformersEngine
from producers.wiring import load_tokenizer
from tests.tiny import save_tiny

LOADERS: list[Callable[[str], object]] = [
    lambda path: Policy(path, lora=None, recompute=False),
    lambda path: load_tokenizer(path, chat=False),
    lambda path: TransformersEngine(path, dtype="float32"),
]


@pytest.mark.parametrize("loader", LOADERS, ids=["trainer", "tokenizer", "engine"])
def test_a_missing_folder_is_named_and_looked_for_nowhere_else(tmp_path: Path, loader: Callable[[str], object]) -> None:
    with pytest.raises(EchoError) as caught:
        loader(str(tmp_path / "missing"))
    assert str(caught.value) == f"model.path: {tmp_path}/missing is no folder"


@pytest.mark.parametrize("loader", LOADERS, ids=["trainer", "tokenizer", "engine"])
def test_what_is_no_folder_and_not_on_the_hub_names_both(loader: Callable[[str], object]) -> None:
    """The hub refuses a name with a blank without being asked over the network."""
    with pytest.raises(EchoError, match=r"model\.path: no folder no model beside .*the hub did not give it: Repo id"):
        loader("no model")


def test_what_was_found_and_is_of_no_use_is_not_blamed_on_the_hub() -> None:
    """And a message of several lines becomes one."""
    assert unloadable("org/model", "gives no tokenizer", ValueError("no\n  such type")) == (
        "model.path: org/model gives no tokenizer: no such type"
    )


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _reshape(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 40'))


def _unpack(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize("damage", [_cut, _reshape, _unpack])
def test_weights_that_are_cut_off_or_do_not_fit_are_told(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """As a download that broke off leaves them, or an older format."""
    path = save_tiny(tmp_path)
    damage(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"model\.path: {path} can't be loaded: .* whole safetensors files that fit config.json"
    ):
        Policy(path, lora=None, recompute=False)


def test_a_folder_that_is_no_model_is_not_blamed_on_its_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be loaded: Unrecognized model") as caught:
        Policy(str(tmp_path), lora=None, recompute=False)
    assert "safetensors" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/m", True),
        ("./m", True),
        ("../m", True),
        ("~/m", True),
        ("runs/a/model", True),
        ("Qwen/Qwen3-0.6B", False),
        ("gpt2", False),
    ],
)
def test_a_hub_id_is_told_from_a_folder(path: str, expected: bool) -> None:
    assert names_folder(path) is expected


@pytest.mark.parametrize("path", ["./missing", "runs/a/missing"])
def test_a_missing_folder_is_one_beside_the_run_file(tmp_path: Path, path: str) -> None:
    """Wherever the command runs."""
    file = tmp_path / "run.yaml"
    file.write_text(f"run_id: r\nmodel: {{path: {path}}}\n")
    assert load(file).model.path == str(tmp_path / path)
