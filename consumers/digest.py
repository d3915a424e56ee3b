"""A batch as one digest: what an optimiser step was given, so that a replay can prove that it has the same. Pure.

Refuses to cover what training does not depend on (engine names, clocks, positions in the log): two batches with equal digests
give equal rows, advantages and micro-batches.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from consumers.batching import MicroBatch
from consumers.groups import Group

_encoder = msgspec.msgpack.Encoder()


def batch_digest(groups: Sequence[Group]) -> str:
    """blake3 (hex) of groups and members in their order.

    Of each member: its ids, spans, reward and sampling parameters, then prompt_ids, completion_ids, logprobs and loss_mask,
    each with dtype and length. Everything is length-prefixed, so that no two batches share their bytes.
    """
    hasher = blake3()
    hasher.update(_encoder.encode(len(groups)))
    for group in groups:
        hasher.update(_encoder.encode((group.group_id, len(group.members))))
        for member in group.members:
            t = member.trajectory
            hasher.update(_encoder.encode((t.trajectory_id, t.group_index, t.task, t.prompt_id, t.spans, t.reward, t.sampling)))
            for array in (t.prompt_ids, t.completion_ids, t.logprobs, t.loss_mask):
                _add(hasher, array)
    return hasher.hexdigest()


def micro_batches_digest(parts: Iterable[MicroBatch]) -> str:
    """blake3 (hex) of micro-batches in their order: every tensor with dtype and shape, and `first`."""
    hasher = blake3()
    for part in parts:
        for name, value in part._asdict().items():
            hasher.update(_encoder.encode(name))
            if isinstance(value, int):
                hasher.update(_encoder.encode(value))
            else:
                _add(hasher, value.numpy())
    return hasher.hexdigest()


def _add(hasher: Any, array: npt.NDArray[Any]) -> None:
    # Little-endian whatever the host: digests travel with the journal.
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    hasher.update(_encoder.encode((little.dtype.str, little.shape)))
    hasher.update(little.tobytes())
