"""Prompts become tokens: as they are, or in the tokenizer's chat template."""

from pathlib import Path

import pytest
from transformers import Gemma3TextConfig, PretrainedConfig, Qwen3Config

from echo.errors import ConfigError
from producers.tiny_policy import character_tokenizer
from producers.wiring import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def test_a_plain_prompt_is_encoded_as_it_is(tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), chat=False)
    assert tokenizer.decode(tokenizer.encode("12="), skip_special_tokens=False) == "12="


def test_a_chat_prompt_goes_into_the_template(tmp_path: Path) -> None:
    plain = character_tokenizer()
    plain.chat_template = TEMPLATE
    plain.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), chat=True)
    assert tokenizer.decode(tokenizer.encode("12="), skip_special_tokens=False) == "<u>12=<a>"


def test_a_tokenizer_without_template_is_a_clear_error(tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"task\.chat"):
        load_tokenizer(str(tmp_path), chat=True)


@pytest.mark.parametrize("config", [Qwen3Config(), Gemma3TextConfig()], ids=lambda config: config.model_type)
def test_a_model_saved_without_its_tokenizer_is_told(tmp_path: Path, config: PretrainedConfig) -> None:
    """transformers makes one up that knows special tokens alone: prompts would be empty, or unknown."""
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path: .* has no tokenizer's files"):
        load_tokenizer(str(tmp_path), chat=False)


def test_a_folder_without_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_tokenizer(str(tmp_path), chat=False)
