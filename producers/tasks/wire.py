"""How a scorer pool and its workers talk: frames of MessagePack over a pipe, each behind its length.

Refuses pickle, and frames beyond a bound. A tuple stays a tuple, whole numbers of any size and fractions stay exact: verifiers
compare with ==.

    to a worker     {scorer, params, memory_mib} once, then [[text, reference], ...] per batch
    from a worker   `Ready` once, then a `Reply` per completion, in order
"""

import numbers
import struct
from fractions import Fraction
from typing import Any, TypeVar

import msgspec

from echo.errors import TaskError

LENGTH = struct.Struct("<I")
# A reply is a few numbers and a cut error text; a worker that executed foreign code may send anything.
MAX_REPLY_BYTES = 1 << 20

_TUPLE, _LARGE, _FRACTION = 1, 2, 3
# MessagePack's own whole numbers.
_LOWEST, _HIGHEST = -(2**63), 2**64 - 1


class Ready(msgspec.Struct):
    """The scorer is imported, or why it is not. confined: what the worker has taken from itself."""

    error: str | None
    confined: list[str]


class Reply(msgspec.Struct, array_like=True):
    """A completion's reward, or what its scorer raised. index: within the batch."""

    index: int
    error: str | None
    reward: float
    components: dict[str, float]


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Ready | Reply], Any] = {kind: msgspec.msgpack.Decoder(kind) for kind in (Ready, Reply)}
R = TypeVar("R", Ready, Reply)


def encode_reply(message: Ready | Reply) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_reply(body: bytes, kind: type[R]) -> R:
    """Raises ValueError (msgspec's own derives from it) where the body is none."""
    reply: R = _decoders[kind].decode(body)
    return reply


def encode(message: Any) -> bytes:
    """One frame of plain data. Raises TaskError where the message is more than that."""
    try:
        body = _encoder.encode(_tag(message))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TaskError(f"a prompt's reference can't cross to the scoring worker, it must be plain data: {error}") from error
    return LENGTH.pack(len(body)) + body


def decode(body: bytes | memoryview) -> Any:
    """The body of a frame made by `encode`."""
    return _plain.decode(body)


def _tag(value: Any) -> Any:
    if isinstance(value, dict):
        return {_tag(key): _tag(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_tag(item) for item in value]
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, _encoder.encode([_tag(item) for item in value]))
    if value is None or type(value) in (str, float, bool, bytes):
        return value
    # Also numpy's and sympy's.
    if isinstance(value, numbers.Integral):
        whole = int(value)
        # Hexadecimal: Python refuses to read so many decimal digits.
        return whole if _LOWEST <= whole <= _HIGHEST else msgspec.msgpack.Ext(_LARGE, format(whole, "x").encode())
    if isinstance(value, numbers.Rational):
        return msgspec.msgpack.Ext(_FRACTION, _encoder.encode([_tag(value.numerator), _tag(value.denominator)]))
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not plain data")


def _restore(code: int, data: memoryview) -> Any:
    if code == _LARGE:
        return int(bytes(data), 16)
    if code == _FRACTION:
        return Fraction(*decode(data))
    if code != _TUPLE:
        raise ValueError(f"unknown extension {code}")
    return tuple(decode(data))


_plain = msgspec.msgpack.Decoder(ext_hook=_restore)
