"""Token arrays <-> the maps that stand for them in a record (see `codec`). Pure.

Works on many arrays at a time: numpy's cost per call is more than its cost per token, and a record has few thousand tokens.
Refuses to judge anything but the arrays themselves.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from echo.errors import CorruptRecordError

_U1, _U2, _U4, _I4 = np.dtype("u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i4")
_TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"<u2": _U2, "<u4": _U4}
_LOGPROB_DTYPES: dict[str, np.dtype[Any]] = {"<f4": np.dtype("<f4"), "<f2": np.dtype("<f2")}
_MASK_DTYPES: dict[str, np.dtype[Any]] = {"|b1": np.dtype("|b1")}
# What most loss masks are: records share it, read only.
_ALL_TRUE = np.ones(2**16, dtype=np.bool_)
_ALL_TRUE.flags.writeable = False

_MAX_TOKEN_ID = 2**31 - 1

TokenIds = npt.NDArray[np.int32]


class WireArray(msgspec.Struct, omit_defaults=True, gc=False):
    """One array as it stands in a record."""

    dtype: str
    data: bytes
    high: bytes | None = None


class TokenPair(NamedTuple):
    """Prompt and completion ids of one record, int32 (P,) and (C,), and the highest of them (-1 where there is none)."""

    prompt: TokenIds
    completion: TokenIds
    highest: int


def pack_ids(name: str, arrays: Sequence[TokenIds]) -> list[WireArray]:
    """Each array on its own merits: what becomes of one does not depend on the others.

    Raises CorruptRecordError, with `name`, where one holds a negative id.
    """
    filled = [array for array in arrays if len(array)]
    if not filled:
        return [WireArray("<u2", b"") for _ in arrays]
    joined = np.concatenate(filled).astype(_I4, copy=False)
    starts = [0, *accumulate(len(array) for array in filled)]
    highest = np.maximum.reduceat(joined.view(_U4), starts[:-1]).tolist()
    if max(highest) > _MAX_TOKEN_ID:
        raise CorruptRecordError(f"{name} holds a negative token id")
    low = joined.view(_U2)[::2].tobytes()
    high = joined.view(_U1)[2::4].tobytes() if max(highest) >= 2**16 else b""
    packed = iter(
        WireArray("<u2", low[2 * a : 2 * b])
        if top < 2**16
        else WireArray("<u2", low[2 * a : 2 * b], high[a:b])
        if top < 2**24
        else WireArray("<u4", joined[a:b].tobytes())
        for a, b, top in zip(starts, starts[1:], highest, strict=False)
    )
    return [next(packed) if len(array) else WireArray("<u2", b"") for array in arrays]


def pack_logprobs(logprobs: npt.NDArray[Any]) -> WireArray:
    dtype = "<f2" if logprobs.dtype == np.float16 else "<f4"
    return WireArray(dtype, logprobs.astype(_LOGPROB_DTYPES[dtype], copy=False).tobytes())


def pack_mask(mask: npt.NDArray[np.bool_]) -> WireArray | None:
    """None where every token counts."""
    data = mask.astype(np.bool_, copy=False).tobytes()
    return WireArray("|b1", data) if b"\0" in data else None


def unpack_pairs(pairs: Sequence[tuple[WireArray, WireArray]]) -> list[TokenPair | CorruptRecordError]:
    """Prompt and completion ids of many records, in order; in the place of those that can't be read, why."""
    found: list[TokenPair | CorruptRecordError | None] = [None] * len(pairs)
    lows: list[bytes] = []
    highs: list[bytes] = []
    split: list[tuple[int, int, int]] = []
    for index, (prompt, completion) in enumerate(pairs):
        if prompt.high is not None and completion.high is not None and prompt.dtype == completion.dtype == "<u2":
            p, c = len(prompt.high), len(completion.high)
            if p and c and len(prompt.data) == 2 * p and len(completion.data) == 2 * c:
                lows += (prompt.data, completion.data)
                highs += (prompt.high, completion.high)
                split.append((index, p, c))
                continue
        try:
            found[index] = _pair(prompt, completion)
        except CorruptRecordError as error:
            found[index] = error
    if split:
        ids = _join(b"".join(lows), b"".join(highs))
        starts = [0, *accumulate(p + c for _, p, c in split)]
        highest = np.maximum.reduceat(ids, starts[:-1]).tolist()
        for (index, p, _), a, b, top in zip(split, starts, starts[1:], highest, strict=False):
            # A copy: a view would keep the ids of all these records in memory for as long as one of them waits.
            whole = ids[a:b].copy()
            found[index] = TokenPair(whole[:p], whole[p:], top)
    return [pair for pair in found if pair is not None]


def unpack_logprobs(array: WireArray) -> npt.NDArray[Any]:
    """A read-only view of the record. Raises CorruptRecordError."""
    return _unpack("logprobs", array, _LOGPROB_DTYPES)


def unpack_mask(array: WireArray | None, completion: int) -> npt.NDArray[np.bool_]:
    """bool (completion,), read only, where there is no array. Raises CorruptRecordError."""
    if array is None:
        return _ALL_TRUE[:completion] if completion <= len(_ALL_TRUE) else np.ones(completion, dtype=np.bool_)
    values = _unpack("loss_mask", array, _MASK_DTYPES)
    if array.data.translate(None, b"\0\1"):
        raise CorruptRecordError("loss_mask holds a byte other than 0 and 1")
    return values


def _pair(prompt: WireArray, completion: WireArray) -> TokenPair:
    p, c = _unpack_ids("prompt_ids", prompt), _unpack_ids("completion_ids", completion)
    return TokenPair(p, c, max((int(np.maximum.reduce(ids)) for ids in (p, c) if len(ids)), default=-1))


def _unpack(name: str, array: WireArray, allowed: dict[str, np.dtype[Any]]) -> npt.NDArray[Any]:
    """The values as they lie in the record. `high` belongs to token ids and is left to `_unpack_ids`."""
    dtype = allowed.get(array.dtype)
    if dtype is None:
        raise CorruptRecordError(f"{name} has dtype {array.dtype[:20]!r}, not one of {', '.join(allowed)}")
    if len(array.data) % dtype.itemsize:
        raise CorruptRecordError(f"{name} has {len(array.data)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(array.data, dtype=dtype)


def _unpack_ids(name: str, array: WireArray) -> TokenIds:
    values = _unpack(name, array, _TOKEN_DTYPES)
    if array.high is None:
        if array.dtype == "<u4" and len(values) and int(np.maximum.reduce(values)) > _MAX_TOKEN_ID:
            raise CorruptRecordError(f"{name} holds a token id above {_MAX_TOKEN_ID}")
        return values.astype(np.int32)
    if array.dtype != "<u2" or len(array.high) != len(values):
        raise CorruptRecordError(f"{name} has {len(array.high)} high bytes for {len(values)} values of dtype {array.dtype}")
    return _join(array.data, array.high)


def _join(low: bytes, high: bytes) -> TokenIds:
    """Ids of their low 16 bits and the byte above them."""
    halves = np.empty((len(high), 2), dtype=_U2)
    halves[:, 0] = np.frombuffer(low, dtype=_U2)
    halves[:, 1] = np.frombuffer(high, dtype=_U1)
    return halves.view(_I4).reshape(len(high)).astype(np.int32, copy=False)
