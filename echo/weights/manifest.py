"""What a published policy is made of: tensors, each a list of content-addressed chunks. Pure data, no I/O.

A tensor's bytes are those of its chunks, from `offset` on: small tensors share a chunk, one behind the other without a gap, so
that many of them are one file, one request and one fsync. Beside its whole bytes, a tensor may offer a delta
(`echo/weights/delta.py`) against its state in the version that the manifest names as `base`.

Refuses torch: a tensor is its name, dtype, shape and bytes. Digests are blake3 in lower-case hex.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from echo.errors import ManifestError

MANIFEST_MAJOR = 2
MANIFEST_SCHEMA = f"{MANIFEST_MAJOR}.0"

# Names as in safetensors, with their size in bytes.
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class HostTensor(NamedTuple):
    """A tensor in host memory: little-endian, contiguous, row-major bytes. dtype is a key of DTYPE_BYTES."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Chunk(msgspec.Struct, frozen=True):
    """A run of a tensor's bytes, named by the digest of its content."""

    digest: str
    nbytes: int


class Piece(NamedTuple):
    """Bytes `start` to `start + nbytes` of a chunk, which belong at `at` of what the chunks make up."""

    chunk: Chunk
    start: int
    nbytes: int
    at: int


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor's delta: `nbytes` bytes of its chunks from `offset` on. base: digest of the tensor that it is applied to."""

    base: str
    nbytes: int
    chunks: tuple[Chunk, ...]
    offset: int = 0


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor: its bytes are those of its chunks, in order, from `offset` on. `digest` is of the tensor's bytes.

    delta: against the tensor of the same name in the manifest's base version, where that is smaller.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    chunks: tuple[Chunk, ...]
    offset: int = 0
    delta: Delta | None = None

    @property
    def nbytes(self) -> int:
        """Of the tensor; raises KeyError for an unknown dtype, which `decode` lets nobody see."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """The version that the deltas are against. digest: of its manifest. chain: how many versions back deltas lead from here
    without a break, 1 at least; the store keeps these versions."""

    version: int
    digest: str
    chain: int


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors are a LoRA adapter, to be put on the full policy `model_version`, whose bytes stay as they are.

    model_digest: of that version's manifest. config: what the adapter's library needs to build it (peft's LoraConfig).
    """

    model_version: int
    model_digest: str
    config: dict[str, Any]


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer's model says: natural logs of the probabilities of the tokens after the first, at temperature 1."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One policy version of one run. Unknown fields are ignored, so that later minor schemas may add some."""

    schema: str
    run_id: str
    version: int
    step: int
    created: float
    tensors: tuple[TensorEntry, ...]
    base: Base | None = None
    adapter: Adapter | None = None
    canary: Canary | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def kind(self) -> str:
        return "full" if self.adapter is None else "adapter"

    @property
    def delta_bytes(self) -> int:
        """Of all deltas together."""
        return sum(tensor.delta.nbytes for tensor in self.tensors if tensor.delta is not None)

    def chunks(self) -> Iterator[Chunk]:
        """Every chunk that is named, deltas included; some several times."""
        for tensor in self.tensors:
            yield from tensor.chunks
            if tensor.delta is not None:
                yield from tensor.delta.chunks


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Manifest)


def digest(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes: what is stored, served and digested."""
    return _encoder.encode(manifest)


def decode(raw: bytes, *, where: str, run_id: str | None = None, expected_digest: str | None = None) -> Manifest:
    """Read and check a manifest. Raises ManifestError naming `where` it came from."""
    if expected_digest is not None and digest(raw) != expected_digest:
        raise ManifestError(f"{where}: digest {digest(raw)} is not the announced {expected_digest}", retriable=True)
    try:
        manifest = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{where}: not a manifest: {error}") from None
    if manifest.schema.partition(".")[0] != str(MANIFEST_MAJOR):
        raise ManifestError(f"{where}: manifest schema {manifest.schema}, this reader knows {MANIFEST_MAJOR}: upgrade it")
    if run_id is not None and manifest.run_id != run_id:
        raise ManifestError(f"{where}: belongs to run {manifest.run_id!r}, not {run_id!r}")
    if manifest.base is not None and not (0 <= manifest.base.version < manifest.version and manifest.base.chain > 0):
        raise ManifestError(f"{where}: version {manifest.version} can't have {manifest.base}")
    if manifest.adapter is not None and not 0 <= manifest.adapter.model_version < manifest.version:
        raise ManifestError(f"{where}: version {manifest.version} can't adapt version {manifest.adapter.model_version}")
    if manifest.canary is not None and not 1 <= len(manifest.canary.logprobs) == len(manifest.canary.token_ids) - 1:
        raise ManifestError(f"{where}: its canary has {len(manifest.canary.logprobs)} logprobs")
    for tensor in manifest.tensors:
        _check_tensor(tensor, where)
        if tensor.delta is not None:
            if manifest.base is None:
                raise ManifestError(f"{where}: tensor {tensor.name!r} has a delta, but the manifest has no base")
            _check_chunks(tensor.delta, f"{where}: the delta of tensor {tensor.name!r}")
    if len({tensor.name for tensor in manifest.tensors}) != len(manifest.tensors):
        raise ManifestError(f"{where}: names a tensor twice")
    return manifest


def pieces(extent: TensorEntry | Delta) -> Iterator[Piece]:
    """Where the bytes of a tensor, or of a delta, lie: parts of its chunks, in order."""
    start, at, left = extent.offset, 0, extent.nbytes
    for chunk in extent.chunks:
        nbytes = min(chunk.nbytes - start, left)
        yield Piece(chunk, start, nbytes, at)
        start, at, left = 0, at + nbytes, left - nbytes


def deltas_between(held: str, name: str, chain: Sequence[Mapping[str, TensorEntry]]) -> list[Delta] | None:
    """The deltas that make the tensor `name` of digest `held` into that of the first of `chain`, in the order to apply them.

    chain: the tensors by name of the wanted version, then of its base, of the base's base, and so on as far as they are known.
    The list is empty where the tensor is what it should be already; None where no deltas lead there.
    """
    path: list[Delta] = []
    wanted = chain[0][name].digest
    for tensors in chain:
        entry = tensors.get(name)
        if wanted == held or entry is None or entry.digest != wanted:
            break
        if entry.delta is not None:
            path.append(entry.delta)
            wanted = entry.delta.base
    return path[::-1] if wanted == held else None


def _check_tensor(tensor: TensorEntry, where: str) -> None:
    where = f"{where}: tensor {tensor.name!r}"
    if tensor.dtype not in DTYPE_BYTES:
        raise ManifestError(f"{where} has unknown dtype {tensor.dtype!r}")
    if any(extent < 0 for extent in tensor.shape):
        raise ManifestError(f"{where} has shape {tensor.shape}")
    if not is_digest(tensor.digest):
        raise ManifestError(f"{where} has a malformed digest {tensor.digest[:80]!r}")
    _check_chunks(tensor, f"{where} of shape {tensor.shape} {tensor.dtype}")


def _check_chunks(extent: TensorEntry | Delta, where: str) -> None:
    for chunk in extent.chunks:
        if not is_digest(chunk.digest):
            raise ManifestError(f"{where} names a malformed chunk digest {chunk.digest[:80]!r}")
    held = sum(chunk.nbytes for chunk in extent.chunks)
    # One chunk may be shared with other tensors, several are the tensor's own.
    if len(extent.chunks) == 1:
        fits = 0 <= extent.offset <= held - extent.nbytes
    else:
        fits = extent.offset == 0 and held == extent.nbytes
    if not fits or extent.nbytes < 0 or any(chunk.nbytes <= 0 for chunk in extent.chunks):
        raise ManifestError(
            f"{where} has {extent.nbytes:,} bytes, which are not those of its chunks ({held:,} from {extent.offset:,} on)"
        )


def is_digest(text: str) -> bool:
    """64 lower-case hex digits: also what keeps a digest from being a path."""
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
