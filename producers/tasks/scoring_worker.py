"""A scoring worker: reads completions from its standard input, scores them, answers on its standard output.

    python -m producers.tasks.scoring_worker PARENT_PID      started by `producers.tasks.scoring.ScorerPool`, speaks `wire`

Refuses everything that scoring does not need (`sandbox`), and ends with the process that started it.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from echo.process import die_with_parent
from producers.tasks import wire
from producers.tasks.sandbox import confine, limit_memory

_ERROR_CHARACTERS = 500

Scorer = Callable[[str, Mapping[str, Any], Mapping[str, Any]], tuple[float, Mapping[str, float]]]


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    requests, replies = _take_pipes()
    hello = _read(requests)
    if hello is None:
        return
    try:
        in_force = limit_memory(hello["memory_mib"])
        scorer = _load(hello["scorer"])
    except Exception as error:  # noqa: BLE001 - importing foreign code may raise anything; the pool reports it
        _write(replies, wire.Ready(_phrase(error), []))
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    in_force += confine()
    _write(replies, wire.Ready(None, in_force))
    while (batch := _read(requests)) is not None:
        for index, (text, reference) in enumerate(batch):
            _write(replies, _score(scorer, index, text, reference, hello["params"]))


def _score(scorer: Scorer, index: int, text: str, reference: Any, params: Any) -> wire.Reply:
    try:
        reward, components = scorer(text, reference, params)
        return wire.Reply(index, None, float(reward), {str(name): float(value) for name, value in components.items()})
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a scorer may execute foreign code, which may raise anything
        return wire.Reply(index, _phrase(error), 0.0, {})


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes to ourselves: what a scorer reads or prints must not break the framing."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return requests, replies


def _load(name: str) -> Scorer:
    module, _, attribute = name.partition(":")
    scorer: Scorer = getattr(importlib.import_module(module), attribute)
    return scorer


def _read(source: BinaryIO) -> Any:
    """The next message, None at the end."""
    head = source.read(wire.LENGTH.size)
    if len(head) < wire.LENGTH.size:
        return None
    (length,) = wire.LENGTH.unpack(head)
    body = source.read(length)
    return wire.decode(body) if len(body) == length else None


def _write(sink: BinaryIO, message: wire.Ready | wire.Reply) -> None:
    sink.write(wire.encode_reply(message))
    sink.flush()


def _phrase(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
    return text.encode(errors="backslashreplace").decode()


if __name__ == "__main__":
    main()
