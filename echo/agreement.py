"""What a trainer and its producers must agree on, sent by each side, so that a difference is an error and not a bad run.

Announcements, progress and heartbeats carry it as readable parts, key by key of the run file, and the model's files by digests:
a folder may lie elsewhere on each host, and may have been saved anew by another version of the library. Weights are left out:
they are pulled. Pure, but for reading the files that it is shown.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from echo import codec
from echo.config import RunConfig
from echo.weights.manifest import MANIFEST_SCHEMA

_LONG = 80
_DIGEST_CHARS = 16
# Of config.json: which program wrote it, from where, and in which precision.
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
# Of tokenizer.json: what makes text into token ids and back. The rest is what its last user had set.
_TOKENIZER_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
_VOCABULARIES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))


def agreement(run: RunConfig, model: Mapping[str, str]) -> dict[str, str]:
    """Values by key, as JSON, or their digest if that is long. model: of `model_files`."""
    values: dict[str, Any] = {
        "mode": run.mode,
        # Sequential mode takes 0.
        "max_staleness": run.staleness_bound,
        "learner.publish_every": run.learner.publish_every,
        **{f"sampling.{name}": value for name, value in run.sampling.model_dump().items()},
        "schema of records": codec.SCHEMA_MAJOR,
        "schema of manifests": int(MANIFEST_SCHEMA.partition(".")[0]),
    }
    if run.mode == "sequential":
        # Anybody's answer to a request must be the same. In async mode producers may sample several tasks for one run.
        values |= {f"task.{name}": getattr(run.task, name) for name in ("name", "params", "chat", "seed")}
    parts = {key: _short(json.dumps(value, sort_keys=True, default=str)) for key, value in values.items()}
    chat = {} if run.task.chat else {"model/chat_template"}
    return parts | {key: digest for key, digest in model.items() if key not in chat}


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """A phrase for each key that both name and that differs, in order; one side may be older, and name less."""
    return [
        f"{key} is {theirs[key][:_LONG]} there and {ours[key]} here" for key in ours if theirs.get(key, ours[key]) != ours[key]
    ]


def model_files(path: str, find: Callable[[str, str], str | None]) -> dict[str, str]:
    """Digests of a model's configuration, tokenizer and chat template, as far as it has them, as "model/<file>".

    find: the place of a file of the model at `path` on this host (transformers' `cached_file`); raises OSError or gives None if
    it has none.
    """

    def read(name: str) -> bytes | None:
        try:
            found = find(path, name)
            return None if found is None else Path(found).read_bytes()
        except OSError:
            return None

    files: dict[str, str] = {}
    config = _object(read("config.json"))
    if config is not None:
        files["model/config.json"] = _digest({key: value for key, value in config.items() if key not in _VOLATILE})
    for names in _VOCABULARIES:
        contents = {name: raw for name in names if (raw := read(name)) is not None}
        if contents:
            for name, raw in contents.items():
                parsed = _object(raw) if name == "tokenizer.json" else None
                files[f"model/{name}"] = _digest(_tokenizer(parsed) if parsed is not None else raw.hex())
            break
    template = read("chat_template.jinja")
    text = (
        template.decode(errors="replace")
        if template is not None
        else (_object(read("tokenizer_config.json")) or {}).get("chat_template")
    )
    if text:
        files["model/chat_template"] = _digest(text)
    return files


def _tokenizer(parsed: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: parsed.get(name) for name in _TOKENIZER_PARTS}
    model = parts["model"]
    if isinstance(model, dict):
        # Merges are written as "a b" by some versions and as ["a", "b"] by others.
        merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model.get("merges") or ()]
        parts["model"] = {"type": model.get("type"), "vocab": model.get("vocab"), "merges": merges}
    return parts


def _object(raw: bytes | None) -> dict[str, Any] | None:
    try:
        parsed = json.loads(raw or b"")
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _digest(value: Any) -> str:
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest()[:_DIGEST_CHARS]


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"digest {_digest(text)}"
