"""Deltas: lossless for any bytes, small where little changes, and never a wrong tensor."""

import tracemalloc
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo.errors import DeltaError
from echo.weights import delta as delta_module
from echo.weights.delta import apply_delta, encode_delta, encode_from, patch, read_header
from echo.weights.manifest import digest

WIDTHS = (1, 2, 4, 8)
# NaNs with payloads, both zeros, infinities and extremes, as words of each width.
ODD_WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7F80, 0x7FC1, 0x8000, 0xFFFF, 0x7FC00001, 0x80000000, 2**63, 2**64 - 1)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[int, bytes, bytes]:
    """A word size, and a tensor before and after some of its words were changed."""
    width = draw(st.sampled_from(WIDTHS))
    words = draw(st.integers(0, 1200))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = random.bytes(words * width)
    new = np.frombuffer(old, f"<u{width}").copy()
    share = draw(st.sampled_from((0.0, 0.001, 0.05, 0.5, 1.0)))
    mask = random.random(words) < share
    kind = draw(st.sampled_from(("unit", "any", "odd")))
    if kind == "unit":
        new[mask] += random.choice(np.array([1, 2 ** (8 * width) - 1], new.dtype), int(mask.sum()))
    elif kind == "any":
        new[mask] = np.frombuffer(random.bytes(words * width), new.dtype)[mask]
    else:
        odd = np.array([word % 2 ** (8 * width) for word in ODD_WORDS], new.dtype)
        new[mask] = random.choice(odd, int(mask.sum()))
    return width, old, new.tobytes()


@settings(max_examples=150, deadline=None)
@given(tensors())
def test_a_delta_makes_exactly_the_new_tensor(case: tuple[int, bytes, bytes]) -> None:
    """Any word size, any number and kind of changes, also none, all, and no words at all: bit by bit."""
    width, old, new = case
    delta = encode_delta(old, new, width)
    assert apply_delta(old, delta) == new
    assert read_header(delta) == (width, len(new), digest(new))
    assert encode_delta(old, new, width) == delta, "the same change gives the same bytes, so that its chunk is shared"


@pytest.mark.parametrize("width", WIDTHS)
def test_blocks_are_joined_without_a_seam(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of several blocks, the last one short, with changes at the blocks' ends, and blocks without any."""
    monkeypatch.setattr(delta_module, "_BLOCK_WORDS", 1000)
    old = np.arange(4100, dtype=np.uint64).astype(f"<u{width}")
    new = old.copy()
    new[[0, 999, 1000, 3000, 4099]] ^= 1
    delta = encode_delta(old.data, new.data, width)
    assert apply_delta(old.data, delta) == new.tobytes()
    read: list[tuple[int, int]] = []

    def read_old(start: int, stop: int) -> bytes:
        read.append((start, stop))
        return old.tobytes()[start:stop]

    assert encode_from(read_old, new.data, width) == delta
    assert read == [(start * width, min(start + 1000, 4100) * width) for start in range(0, 4100, 1000)]


def test_a_step_of_a_policy_is_small() -> None:
    """2 % of a bf16 tensor's words change by a unit in the last place: about 9 bits each, under 2 % of the tensor."""
    random = np.random.default_rng(0)
    old = random.integers(0, 2**16, 2**18).astype("<u2")
    new = old.copy()
    mask = random.random(len(old)) < 0.02
    new[mask] += random.choice(np.array([1, 2**16 - 1], "<u2"), int(mask.sum()))
    size = len(encode_delta(old.data, new.data, 2))
    assert size * 8 < 9.5 * mask.sum()
    assert size < 0.012 * old.nbytes


def test_a_delta_that_grows_too_large_is_given_up() -> None:
    """At the limit and above there is none; one byte more of a limit, and there is."""
    random = np.random.default_rng(0)
    old, new = random.bytes(4096), random.bytes(4096)
    size = len(encode_delta(old, new, 2))
    reads = (lambda start, stop: old[start:stop],)
    assert encode_from(*reads, new, 2, limit=size) is None
    assert encode_from(*reads, new, 2, limit=size + 1) == encode_delta(old, new, 2)


@pytest.mark.parametrize(
    ("old", "new", "width", "complaint"),
    [
        (b"12", b"123", 1, "no delta between 2 and 3 bytes"),
        (b"123", b"124", 2, "3 bytes don't divide into words of 2 bytes"),
        (b"123", b"124", 3, "words of 3 bytes"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(old: bytes, new: bytes, width: int, complaint: str) -> None:
    """Before and after have the same size, in whole words of a known size."""
    with pytest.raises(DeltaError, match=complaint):
        encode_delta(old, new, width)


def example() -> tuple[bytes, bytes, bytes]:
    random = np.random.default_rng(3)
    old = random.bytes(2000)
    new = bytearray(old)
    for at in random.integers(0, 2000, 80):
        new[at] ^= 1
    return old, bytes(new), encode_delta(old, bytes(new), 2)


def test_only_the_right_old_tensor_is_taken() -> None:
    """Another base, of the same or another size, gives an error that names the place."""
    old, _, delta = example()
    with pytest.raises(DeltaError, match=r"tensor 'w': makes a tensor of digest .* it was made from another one"):
        apply_delta(bytes(len(old)), delta, where="tensor 'w'")
    with pytest.raises(DeltaError, match=r"tensor 'w': is for a tensor of 2,000 bytes, not of 1,000"):
        apply_delta(old[:1000], delta, where="tensor 'w'")


def test_what_lies_behind_a_delta_is_an_error() -> None:
    """A delta ends where its last block ends."""
    old, _, delta = example()
    with pytest.raises(DeltaError, match="1 bytes too many"):
        apply_delta(old, delta + b"\0")


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_damaged_delta_is_an_error_or_harmless(data: st.DataObject) -> None:
    """Bytes flipped, overwritten, cut out, put in: an error in words, or the right tensor after all."""
    old, new, delta = example()
    raw = bytearray(delta)
    for _ in range(data.draw(st.integers(1, 3))):
        # Headers first: hypothesis tries small numbers most.
        at = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        action = data.draw(st.sampled_from(("flip", "set", "cut", "insert", "truncate")))
        if action == "flip" and raw:
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif action == "set":
            piece = data.draw(st.binary(min_size=1, max_size=8))
            raw[at : at + len(piece)] = piece
        elif action == "cut":
            del raw[at : at + data.draw(st.integers(1, 9))]
        elif action == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            del raw[at:]
    with suppress(DeltaError):
        assert apply_delta(old, raw) == new


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(WIDTHS))
def test_noise_behind_a_sound_header_is_an_error(noise: bytes, width: int) -> None:
    """Whatever follows the header is refused in words."""
    old, new, _ = example()
    head = encode_delta(new, new, width)[:48]
    with pytest.raises(DeltaError):
        apply_delta(old, head + noise)


def test_a_frame_that_claims_too_much_allocates_nothing() -> None:
    """A frame header that promises 2**40 bytes is refused before memory is asked for."""
    old, _, delta = example()
    frame = delta.index(b"\x28\xb5\x2f\xfd")
    # Single segment, 8 bytes of content size.
    claim = b"\x28\xb5\x2f\xfd\xe0" + (2**40).to_bytes(8, "little")
    raw = delta[:frame] + claim + delta[frame + len(claim) :]
    tracemalloc.start()
    try:
        with pytest.raises(DeltaError, match="a frame does not hold"):
            apply_delta(old, raw)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", [lambda array: array.data, lambda array: array.data.cast("B"), lambda array: array.tobytes()])
def test_arrays_of_any_item_size_are_taken_as_bytes(make: Any) -> None:
    """A view of float32 values is its bytes; `patch` changes it in place and gives the digest."""
    old = np.linspace(-1, 1, 60, dtype=np.float32).reshape(3, 4, 5)
    new = old.copy()
    new[1, 2, 3] = -0.0
    new.view(np.uint32)[0, 0, 0] = 0x7FC00ABC
    delta = encode_delta(make(old), make(new), 4)
    assert patch(old.data, delta) == digest(new.tobytes())
    assert old.tobytes() == new.tobytes()
