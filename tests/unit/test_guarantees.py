"""No promise without its test: every test that docs/guarantees.md names is there."""

import ast
import re

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)


def _tests_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_named_test_exists() -> None:
    assert len(NAMED) > 30
    missing = [
        f"{path}::{name}" for path, name in NAMED if not (ROOT / path).is_file() or (name and name not in _tests_in(path))
    ]
    assert missing == []


def test_every_promise_names_a_test() -> None:
    """A promise is a paragraph that opens in bold; the list after it names its tests."""
    paragraphs = PAGE.split("\n\n")
    for promise, after in zip(paragraphs, [*paragraphs[1:], ""], strict=True):
        if promise.startswith("**"):
            assert "`tests/" in after, promise.splitlines()[0]
