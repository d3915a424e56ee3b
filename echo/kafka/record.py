"""A record from the client's message, with headers that are made when they are looked at.

Refuses to touch what the client leaves behind when it fails at that.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from confluent_kafka import Message

from echo.errors import CorruptRecordError
from echo.log import LogRecord

# The client's method may return a list although it failed, and leave its exception set. Called from C, Python looks for that
# and raises SystemError. So does `message.headers()` at first, but no more once the interpreter has specialised the call: the
# exception then comes up in some other call.
_headers_of: Callable[[Message], list[tuple[str, bytes | None]] | None] = operator.methodcaller("headers")


class _Headers(Sequence[tuple[str, bytes | None]]):
    """A message's headers, made when they are looked at: that costs more than all else about a record dropped by its key.

    Raises CorruptRecordError, each time, for headers that the client can't make.
    """

    __slots__ = ("_made", "_message", "_problem")

    def __init__(self, message: Message) -> None:
        self._message: Message | None = message
        self._made: list[tuple[str, bytes | None]] = []
        self._problem = ""

    def __iter__(self) -> Iterator[tuple[str, bytes | None]]:
        return iter(self._get())

    def __len__(self) -> int:
        return len(self._get())

    def __getitem__(self, at: Any) -> Any:
        return self._get()[at]

    def __eq__(self, other: object) -> bool:
        return self._get() == (list(other) if isinstance(other, Sequence) else other)

    def __repr__(self) -> str:
        try:
            return repr(self._get())
        except CorruptRecordError as error:
            return f"<{error}>"

    def _get(self) -> list[tuple[str, bytes | None]]:
        message, self._message = self._message, None
        if message is not None:
            try:
                self._made = _headers_of(message) or []
            except (SystemError, UnicodeDecodeError):
                # The client decodes names as UTF-8 and ignores a failure. The list that it gives all the same has a null
                # pointer in it, which ends the process when it is touched: never ask a second time.
                self._problem = "the name of a header is not UTF-8, so that no header of the record can be read"
        if self._problem:
            raise CorruptRecordError(self._problem)
        return self._made


def record_of(message: Message) -> LogRecord:
    # A message without an error stands somewhere: the client's None is for those that were never sent.
    return LogRecord._make(
        (
            message.topic(),
            message.partition(),
            message.offset(),
            message.key(),
            _Headers(message),
            message.value(),
            message.timestamp()[1],
            "",
            1,
        )
    )
