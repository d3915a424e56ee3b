"""Groups become rows and padded micro-batches: every trajectory once, within the budget, nothing of it lost."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from consumers import batching
from consumers.advantages import advantages
from echo.trajectory import Sampling
from tests.helpers import make_group, make_trajectory

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40)


@given(lengths=LENGTHS, tokens=st.integers(1, 200))
def test_split_keeps_every_row_once_and_the_budget(lengths, tokens):
    """Each index once; a part of more than one row fits the budget; longest first; a part is closed only when it must be."""
    parts = batching.split(lengths, tokens)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    padded = [len(part) * max(lengths[index] for index in part) for part in parts]
    assert all(size <= tokens or len(part) == 1 for size, part in zip(padded, parts, strict=True))
    flat = [lengths[index] for part in parts for index in part]
    assert flat == sorted(flat, reverse=True)
    for part in parts[:-1]:
        assert (len(part) + 1) * lengths[part[0]] > tokens


@given(lengths=LENGTHS, tokens=st.integers(1, 200), ranks=st.integers(1, 5))
def test_shares_keep_every_row_once_in_as_few_rounds_as_fit(lengths, tokens, ranks):
    """Every rank has equally many micro-batches, none above the budget, and no round more than the budget asks for."""
    shares = batching.shares(lengths, tokens, ranks)
    parts = [part for share in shares for part in share]
    assert len(shares) == ranks
    assert {len(share) for share in shares} == {-(-len(batching.split(lengths, tokens)) // ranks)}
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(len(part) <= 1 or len(part) * max(lengths[index] for index in part) <= tokens for part in parts)
    if ranks == 1:
        assert shares == [batching.split(lengths, tokens)]


def test_ranks_share_a_batch_evenly():
    """All eight rows would fit into one micro-batch; four ranks take two each. The long row is one rank's share."""
    assert batching.shares([5] * 8, 1000, 4) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert batching.shares([90, 10, 10, 10], 1000, 2) == [[[0]], [[1, 2, 3]]]
    assert batching.shares([5], 1000, 2) == [[[0]], [[]]]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    tokens=st.integers(1, 60),
    ranks=st.integers(1, 4),
    together=st.sampled_from([1, 2]),
)
def test_a_rank_without_rows_has_one_that_counts_for_nothing(lengths, tokens, ranks, together):
    """What is trained over all ranks is every row once; pairs stay pairs, also where they count for nothing."""
    rows = [
        batching.Row(make_trajectory(completion_ids=[number + 1] * length), 1.0 - 2 * half, number, together=together)
        for number, length in enumerate(lengths)
        for half in range(together)
    ]
    parts = list(batching.micro_batches(rows, tokens, ranks=ranks))
    assert [p.input_ids.tolist() for p in parts] == [
        p.input_ids.tolist() for rank in range(ranks) for p in batching.micro_batches(rows, tokens, ranks=ranks, rank=rank)
    ]
    trained = [number for p in parts for number, mask in zip(p.staleness.tolist(), p.loss_mask, strict=True) if mask.any()]
    assert sorted(trained) == sorted([*range(len(lengths))] * together)
    for p in parts:
        assert len(p.input_ids) % together == 0
        assert p.loss_mask.any(dim=1).tolist() == (p.advantages != 0).tolist()


def test_equal_lengths_keep_their_order():
    assert batching.split([5, 7, 5, 7, 5], 14) == [[1, 3], [0, 2], [4]]


def test_rows_carry_advantage_and_staleness_of_their_own_group():
    """Advantages within the group; staleness of the oldest token against the newest version, never below 0."""
    groups = [
        make_group(3, number=0, policy_version=7, rewards=[0, 0, 1]),
        make_group(2, number=1, rewards=[5, 3], members=[{"spans": ((0, 4), (2, 6))}, {"spans": ((0, 9),)}]),
    ]
    rows = batching.make_rows(groups, newest_version=8)
    assert [row.trajectory.trajectory_id for row in rows] == [m.trajectory.trajectory_id for g in groups for m in g.members]
    assert [row.staleness for row in rows] == [1, 1, 1, 4, 0]
    first = advantages(torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), "grpo").tolist()
    second = advantages(torch.tensor([5.0, 3.0], dtype=torch.float64), "grpo").tolist()
    assert [row.advantage for row in rows] == first + second


def test_padded_rows_by_hand():
    """Two rows of other lengths: ids, masks and logprobs stand at their positions, padding is zero."""
    rows = [
        batching.Row(
            make_trajectory(
                prompt_ids=[5, 6, 7],
                completion_ids=[8, 9],
                logprobs=np.array([-0.5, -0.25], np.float16),
                sampling=Sampling(max_tokens=4, temperature=0.7),
            ),
            1.5,
            2,
        ),
        batching.Row(
            make_trajectory(
                prompt_ids=[3],
                completion_ids=[1, 2, 4],
                logprobs=np.array([-1, -2, -3], np.float32),
                loss_mask=np.array([True, False, True]),
                sampling=Sampling(max_tokens=4, temperature=0.7, logprob_mode="raw"),
            ),
            -1.0,
            0,
        ),
    ]
    batch = batching.pad(rows)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [3, 1, 2, 4, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch.loss_mask.tolist() == [[False, False, False, True, True], [False, True, False, True, False]]
    assert batch.behaviour.tolist() == [[0, 0, 0, -0.5, -0.25], [0, -1, -2, -3, 0]]
    assert batch.advantages.tolist() == [1.5, -1.0]
    assert batch.staleness.tolist() == [2, 0]
    torch.testing.assert_close(batch.temperatures, torch.tensor([0.7, 1.0]))  # Raw logprobs are at temperature 1.
    assert batch.first == 1


def test_rows_of_preferences_are_a_groups_best_and_worst():
    """Advantages say which is which, and 0 that neither is better; a member alone is its own pair."""
    groups = [
        make_group(3, number=0, rewards=[1, 0, 2]),
        make_group(3, number=1, rewards=[4, 4, 4]),
        make_group(1, number=2, rewards=[5]),
    ]
    rows = batching.make_rows(groups, newest_version=8, judgement="preference")
    places = [(0, 2), (0, 1), (1, 0), (1, 2), (2, 0), (2, 0)]
    expected = [groups[group].members[member].trajectory for group, member in places]
    assert [row.trajectory.trajectory_id for row in rows] == [trajectory.trajectory_id for trajectory in expected]
    assert [row.advantage for row in rows] == [1, -1, 0, 0, 0, 0]


@given(lengths=LENGTHS.filter(lambda lengths: len(lengths) % 2 == 0), tokens=st.integers(1, 200), ranks=st.integers(1, 3))
def test_pairs_stay_together(lengths, tokens, ranks):
    """In every micro-batch of every rank a pair's rows follow each other, every pair is in one, and the budget holds."""
    rows = [
        batching.Row(make_trajectory(prompt_ids=[1], completion_ids=[1] * (length - 1)), 0.0, number, together=2)
        for number, length in enumerate(lengths)
    ]
    seen = []
    for batch in batching.micro_batches(rows, tokens, ranks=ranks):
        if batch.loss_mask.any():
            numbers = batch.staleness.tolist()
            assert [number + 1 for number in numbers[::2]] == numbers[1::2]
            assert len(numbers) == 2 or batch.input_ids.numel() <= max(tokens, 2 * max(lengths) if ranks > 1 else 0)
            seen += numbers
    assert sorted(seen) == list(range(len(rows)))


@given(lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12), tokens=st.integers(1, 60))
def test_micro_batches_hold_every_trajectory_once(lengths, tokens):
    """Ids found by the masks are exactly the trajectories' own, each once."""
    rows = [
        batching.Row(make_trajectory(prompt_ids=[number + 1] * prompt, completion_ids=[number + 1] * completion), 0.0, number)
        for number, (prompt, completion) in enumerate(lengths)
    ]
    seen = {}
    for batch in batching.micro_batches(rows, tokens):
        for place, number in enumerate(batch.staleness.tolist()):
            assert number not in seen
            real = batch.attention_mask[place].bool()
            assert set(batch.input_ids[place][real].tolist()) == {number + 1}
            seen[number] = (int(real.sum()) - int(batch.loss_mask[place].sum()), int(batch.loss_mask[place].sum()))
    assert seen == dict(enumerate(lengths))
