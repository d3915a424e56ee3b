"""Prompts become tokens: as they are, or in the tokenizer's chat template."""

from pathlib import Path

import pytest

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


def test_a_folder_without_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_tokenizer(str(tmp_path), chat=False)
