"""Small, sound trajectories and groups for tests; every field can be overridden.

    make_trajectory(reward=1.0, completion_ids=np.array([5, 6], np.int32))
    make_group(4, rewards=[0, 0, 1, 1], policy_version=3)

Refuses to be clever: what is not overridden is constant or derived from the lengths.
"""

import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from consumers.groups import Group, Member
from echo.trajectory import Sampling, Trajectory, group_id, trajectory_id

RUN_ID = "test-run"
INCARNATION = "p0.test"


def make_trajectory(**overrides: Any) -> Trajectory:
    """A sound record; logprobs and loss_mask follow the length of `completion_ids` unless given."""
    completion_ids = np.asarray(overrides.pop("completion_ids", [17, 4, 9, 2]), dtype=np.int32)
    prompt_ids = np.asarray(overrides.pop("prompt_ids", [5, 6, 7]), dtype=np.int32)
    number = overrides.get("sequence_number", 0)
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "trajectory_id": trajectory_id(RUN_ID, INCARNATION, number),
        "group_id": group_id(RUN_ID, INCARNATION, 0),
        "group_size": 1,
        "group_index": 0,
        "task": "test",
        "prompt_id": "prompt-0",
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": np.full(len(completion_ids), -1.0, dtype=np.float32),
        "loss_mask": np.ones(len(completion_ids), dtype=np.bool_),
        "spans": ((0, 0),),
        "reward": 0.0,
        "finish_reason": "stop",
        "sampling": Sampling(max_tokens=max(16, len(completion_ids))),
        "engine": "test 1.0",
        "model": "tiny",
        "producer_id": "p0",
        "sequence_number": number,
        "started_at": 1_700_000_000.0,
        "finished_at": 1_700_000_001.0,
    }
    return Trajectory(**(values | overrides))


def make_group(
    size: int = 4,
    *,
    number: int = 0,
    partition: int = 0,
    first_offset: int = 0,
    policy_version: int = 0,
    rewards: Sequence[float] | None = None,
    members: Sequence[Mapping[str, Any]] | None = None,
    **overrides: Any,
) -> Group:
    """A complete group of `size` members at consecutive offsets of one partition.

    number: the group's counter, so that ids differ between groups. members: overrides per member, over `overrides`.
    rewards: one per member; by default 0, 1, 0, 1, ...
    """
    name = group_id(RUN_ID, INCARNATION, number)
    found = []
    for index in range(size):
        sequence_number = number * size + index
        values: dict[str, Any] = {
            "group_id": name,
            "group_size": size,
            "group_index": index,
            "sequence_number": sequence_number,
            "prompt_id": f"prompt-{number}",
            "spans": ((0, policy_version),),
            "reward": float(rewards[index] if rewards is not None else index % 2),
        }
        values |= overrides
        if members is not None:
            values |= members[index]
        found.append(Member(partition, first_offset + index, make_trajectory(**values)))
    return Group(name, tuple(found))


@contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond so many bytes, in the middle of a write, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
