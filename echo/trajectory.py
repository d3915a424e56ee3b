"""The record that crosses from sampling to training: one sampled completion with everything needed to train on it.

Refuses to know how it travels (that is `codec`) or whether it is fresh enough (that is `staleness`).

A worked example, a completion of four tokens during which the weights changed once, from version 6 to 7:

    completion_ids  [ 17,  4,  9,  2 ]
    logprobs        [-.3, -2, -1, -.1]      natural log, under the sampling distribution that drew each token
    loss_mask       [  1,  1,  1,  1 ]      0 for tokens of a tool or an environment (multi-turn)
    spans           ((0, 6), (2, 7))        tokens 0 and 1 are of version 6, tokens 2 and 3 of version 7
    min_policy_version 6, max_policy_version 7
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

FINISH_REASONS = ("stop", "length", "abort")
LOGPROB_MODES = ("processed", "raw")

# What a record's small fields may hold, so that one record can't take much more memory than buffers count, nor overflow what
# the learner computes from it together with others of its batch.
MAX_TEXT_CHARS = 8192
MAX_REWARD_COMPONENTS = 256
# Times the largest ratio of an objective, over the lowest temperature, its square still fits into float32.
MAX_REWARD = 1e6
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MAX_VERSION = 2**53
# Far below what any sampler draws, and above the values by which engines mark a logprob as unknown.
MIN_LOGPROB = -5000.0
# A probability of 1 may come out a little above it.
_LOGPROB_ROUNDING = 1e-3


class Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How the tokens were drawn.

    `logprob_mode` says what the behaviour logprobs are of: "processed" is the distribution after temperature, top-k and
    top-p (what was really sampled from), "raw" the model's own distribution at temperature 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int
    seed: int | None = None
    logprob_mode: str = "processed"


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One sampled completion, single or multi turn.

    gc=False: records can't be part of a cycle, and buffers hold so many that Python's collector would be slow to visit them.

    P is the number of prompt tokens, C the number of completion tokens, both >= 1.

    run_id, trajectory_id, group_id: names; `trajectory_id` is unique without coordination (`trajectory_id()`).
    group_size, group_index: the group has `group_size` members, this one is `group_index` in [0, group_size).
    task, prompt_id: which task asked, and which of its prompts.
    prompt_ids: int32 (P,). completion_ids: int32 (C,).
    logprobs: float32 or float16 (C,), natural log, from MIN_LOGPROB to 0 (up to rounding, 1e-3).
    loss_mask: bool (C,), True where the policy sampled the token.
    spans: ((start_token, policy_version), ...), the first starts at 0, starts and versions rise strictly.
    reward and its components, finite and within +-MAX_REWARD; finish_reason as in FINISH_REASONS. All text together has at
    most MAX_TEXT_CHARS characters.
    producer_id names the process, sequence_number counts its trajectories from 0.
    started_at, finished_at: seconds since the epoch.
    """

    run_id: str
    trajectory_id: str
    group_id: str
    group_size: int
    group_index: int
    task: str
    prompt_id: str
    prompt_ids: npt.NDArray[np.int32]
    completion_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.floating[Any]]
    loss_mask: npt.NDArray[np.bool_]
    spans: tuple[tuple[int, int], ...]
    reward: float
    reward_components: dict[str, float] = {}
    finish_reason: str
    sampling: Sampling
    engine: str
    model: str
    producer_id: str
    sequence_number: int
    started_at: float
    finished_at: float

    @property
    def min_policy_version(self) -> int:
        return self.spans[0][1]

    @property
    def max_policy_version(self) -> int:
        return self.spans[-1][1]

    @property
    def oldest_trained_version(self) -> int:
        """The oldest version of a token that `loss_mask` lets be trained; `max_policy_version` where there is none."""
        ends = [start for start, _ in self.spans[1:]]
        for (start, version), end in zip(self.spans, ends, strict=False):
            if self.loss_mask[start:end].any():
                return version
        return self.max_policy_version

    def masked_below(self, version: int) -> "Trajectory":
        """The same with no token of an older version to be trained; itself where it has none."""
        if self.min_policy_version >= version:
            return self
        return msgspec.structs.replace(self, loss_mask=self.loss_mask & (self.token_versions() >= version))

    @property
    def token_count(self) -> int:
        """Prompt and completion tokens."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def nbytes(self) -> int:
        """Memory held by the arrays, with an allowance for the small fields: what buffers count."""
        arrays = self.prompt_ids.nbytes + self.completion_ids.nbytes + self.logprobs.nbytes + self.loss_mask.nbytes
        return arrays + SMALL_FIELDS_BYTES + SPAN_BYTES * len(self.spans)

    def token_versions(self) -> npt.NDArray[np.int64]:
        """The policy version of every completion token, int64 (C,)."""
        starts = [start for start, _ in self.spans] + [len(self.completion_ids)]
        lengths = np.diff(starts)
        return np.repeat(np.array([version for _, version in self.spans], dtype=np.int64), lengths)


# Measured: a decoded record's strings, floats, spans and array headers take 1.6 to 2.1 KB.
SMALL_FIELDS_BYTES = 2048
SPAN_BYTES = 128


def trajectory_id(run_id: str, incarnation: str, counter: int) -> str:
    """The id of a producer incarnation's `counter`-th trajectory: unique as long as incarnations are."""
    return f"{run_id}/{incarnation}/{counter}"


def group_id(run_id: str, incarnation: str, counter: int) -> str:
    """The id of a producer incarnation's `counter`-th group."""
    return f"{run_id}/{incarnation}/g{counter}"


def incarnation_of(group: str) -> str:
    """The producer incarnation that made a group id; "" where the id has another form."""
    parts = group.rsplit("/", 2)
    return parts[1] if len(parts) == 3 else ""


def field_problems(trajectory: Trajectory) -> list[str]:
    """What is wrong with a record's values, each a phrase that names the field, without a look at what the arrays hold."""
    found: list[str] = []
    t = trajectory
    completion = len(t.completion_ids)
    if not (t.run_id and t.trajectory_id and t.group_id):
        found.extend(f"{name} is empty" for name in ("run_id", "trajectory_id", "group_id") if not getattr(t, name))
    if not 0 <= t.group_index < t.group_size:
        found.append(f"group_index {t.group_index} is outside [0, group_size {t.group_size})")
    if len(t.prompt_ids) == 0:
        found.append("prompt_ids is empty")
    if completion == 0:
        found.append("completion_ids is empty")
    if len(t.logprobs) != completion:
        found.append(f"logprobs has {len(t.logprobs)} values for {completion} completion tokens")
    if len(t.loss_mask) != completion:
        found.append(f"loss_mask has {len(t.loss_mask)} values for {completion} completion tokens")
    if not abs(t.reward) <= MAX_REWARD:
        found.append(f"reward is {t.reward}, at most {MAX_REWARD:g} either way is allowed: scale it")
    text = len(t.run_id) + len(t.trajectory_id) + len(t.group_id) + len(t.task) + len(t.prompt_id) + len(t.engine)
    text += len(t.model) + len(t.producer_id)
    for name, value in t.reward_components.items():
        text += len(name)
        if not abs(value) <= MAX_REWARD:
            found.append(f"reward_components[{name[:40]!r}] is {value}, at most {MAX_REWARD:g} either way is allowed: scale it")
    if text > MAX_TEXT_CHARS:
        found.append(f"the text fields have {text} characters, at most {MAX_TEXT_CHARS} are allowed")
    if len(t.reward_components) > MAX_REWARD_COMPONENTS:
        found.append(f"reward_components has {len(t.reward_components)} entries, at most {MAX_REWARD_COMPONENTS} are allowed")
    if t.finish_reason not in FINISH_REASONS:
        found.append(f"finish_reason {t.finish_reason[:40]!r} is none of {', '.join(FINISH_REASONS)}")
    if not MIN_TEMPERATURE <= t.sampling.temperature <= MAX_TEMPERATURE:
        found.append(f"sampling.temperature is {t.sampling.temperature}, allowed is {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}")
    if t.sampling.logprob_mode not in LOGPROB_MODES:
        found.append(f"sampling.logprob_mode {t.sampling.logprob_mode[:40]!r} is none of {', '.join(LOGPROB_MODES)}")
    found.extend(span_problems(t.spans, completion))
    return found


def logprob_problems(logprobs: npt.NDArray[np.floating[Any]]) -> list[str]:
    """What is wrong with logprobs, of one record or of many together."""
    if len(logprobs) == 0:
        return []
    # NaN wins in both, so that two passes find it and both infinities.
    lowest, highest = float(np.minimum.reduce(logprobs)), float(np.maximum.reduce(logprobs))
    if not (lowest > -math.inf and highest < math.inf):
        return ["logprobs holds NaN or infinity"]
    if highest > _LOGPROB_ROUNDING:
        return [f"logprobs holds {highest}: a logarithm of a probability is not above 0"]
    if lowest < MIN_LOGPROB:
        return [f"logprobs holds {lowest}: no sampler draws a token below {MIN_LOGPROB:g}"]
    return []


def span_problems(spans: Sequence[tuple[int, int]], completion: int) -> list[str]:
    """What is wrong with version spans over `completion` tokens."""
    if not spans or spans[0][0] != 0:
        return ["spans do not start at token 0"]
    found = []
    # Where they rise, the first version is the lowest and the last the highest.
    if any(b[0] <= a[0] or b[1] <= a[1] for a, b in itertools.pairwise(spans)):
        found.append("spans do not rise strictly in token and version")
    if spans[0][1] < 0 or spans[-1][1] > MAX_VERSION:
        found.append("spans hold a negative policy version, or one above 2**53")
    if spans[-1][0] >= max(completion, 1):
        found.append(f"the last span starts at token {spans[-1][0]} of {completion}")
    return found
