"""Groups -> rows -> right-padded micro-batches within a budget of padded tokens. Pure.

Refuses to know models or losses. Every trajectory is in exactly one micro-batch; how a batch is cut changes memory and speed,
never the gradient (`objectives.row_scales` divides by what the whole batch holds).

A row is prompt + completion, right-padded, so that position 0 is the first prompt token and a causal model never sees
padding. `first` is the shortest prompt of the micro-batch: no position before it is trained, so no logits are needed there.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from consumers.advantages import advantages, preference
from consumers.groups import Group
from echo.config import Judgement
from echo.staleness import staleness
from echo.trajectory import Trajectory


class Row(NamedTuple):
    """One trajectory to train on, with what its group and the newest version say about it.

    together: of how many rows, one after the other, no micro-batch may hold only a part: 2 where rows are pairs.
    """

    trajectory: Trajectory
    advantage: float
    staleness: int
    together: int = 1


class MicroBatch(NamedTuple):
    """N rows padded to T tokens.

    input_ids: (N, T) int64, 0 where padded. attention_mask: (N, T) int64. loss_mask: (N, T) bool, True where the token at that
    position is trained. behaviour: (N, T) float32 logprobs, 0 outside completions. advantages, temperatures: (N,) float32.
    staleness: (N,) int64 versions. first: the lowest position that any loss_mask may hold, >= 1.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    behaviour: Tensor
    advantages: Tensor
    temperatures: Tensor
    staleness: Tensor
    first: int

    def to(self, device: torch.device) -> "MicroBatch":
        moved: dict[str, Any] = {name: v.to(device) for name, v in self._asdict().items() if isinstance(v, Tensor)}
        return self._replace(**moved)


def make_rows(groups: Iterable[Group], newest_version: int, judgement: Judgement = "grpo") -> list[Row]:
    """All trajectories in order, with advantages within each group and staleness against the newest announced version.

    Of preferences, two of each group: the better one with advantage 1, then the worse one with -1, or both with 0 where neither
    is better (`objectives.dpo_loss`).
    """
    rows = []
    for group in groups:
        members = [member.trajectory for member in group.members]
        rewards = torch.tensor([trajectory.reward for trajectory in members], dtype=torch.float64)
        if judgement == "preference":
            best, worst, differ = preference(rewards)
            chosen = [(members[best], float(differ)), (members[worst], -float(differ))]
        else:
            chosen = list(zip(members, advantages(rewards, judgement).tolist(), strict=True))
        for trajectory, advantage in chosen:
            age = staleness(newest_version, trajectory.oldest_trained_version)
            rows.append(Row(trajectory, advantage, age, together=2 if judgement == "preference" else 1))
    return rows


def split(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Cut rows into micro-batches: indices into `lengths`, each index once.

    Rows are taken longest first, so that padding is small and the largest micro-batch comes first (memory that does not
    suffice shows at once). A micro-batch holds at most `tokens` padded tokens; a row longer than that is alone. Equal lengths
    keep their order, so equal inputs give equal micro-batches.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    parts: list[list[int]] = []
    longest = 0
    for index in order.tolist():
        if not parts or (len(parts[-1]) + 1) * longest > tokens:
            parts.append([])
            longest = lengths[index]
        parts[-1].append(index)
    return parts


def shares(lengths: Sequence[int], tokens: int, ranks: int) -> list[list[list[int]]]:
    """Micro-batches as in `split`, for each rank its own; every rank has equally many.

    With several ranks rows are cut into as few rounds as the budget allows, and then as evenly as that many rounds allow. A
    rank that a round leaves over has an empty micro-batch there, for which `take` makes one without a trained token.
    """
    parts = split(lengths, tokens)
    if ranks > 1:
        rounds = -(-len(parts) // ranks)
        low, high = min(tokens, *lengths), tokens
        while low < high:  # The smallest budget that makes so many rounds; a larger one never makes more.
            middle = (low + high) // 2
            if len(split(lengths, middle)) <= rounds * ranks:
                high = middle
            else:
                low = middle + 1
        parts = split(lengths, low)
        parts += [[]] * (rounds * ranks - len(parts))
    return [parts[rank::ranks] for rank in range(ranks)]


def take(rows: Sequence[Row], part: Sequence[int]) -> MicroBatch:
    """The micro-batch of these rows; of none, one of the shortest row with nothing to train: it counts for nothing."""
    if part:
        return pad([rows[index] for index in part])
    shortest = min(rows, key=lambda row: row.trajectory.token_count)
    idle = pad([shortest._replace(advantage=0.0)] * shortest.together)
    return idle._replace(loss_mask=torch.zeros_like(idle.loss_mask))


def micro_batches(rows: Sequence[Row], tokens: int, *, ranks: int = 1, rank: int | None = None) -> Iterator[MicroBatch]:
    """Padded micro-batches of `rows`, made one at a time: those of one rank; None, of one after the other."""
    unit = rows[0].together
    lengths = [max(row.trajectory.token_count for row in rows[at : at + unit]) for at in range(0, len(rows), unit)]
    found = shares(lengths, tokens // unit, ranks)
    for share in found if rank is None else [found[rank]]:
        for part in share:
            yield take(rows, [place * unit + offset for place in part for offset in range(unit)])


def pad(rows: Sequence[Row]) -> MicroBatch:
    """Right-pad rows to the longest of them."""
    shape = (len(rows), max(row.trajectory.token_count for row in rows))
    input_ids = np.zeros(shape, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=np.bool_)
    behaviour = np.zeros(shape, dtype=np.float32)
    for place, row in enumerate(rows):
        t = row.trajectory
        start, end = len(t.prompt_ids), t.token_count
        input_ids[place, :start] = t.prompt_ids
        input_ids[place, start:end] = t.completion_ids
        attention_mask[place, :end] = 1
        loss_mask[place, start:end] = t.loss_mask
        behaviour[place, start:end] = t.logprobs
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(attention_mask),
        loss_mask=torch.from_numpy(loss_mask),
        behaviour=torch.from_numpy(behaviour),
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        temperatures=torch.tensor([_temperature(row.trajectory) for row in rows], dtype=torch.float32),
        staleness=torch.tensor([row.staleness for row in rows], dtype=torch.int64),
        first=min(len(row.trajectory.prompt_ids) for row in rows),
    )


def _temperature(trajectory: Trajectory) -> float:
    """What the learner divides logits by, so that its logprobs are of the same kind as the record's: raw ones are at 1."""
    return trajectory.sampling.temperature if trajectory.sampling.logprob_mode == "processed" else 1.0
