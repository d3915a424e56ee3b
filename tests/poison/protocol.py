"""Batches of records as bytes of our own, and a Produce request that sends them as they are: what no client would write.

    with RawProducer(broker.bootstrap_servers) as raw:
        answer = raw.produce("topic", 0, batch([record(b"value", headers=[(b"\\xff", b"")])], codec=ZSTD))

Refuses to check anything: wrong counts, offsets, sizes, sums and codecs are what it is for. Record batch format 2 alone,
without authentication.
"""

import gzip
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np
import zstandard

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
TRANSACTIONAL, CONTROL = 1 << 4, 1 << 5

RawHeader = tuple[bytes | None, bytes | None]

_TIMEOUT_S = 30.0
_PRODUCE, _VERSION = 0, 8
# UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER
_NOT_YET = (3, 6)


class Answer(NamedTuple):
    """What the broker says of one batch: error 0 and the offset it was given, or an error code of Kafka's and its message."""

    error: int
    base_offset: int
    message: str


def varint(number: int) -> bytes:
    """Zigzag, as lengths and deltas inside a record are."""
    left = (number << 1) ^ (number >> 63) if number < 0 else number << 1
    left &= 2**64 - 1
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


def sized(raw: bytes | None) -> bytes:
    return varint(-1) if raw is None else varint(len(raw)) + raw


def record(
    value: bytes | None,
    *,
    key: bytes | None = None,
    headers: Sequence[RawHeader] = (),
    offset_delta: int = 0,
    timestamp_delta: int = 0,
    attributes: int = 0,
    header_count: int | None = None,
    length: int | None = None,
    tail: bytes = b"",
) -> bytes:
    """One record. header_count, length: what it claims, where that is not what it has; tail: bytes after its headers."""
    body = b"".join(
        (
            struct.pack(">b", attributes),
            varint(timestamp_delta),
            varint(offset_delta),
            sized(key),
            sized(value),
            varint(len(headers) if header_count is None else header_count),
            *(sized(name) + sized(content) for name, content in headers),
            tail,
        )
    )
    return varint(len(body) if length is None else length) + body


def batch(
    records: Sequence[bytes],
    *,
    codec: int = NONE,
    packed: bytes | None = None,
    attributes: int = 0,
    count: int | None = None,
    last_offset_delta: int | None = None,
    base_offset: int = 0,
    timestamp: int | None = None,
    max_timestamp: int | None = None,
    producer: tuple[int, int, int] = (-1, -1, -1),
    magic: int = 2,
    crc: int | None = None,
    length: int | None = None,
) -> bytes:
    """A batch of what `record` made. packed: its records' bytes as they go out, compressed or not.

    producer: id, epoch, sequence. codec: the number it names, and packs with where it knows how. Others say what it claims.
    """
    body = pack(b"".join(records), codec) if packed is None else packed
    # Of now: retention would take older ones away while a test reads.
    timestamp = int(time.time() * 1000) if timestamp is None else timestamp
    number = len(records) if count is None else count
    after_crc = (
        struct.pack(
            ">hiqqqhii",
            attributes | codec,
            number - 1 if last_offset_delta is None else last_offset_delta,
            timestamp,
            timestamp if max_timestamp is None else max_timestamp,
            *producer,
            number,
        )
        + body
    )
    sum_ = crc32c(after_crc) if crc is None else crc
    size = len(after_crc) + 9 if length is None else length
    return struct.pack(">qiibI", base_offset, size, -1, magic, sum_) + after_crc


def pack(raw: bytes, codec: int) -> bytes:
    if codec == GZIP:
        return gzip.compress(raw, 1, mtime=0)
    if codec == SNAPPY:
        return _snappy(raw)
    if codec == LZ4:
        return _lz4([_lz4_stored(raw[at : at + 2**16]) for at in range(0, len(raw), 2**16)])
    if codec == ZSTD:
        return zstandard.ZstdCompressor(level=1).compress(raw)
    return raw


def bomb(nbytes: int, codec: int, *, key: bytes | None = None, headers: Sequence[RawHeader] = (), span: int = 1) -> bytes:
    """A batch of `span` records, the last of which has a value of `nbytes` zeros, in a few kilobytes."""
    before = b"".join(record(b"small", key=key, offset_delta=number) for number in range(span - 1))
    tail = varint(len(headers)) + b"".join(sized(name) + sized(content) for name, content in headers)
    start = b"\0" + varint(0) + varint(span - 1) + sized(key) + varint(nbytes)
    start = before + varint(len(start) + nbytes + len(tail)) + start
    return batch([], codec=codec, packed=_zeros(start, nbytes, tail, codec), count=span)


def _zeros(start: bytes, nbytes: int, tail: bytes, codec: int) -> bytes:
    pieces = [start, *_runs(nbytes), tail]
    if codec == ZSTD:
        packer = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
        return b"".join([*map(packer.compress, pieces), packer.flush()])
    if codec == LZ4:
        return _lz4([_lz4_stored(start), *_lz4_zeros(nbytes), _lz4_stored(tail)])
    assert codec == GZIP, codec
    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*map(deflate.compress, pieces), deflate.flush()])


def _runs(nbytes: int) -> Iterable[bytes]:
    whole = bytes(2**20)
    for _ in range(nbytes // len(whole)):
        yield whole
    yield bytes(nbytes % len(whole))


def _snappy(raw: bytes) -> bytes:
    """All literals, in one piece."""
    length, out = len(raw), bytearray()
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    for at in range(0, len(raw), 2**16):
        piece = raw[at : at + 2**16]
        out += struct.pack("<BH", 61 << 2, len(piece) - 1) + piece
    return bytes(out)


def _lz4(blocks: Iterable[bytes]) -> bytes:
    """A frame of independent blocks of 64 KiB at most. 0x82 sums up its two bytes of description, 0x60 0x40."""
    return b"\x04\x22\x4d\x18\x60\x40\x82" + b"".join(blocks) + bytes(4)


def _lz4_stored(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw) | 1 << 31) + raw if raw else b""


def _lz4_zeros(nbytes: int) -> Iterable[bytes]:
    """One literal zero, a match of it that is as long as the block allows, and the five literals that a block must end with."""
    for at in range(0, nbytes, 2**16):
        size = min(2**16, nbytes - at)
        if size < 300:
            yield _lz4_stored(bytes(size))
            continue
        more = size - 1 - 5 - 4 - 15
        block = b"\x1f\0\1\0" + b"\xff" * (more // 255) + bytes((more % 255,)) + b"\x50" + bytes(5)
        yield struct.pack("<I", len(block)) + block


def _crc_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table


_TABLE = _crc_table()
_STEPS = [int(entry) for entry in _TABLE]


def crc32c(raw: bytes) -> int:
    crc = 0xFFFFFFFF
    steps = _STEPS
    for byte in raw:
        crc = steps[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


class RawProducer:
    """One connection to one broker. It is opened anew where the broker ends it, which is an answer as good as any."""

    def __init__(self, servers: str) -> None:
        host, _, port = servers.split(",")[0].rpartition(":")
        self._address = (host, int(port))
        self._socket: socket.socket | None = None

    def produce(self, topic: str, partition: int, raw: bytes, *, acks: int = -1) -> Answer:
        """Send one batch. A topic that was only just made is asked again, until its leader knows it."""
        deadline = time.monotonic() + _TIMEOUT_S
        while (answer := self._try(topic, partition, raw, acks)).error in _NOT_YET and time.monotonic() < deadline:
            time.sleep(0.05)
        return answer

    def _try(self, topic: str, partition: int, raw: bytes, acks: int) -> Answer:
        try:
            return self._ask(topic, partition, raw, acks)
        except ConnectionError as error:
            self.close()
            return Answer(-1, -1, f"the broker ended the connection: {error}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, topic: str, partition: int, raw: bytes, acks: int) -> Answer:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, _TIMEOUT_S)
        head = struct.pack(">hhi", _PRODUCE, _VERSION, 1) + _text("raw")
        where = struct.pack(">i", 1) + _text(topic) + struct.pack(">iii", 1, partition, len(raw))
        request = head + _text(None) + struct.pack(">hi", acks, int(_TIMEOUT_S * 1000)) + where + raw
        self._socket.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", self._read(4))
        return _answer(self._read(size))

    def _read(self, nbytes: int) -> bytes:
        assert self._socket is not None
        found = bytearray()
        while len(found) < nbytes:
            piece = self._socket.recv(nbytes - len(found))
            if not piece:
                raise ConnectionResetError("its end")
            found += piece
        return bytes(found)


def _text(text: str | None) -> bytes:
    return struct.pack(">h", -1) if text is None else struct.pack(">h", len(text)) + text.encode()


def _answer(raw: bytes) -> Answer:
    at = 4 + 4
    (size,) = struct.unpack_from(">h", raw, at)
    at += 2 + size + 4
    _, error, base_offset, _, _, problems = struct.unpack_from(">ihqqqi", raw, at)
    at += 34
    said = []
    for _ in range(problems):
        text, at = _nullable(raw, at + 4)
        said.append(text)
    text, _ = _nullable(raw, at)
    return Answer(error, base_offset, "; ".join(filter(None, [text, *said])))


def _nullable(raw: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from(">h", raw, at)
    return ("", at + 2) if size < 0 else (raw[at + 2 : at + 2 + size].decode(errors="replace"), at + 2 + size)
