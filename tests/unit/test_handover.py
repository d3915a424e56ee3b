"""What rank 0 hands to the others is the batch, to the bit."""

import numpy as np

from consumers.digest import batch_digest
from consumers.handover import pack, unpack
from echo.trajectory import Sampling
from tests.helpers import make_group


def test_a_batch_arrives_as_it_was() -> None:
    """Positions, arrays with their dtypes, masks, spans and sampling parameters."""
    groups = [
        make_group(3, number=1, partition=2, first_offset=40, policy_version=5, rewards=[0.1, -2.5, 1 / 3]),
        make_group(
            2,
            number=2,
            completion_ids=[70_000, 3, 1],
            logprobs=np.array([-0.5, -1.25, -8], np.float16),
            loss_mask=np.array([True, False, True]),
            spans=((0, 4), (2, 6)),
            sampling=Sampling(max_tokens=9, temperature=0.7, logprob_mode="raw"),
        ),
    ]
    found, newest = unpack(pack(groups, 9))
    assert newest == 9
    assert batch_digest(found) == batch_digest(groups)
    for group, other in zip(groups, found, strict=True):
        assert [(m.partition, m.offset) for m in group.members] == [(m.partition, m.offset) for m in other.members]
        for mine, theirs in zip(group.members, other.members, strict=True):
            assert mine.trajectory.logprobs.dtype == theirs.trajectory.logprobs.dtype
