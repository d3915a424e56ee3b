"""The tiny policy: an ordinary model folder, warmed up as far as asked and no further, and the same for the same seed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from echo.config import RunConfig
from echo.errors import TaskError
from producers.engines.transformers import TransformersEngine
from producers.tiny_policy import app, character_tokenizer, make_tiny_policy

TASK = """
run_id: test
model: {path: unused}
task:
  params:
    dataset: rotate_matrix
    dataset_params: {min_n: 2, max_n: 2, min_rotations: 1, max_rotations: 1}
    prompt: "{metadata[matrix]}="
sampling: {max_tokens: 8}
"""


def _run(**params: object) -> RunConfig:
    import yaml

    data = yaml.safe_load(TASK)
    if params:
        data["task"]["params"] = params
    return RunConfig.model_validate(data)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_characters_survive_the_tokenizer_and_capitals_become_small() -> None:
    tokenizer = character_tokenizer()
    text = "[[1, 2]\n a-z~ =?"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer.encode("ABc")) == "abc"
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_the_folder_is_an_ordinary_model_folder(tmp_path: Path) -> None:
    """Model, tokenizer and end token are what the learner and the engine read; the warm-up is on record."""
    warm_up = make_tiny_policy(_run(), tmp_path, seed=3, until=0.01)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.num_parameters() == warm_up.parameters < 400_000
    assert tokenizer.decode(tokenizer.encode("[1]")) == "[1]"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert json.loads((tmp_path / "warm_up.json").read_text()) == warm_up._asdict()
    assert 0.01 <= warm_up.sampled_right < 0.5
    assert TransformersEngine(str(tmp_path), dtype="float32", device="cpu").policy_version == -1


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    weights = []
    for number, seed in enumerate((1, 1, 2)):
        make_tiny_policy(_run(), tmp_path / str(number), seed=seed, until=0.0)
        weights.append(load_file(tmp_path / str(number) / "model.safetensors"))
    first, again, other = weights
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "proj" in name)


def test_a_warm_up_that_does_not_get_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="after 5 supervised steps"):
        make_tiny_policy(_run(), tmp_path, seed=0, until=0.9, most_steps=5)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_task_without_answers_in_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"prompt graph_color/.* has no answer in text"):
        make_tiny_policy(_run(dataset="graph_color"), tmp_path, seed=0)


def test_a_task_that_rewards_only_what_the_policy_can_not_write_is_refused(tmp_path: Path) -> None:
    """In small letters its samples would be counted as right, and none rewarded. Where case is no matter, all is well."""
    with pytest.raises(TaskError, match=r"prompt caesar_cipher/.* wants '[A-Z ]+'; this policy writes no capitals"):
        make_tiny_policy(_run(dataset="caesar_cipher", dataset_params={"max_words": 3}), tmp_path, seed=0)
    one_word = _run(dataset="letter_jumble", dataset_params={"min_words": 1, "max_words": 1}, prompt="?")
    with pytest.raises(TaskError, match="after 1 supervised steps"):
        make_tiny_policy(one_word, tmp_path, seed=0, most_steps=1)


def test_completions_beyond_its_positions_are_told_before_the_warm_up(tmp_path: Path) -> None:
    run = _run(dataset="spell_backward")
    longer = run.model_copy(update={"sampling": run.sampling.model_copy(update={"max_tokens": 1024})})
    with pytest.raises(TaskError, match=r"max_tokens 1024 .* 512 positions: lower sampling\.max_tokens"):
        make_tiny_policy(longer, tmp_path, seed=0)


def test_a_long_warm_up_says_how_far_it_is(tmp_path: Path) -> None:
    run = _run()
    impatient = run.model_copy(update={"limits": run.limits.model_copy(update={"waiting_s": 1e-6})})
    with capture_logs() as logs:
        make_tiny_policy(impatient, tmp_path, seed=0, until=0.0)
    assert "0% of samples to be right" in logs[0]["event"]
    assert "of 5000 supervised steps" in logs[0]["event"]


def test_the_command_says_what_it_did_and_what_is_wrong(tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(TASK)
    arguments = ["--task-file", str(run_file), "--out", str(tmp_path / "model"), "--until", "0"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "warmed up in 5 steps" in done.stdout
    again = CliRunner().invoke(app, arguments)
    assert (again.exit_code, again.stderr) == (1, f"{tmp_path / 'model'} holds a model already: choose another --out\n")
    arguments[3] = str(tmp_path / "other")
    run_file.write_text(TASK.replace("rotate_matrix", "rotate_matrx"))
    failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 1
    assert "did you mean rotate_matrix?" in failed.stderr
