"""What a published policy is made of: tensors, each a list of content-addressed chunks. Pure data, no I/O.

Refuses torch: a tensor is its name, dtype, shape and bytes. Digests are blake3 in lower-case hex.
"""

from typing import NamedTuple

import msgspec
from blake3 import blake3

from echo.errors import ManifestError

MANIFEST_MAJOR = 1
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


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: its bytes are those of its chunks, in order. `digest` is of the whole tensor's bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One policy version of one run. Unknown fields are ignored, so that later minor schemas may add deltas and peers."""

    schema: str = MANIFEST_SCHEMA
    run_id: str
    version: int
    step: int
    created: float
    tensors: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


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
    for tensor in manifest.tensors:
        _check_tensor(tensor, where)
    if len({tensor.name for tensor in manifest.tensors}) != len(manifest.tensors):
        raise ManifestError(f"{where}: names a tensor twice")
    return manifest


def _check_tensor(tensor: TensorEntry, where: str) -> None:
    size = DTYPE_BYTES.get(tensor.dtype)
    if size is None:
        raise ManifestError(f"{where}: tensor {tensor.name!r} has unknown dtype {tensor.dtype!r}")
    elements = 1
    for extent in tensor.shape:
        if extent < 0:
            raise ManifestError(f"{where}: tensor {tensor.name!r} has shape {tensor.shape}")
        elements *= extent
    if elements * size != tensor.nbytes or any(chunk.nbytes <= 0 for chunk in tensor.chunks):
        raise ManifestError(f"{where}: tensor {tensor.name!r} of shape {tensor.shape} {tensor.dtype} has {tensor.nbytes} bytes")
    for chunk in tensor.chunks:
        if not is_digest(chunk.digest):
            raise ManifestError(f"{where}: tensor {tensor.name!r} names a malformed chunk digest {chunk.digest[:80]!r}")


def is_digest(text: str) -> bool:
    """64 lower-case hex digits: also what keeps a digest from being a path."""
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
