"""The laboratory: that a lag is what it is said to be, and that conclusions follow from the runs. Not its numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from echo.weights.manifest import HostTensor
from producers.engines.base import Policy
from producers.tiny_policy import build, character_tokenizer
from tests.experiments import loop, staleness
from tests.experiments.outcome import Run, Spread, digest, from_json, to_json


def run_of(final: float, *, best: float = 1.0, skipped: int = 0) -> Run:
    return Run(sampled=[0.1, 0.2], curve={10: best, 20: final}, skipped=skipped, digest="d", seconds=1.0)


@pytest.mark.parametrize("lag", [0, 1, 3, 7])
def test_a_step_is_sampled_by_the_version_of_lag_steps_before(lag: int) -> None:
    schedule = loop.Schedule(lag, Policy(0, {}))
    found = []
    for step in range(6):
        found.append(schedule.sampling.version)
        schedule.published(Policy(step + 1, {}))
    assert found == [max(0, step - lag) for step in range(6)]


def test_the_loop_trains_batches_that_are_as_stale_as_it_says(tmp_path: Path) -> None:
    """And its numbers follow from its run file: the same again, and other ones under another lag."""
    torch.set_num_threads(1)
    path = tmp_path / "model"
    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    model = build(tokenizer)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    # A partial score, so that a policy that knows nothing gets rewards that differ.
    run = loop.make_run(
        path,
        0,
        task={"params": {"dataset": "spell_backward", "prompt": "{metadata[word]}="}},
        batch={"groups_per_step": 2},
        producer={"groups_per_call": 1},
        learner={"steps": 4},
    )
    ages: list[list[int]] = []
    first = loop.train(run, 2, judge=False, watch=lambda step, stats: ages.append(sorted(set(stats.staleness))))
    assert ages == [[0], [1], [2], [2]]
    assert loop.train(run, 2, judge=False).digest == first.digest
    assert loop.train(run, 0, judge=False).digest != first.digest


def test_a_run_diverges_where_it_loses_what_it_had_or_skips() -> None:
    assert not run_of(0.8).diverged
    assert run_of(0.79).diverged
    assert run_of(1.0, skipped=1).diverged
    assert not run_of(0.3, best=0.3).diverged


def test_a_run_survives_its_file() -> None:
    run = run_of(0.5)
    assert from_json(json.loads(json.dumps(to_json(run)))) == run


def test_the_digest_of_weights_tells_names_shapes_and_bits_and_no_order() -> None:
    def tensor(name: str, data: bytes, *shape: int) -> HostTensor:
        return HostTensor(name, "U8", shape, memoryview(data))

    a, b = tensor("a", b"12", 2), tensor("b", b"3", 1)
    others = [
        [a],
        [tensor("a", b"1", 1), tensor("b", b"23", 2)],
        [tensor("a", b"12", 1, 2), b],
        [tensor("a", b"13", 2), b],
        [tensor("c", b"12", 2), b],
    ]
    assert digest([a, b]) == digest([b, a])
    assert len({digest(tensors) for tensors in [[a, b], *others]}) == 6


def test_spread_is_mean_and_sample_deviation() -> None:
    assert Spread.of([1.0, 2.0, 3.0]) == Spread(2.0, 1.0)
    assert Spread.of([1.0]) == Spread(1.0, 0.0)


def lab(default: dict[int, list[float]]) -> dict[str, Any]:
    return staleness.conclude(
        {
            staleness.DEFAULT: {lag: [run_of(final) for final in finals] for lag, finals in default.items()},
            "other": {lag: [run_of(0.1), run_of(1.0)] for lag in default},
        }
    )


def test_the_default_correction_must_keep_the_on_policy_reward_at_the_largest_lag() -> None:
    assert staleness.misses(lab({0: [1.0, 0.9], 8: [0.8, 0.8], 16: [0.96, 0.9]})) == []
    result = lab({0: [1.0, 1.0], 8: [1.0, 1.0], 16: [0.97, 0.91]})
    assert result[staleness.DEFAULT]["16"]["final_reward_ratio"] == pytest.approx(0.94)
    assert staleness.misses(result) == [f"{staleness.DEFAULT} keeps 0.940 of the on-policy reward at S = 16, less than 0.95"]


def test_no_seed_may_diverge_under_the_default_at_any_lag() -> None:
    result = lab({0: [1.0, 1.0], 8: [0.7, 1.0], 16: [1.0, 1.0]})
    assert staleness.misses(result) == [f"1 of 2 seeds diverge under {staleness.DEFAULT} at S = 8"]
    # What others do is shown, and is no miss.
    assert result["other"]["16"]["diverged"] is True
    assert "0.550*" not in staleness.table(result).splitlines()[1]
    assert staleness.table(result).splitlines()[2].split() == ["other", "1.000*", "1.000*", "1.000*"]


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    runs = {staleness.DEFAULT: {lag: [run_of(0.9), run_of(0.8)] for lag in (0, 16)}}
    staleness.plot(runs, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
