"""Checks the free `params` of an engine or a task against what it takes.

Refuses unknown keys, naming the nearest known one, and values of another type: a run file says what it means.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from echo.errors import ConfigError


class Params(BaseModel):
    """Base of every engine's and task's parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


P = TypeVar("P", bound=Params)


def validate(kind: type[P], params: Mapping[str, Any], where: str) -> P:
    """Read `params` as `kind`. Raises ConfigError naming `where` (a key of the run file), the key and the remedy."""
    try:
        return kind.model_validate(dict(params))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item, kind, where) for item in error.errors())) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"


def _explain(item: Any, kind: type[Params], where: str) -> str:
    key = ".".join([where, *(str(part) for part in item["loc"])])
    if item["type"] == "extra_forbidden":
        return f"unknown key {key}: {nearest(str(item['loc'][-1]), kind.model_fields)}"
    if item["type"] == "missing":
        return f"{key} is missing"
    return f"{key}: {item['msg'].removeprefix('Value error, ')}"
