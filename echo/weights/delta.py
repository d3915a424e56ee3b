"""What changed between two versions of a tensor, lossless: a policy's step changes few of its bf16 values, by a unit in the
last place mostly, so the change is a fiftieth of the tensor and less. Pure functions over bytes.

A delta is made of the tensor's words (1, 2, 4 or 8 bytes, little-endian, as unsigned integers; no float is ever computed,
so NaN payloads and -0.0 survive):

    b"EDL1", u8 word bytes, 3 zero bytes, u64 bytes of the tensor, 32 bytes blake3 of the result
    for each 2**20 words, in order:
        u32 changed words, u32 gap bytes, u32 gap bytes compressed, u32 values compressed
        zstd frame: gaps
        zstd frame: values

A gap is the number of unchanged words before a changed one: 255 stands for 255 unchanged words with more to come, a smaller
byte ends the gap. A value is new - old, modulo 2**bits, zigzag (0, -1, 1, -2, ... -> 0, 1, 2, 3, ...), stored as byte planes:
the lowest bytes of all values first. Most of them are then 1 or 2, and zstd's entropy coder brings gaps and values close to
their entropy: about 9 bits for each changed word.

The result's digest travels inside: `patch` and `apply_delta` return the right tensor or raise DeltaError, whatever they are
given. Refuses to allocate by what a delta claims: every size is checked against the tensor's first.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3

from echo.errors import DeltaError

Bytes = bytes | bytearray | memoryview

_MAGIC = b"EDL1"
_HEADER = struct.Struct("<4sB3xQ32s")
_BLOCK = struct.Struct("<IIII")
_BLOCK_WORDS = 2**20
_WORDS: dict[int, np.dtype[np.unsignedinteger]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
# Higher levels find nothing more: what is left is entropy.
_LEVEL = 1


class Header(NamedTuple):
    """word_bytes: of one element. nbytes: of the tensor, before and after. digest: blake3 of the result, in hex."""

    word_bytes: int
    nbytes: int
    digest: str


def encode_delta(old: Bytes, new: Bytes, word_bytes: int) -> bytes:
    """The delta that makes `old` into `new`: as many bytes each, elements of `word_bytes` = 1, 2, 4 or 8.

    Raises DeltaError for sizes that don't fit.
    """
    before = _flat(old)
    if len(before) != len(_flat(new)):
        raise DeltaError(f"no delta between {len(before):,} and {len(_flat(new)):,} bytes")
    delta = encode_from(lambda start, stop: before[start:stop], new, word_bytes)
    assert delta is not None, "there was no limit"
    return delta


def encode_from(
    read_old: Callable[[int, int], Bytes],
    new: Bytes,
    word_bytes: int,
    *,
    digest: str | None = None,
    limit: int | None = None,
) -> bytes | None:
    """`encode_delta` for an old tensor that is read in pieces, in order: `read_old(start, stop)` gives those bytes.

    digest: of `new`, where it is known. limit: None is returned, early, where the delta would have `limit` bytes or more.
    """
    after = _flat(new)
    dtype = _WORDS.get(word_bytes)
    if dtype is None or len(after) % word_bytes:
        raise DeltaError(f"{len(after):,} bytes don't divide into words of {word_bytes} bytes ({', '.join(map(str, _WORDS))})")
    result = bytes.fromhex(digest) if digest is not None else blake3(after, max_threads=blake3.AUTO).digest()
    parts = [_HEADER.pack(_MAGIC, word_bytes, len(after), result)]
    size = _HEADER.size
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    step = _BLOCK_WORDS * word_bytes
    for start in range(0, len(after), step):
        stop = min(start + step, len(after))
        block = _encode_block(np.frombuffer(read_old(start, stop), dtype), np.frombuffer(after[start:stop], dtype), compressor)
        parts += block
        size += sum(map(len, block))
        if limit is not None and size >= limit:
            return None
    return b"".join(parts)


def apply_delta(old: Bytes, delta: Bytes, *, where: str = "delta") -> bytearray:
    """The new tensor's bytes. Raises DeltaError, naming `where`, unless `delta` was made from exactly these old bytes."""
    new = bytearray(_flat(old))
    patch(memoryview(new), delta, where=where)
    return new


def patch(data: memoryview, delta: Bytes, *, where: str = "delta") -> str:
    """Apply a delta to a tensor's bytes in place; returns the digest of the result, which was verified.

    Raises DeltaError, naming `where`; `data` is then spoilt.
    """
    raw = _flat(delta)
    words = data.cast("B") if data.nbytes else memoryview(bytearray())
    header = read_header(raw, where=where)
    if header.nbytes != len(words):
        raise DeltaError(f"{where}: is for a tensor of {header.nbytes:,} bytes, not of {len(words):,}")
    dtype = _WORDS[header.word_bytes]
    array = np.frombuffer(words, dtype)
    decompressor = zstandard.ZstdDecompressor()
    at = _HEADER.size
    for start in range(0, len(array), _BLOCK_WORDS):
        at = _patch_block(array[start : start + _BLOCK_WORDS], raw, at, decompressor, where)
    if at != len(raw):
        raise DeltaError(f"{where}: {len(raw) - at:,} bytes too many")
    if (found := blake3(words, max_threads=blake3.AUTO).hexdigest()) != header.digest:
        raise DeltaError(f"{where}: makes a tensor of digest {found}, not {header.digest}: it was made from another one")
    return header.digest


def read_header(delta: Bytes, *, where: str = "delta") -> Header:
    """What a delta says about itself. Raises DeltaError, naming `where`."""
    if len(delta) < _HEADER.size:
        raise DeltaError(f"{where}: {len(delta)} bytes are no delta")
    magic, word_bytes, nbytes, digest = _HEADER.unpack_from(delta)
    if magic != _MAGIC or word_bytes not in _WORDS or nbytes % word_bytes:
        raise DeltaError(f"{where}: not a delta, or of a format that this reader does not know")
    return Header(word_bytes, nbytes, digest.hex())


def _encode_block(
    old: npt.NDArray[np.unsignedinteger], new: npt.NDArray[np.unsignedinteger], compressor: zstandard.ZstdCompressor
) -> list[bytes]:
    changed = np.flatnonzero(old != new)
    if not len(changed):
        return [_BLOCK.pack(0, 0, 0, 0)]
    long, rest = np.divmod(np.diff(changed, prepend=-1) - 1, 255)
    ends = np.cumsum(long + 1) - 1
    gaps = np.full(int(ends[-1]) + 1, 255, np.uint8)
    gaps[ends] = rest
    values = new[changed] - old[changed]
    bits = values.dtype.type(8 * values.itemsize - 1)
    values = (values << values.dtype.type(1)) ^ -(values >> bits)
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T)
    packed_gaps, packed_values = compressor.compress(gaps.data), compressor.compress(planes.data)
    return [_BLOCK.pack(len(changed), len(gaps), len(packed_gaps), len(packed_values)), packed_gaps, packed_values]


def _patch_block(
    words: npt.NDArray[np.unsignedinteger], raw: memoryview, at: int, decompressor: zstandard.ZstdDecompressor, where: str
) -> int:
    """Patch one block, whose record begins at `at`; returns where the next one begins."""
    if len(raw) - at < _BLOCK.size:
        raise DeltaError(f"{where}: ends in mid-block, after {len(raw):,} bytes")
    count, gap_bytes, packed_gaps, packed_values = _BLOCK.unpack_from(raw, at)
    at += _BLOCK.size
    if count > len(words) or gap_bytes > len(words) or gap_bytes < count:
        raise DeltaError(f"{where}: {count:,} changes in {gap_bytes:,} gap bytes, for {len(words):,} words")
    if len(raw) - at < packed_gaps + packed_values:
        raise DeltaError(f"{where}: ends in mid-block, after {len(raw):,} bytes")
    if not count:
        if gap_bytes or packed_gaps or packed_values:
            raise DeltaError(f"{where}: a block without changes has content")
        return at
    gaps = np.frombuffer(_unpack(raw[at : at + packed_gaps], gap_bytes, decompressor, where), np.uint8)
    at += packed_gaps
    size = count * words.itemsize
    planes = np.frombuffer(_unpack(raw[at : at + packed_values], size, decompressor, where), np.uint8)
    at += packed_values
    ends = np.flatnonzero(gaps != 255)
    if len(ends) != count or ends[-1] != len(gaps) - 1:
        raise DeltaError(f"{where}: the gaps are not those of {count:,} changes")
    # How far each byte moves on: past the unchanged words, and past the changed one where the gap ends.
    changed = np.cumsum(gaps + (gaps != 255).astype(np.int64))[ends] - 1
    if changed[-1] >= len(words):
        raise DeltaError(f"{where}: a change lies behind the tensor's end")
    values = np.ascontiguousarray(planes.reshape(words.itemsize, count).T).view(words.dtype)[:, 0]
    one = words.dtype.type(1)
    words[changed] += (values >> one) ^ -(values & one)
    return at


def _unpack(frame: memoryview, size: int, decompressor: zstandard.ZstdDecompressor, where: str) -> bytes:
    try:
        # Checked before anything is allocated: a frame may claim any size.
        if zstandard.frame_content_size(frame) != size:
            raise DeltaError(f"{where}: a frame does not hold the {size:,} bytes that it should")
        unpacked = decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"{where}: a frame can't be decompressed: {error}") from None
    if len(unpacked) != size:
        raise DeltaError(f"{where}: a frame held {len(unpacked):,} bytes instead of {size:,}")
    return unpacked


def _flat(data: Bytes) -> memoryview:
    view = memoryview(data)
    # A view with a zero in its shape can't be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
