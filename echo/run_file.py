"""The run file, read and written: overrides as `learner.lr=1e-4`, relative paths as relative to the file.

Refuses unknown keys (naming the nearest known one), and keeps secrets out of what it prints. What the keys mean and which
values they take: `echo/config.py`.
"""

import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, SecretStr, ValidationError

from echo.config import RunConfig
from echo.errors import ConfigError
from echo.model_path import names_folder


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply `dotted.key=value` overrides (values are YAML).

    Raises ConfigError naming the file or override, the key and, for an unknown one, the nearest known key.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no text in UTF-8, as a run file is: {error.reason} at byte {error.start}") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a run file is a mapping of keys, like 'run_id: my-run'")
    return resolve(data, overrides, path)


def resolve(data: dict[str, Any], overrides: Sequence[str], path: Path) -> RunConfig:
    """The run of a run file's contents, which take the overrides. path: where the file lies, or will. Raises ConfigError."""
    for override in overrides:
        _apply(data, override)
    try:
        run = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(explain(item, RunConfig) for item in error.errors())) from None
    return _anchor(run, path.resolve().parent)


def dump(run: RunConfig) -> str:
    """The resolved run file as YAML, secrets masked."""
    return yaml.safe_dump(json.loads(run.model_dump_json()), sort_keys=False)


def save(run: RunConfig, path: Path) -> None:
    """Write a run file that `load` reads back, secrets included, readable by its owner only.

    Raises ConfigError if it can't be written; a file that was there before is then as it was.
    """
    text = yaml.safe_dump(_open_secrets(run.model_dump()), sort_keys=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch(mode=0o600)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} can't be written: {error.strerror}: free space there, or choose another folder") from None


def _open_secrets(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {name: _open_secrets(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_open_secrets(item) for item in value]
    return value


_TLS_FILES = ("tls_cert", "tls_key", "tls_ca")


def _anchor(run: RunConfig, folder: Path) -> RunConfig:
    """Make relative paths absolute, `~` being the home folder. A model that exists beside the file, or can be none else, is a
    folder."""

    def at(path: Path | str) -> Path:
        # Not Path.expanduser, which raises where there is no such user.
        return folder / os.path.expanduser(path)

    model = run.model
    local = at(model.path)
    if local.exists() or names_folder(model.path):
        model = model.model_copy(update={"path": str(local)})
    checkpoint = run.checkpoint.model_copy(update={"dir": at(run.checkpoint.dir)})
    if isinstance(checkpoint.resume, Path):
        checkpoint = checkpoint.model_copy(update={"resume": at(checkpoint.resume)})
    topics, broker = run.topics, run.broker
    if topics.file is not None:
        topics = topics.model_copy(update={"file": at(topics.file)})
    if broker.apache_home is not None:
        broker = broker.model_copy(update={"apache_home": at(broker.apache_home)})
    return run.model_copy(
        update={
            "model": model,
            "topics": topics,
            "broker": broker,
            "checkpoint": checkpoint,
            "weights": run.weights.model_copy(
                update={"dir": at(run.weights.dir)}
                | {name: at(path) for name in _TLS_FILES if (path := getattr(run.weights, name)) is not None}
            ),
        }
    )


def _apply(data: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise ConfigError(f"override {override!r} is not KEY=VALUE, like learner.lr=1e-4")
    parts = _split(name)
    place = data
    for part in parts[:-1]:
        inner = place.setdefault(part, {})
        if inner is None:
            inner = place[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {part} is a value, not a section")
        place = inner
    try:
        place[parts[-1]] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: {text!r} is not a YAML value") from None


def _split(name: str) -> list[str]:
    """Split a dotted key at the model's own sections: below a free mapping (broker.settings) dots belong to the key."""
    parts: list[str] = []
    section: type[BaseModel] | None = RunConfig
    rest = name
    while section is not None:
        part, dot, rest_after = rest.partition(".")
        parts.append(part)
        if not dot:
            return parts
        rest = rest_after
        section = _section_at(section, part)
    parts.append(rest)
    return parts


def _section_at(section: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model behind a key, None where the key is unknown or a plain value."""
    field = section.model_fields.get(name)
    candidates = () if field is None else (field.annotation, *get_args(field.annotation))
    return next((a for a in candidates if isinstance(a, type) and issubclass(a, BaseModel)), None)


def explain(item: Any, root: type[BaseModel]) -> str:
    """One pydantic error of validating `root` as a phrase that names the key and, for an unknown one, the nearest known."""
    location = [str(part) for part in item["loc"]]
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        known = _keys_beside(location, root)
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.4)
        hint = f"did you mean {'.'.join([*location[:-1], near[0]])}?" if near else f"known here: {', '.join(known)}"
        return f"unknown key {key}: {hint}"
    if item["type"] == "missing":
        return f"{key} is missing"
    message = item["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def _keys_beside(location: Sequence[str], root: type[BaseModel]) -> list[str]:
    section = root
    for part in location[:-1]:
        inner = _section_at(section, part)
        if inner is None:
            return []
        section = inner
    return sorted(section.model_fields)
