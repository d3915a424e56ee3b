"""The laboratory: that a lag is what it is said to be, and that conclusions follow from the runs. Not its numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from echo.weights.manifest import HostTensor
from producers.engines.base import Policy
from tests.experiments import loop, overlap, parity, staleness
from tests.experiments.__main__ import tell
from tests.experiments.outcome import Run, Spread, digest, from_json, to_json
from tests.experiments.untrained import untrained_run


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


@pytest.mark.usefixtures("own_process")
def test_the_loop_trains_batches_that_are_as_stale_as_it_says(tmp_path: Path) -> None:
    """And all that it gives follows from its run file and lag: the same again."""
    run = untrained_run(tmp_path / "model", steps=3)
    ages: list[list[int]] = []
    first = loop.train(run, 1, judge=False, watch=lambda step, stats: ages.append(sorted(set(stats.staleness))))
    assert ages == [[0], [1], [1]]
    assert (again := loop.train(run, 1, judge=False)).digest == first.digest
    assert again.sampled == first.sampled != [0.0] * 3


def test_a_run_diverges_where_it_loses_what_it_had_or_skips() -> None:
    assert not run_of(0.7).diverged
    assert run_of(0.69).diverged
    assert run_of(1.0, skipped=1).diverged
    assert not run_of(0.3, best=0.3).diverged
    recovered = run_of(1.0)._replace(curve={100: 0.9, 10: 0.5, 30: 0.4, 20: 0.6})
    assert recovered.diverged
    assert not recovered._replace(curve={10: 0.5, 20: 0.6, 30: 0.45, 100: 0.9}).diverged


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
    result = lab({0: [1.0, 1.0], 8: [0.6, 1.0], 16: [1.0, 1.0]})
    assert staleness.misses(result) == [f"1 of 2 seeds diverge under {staleness.DEFAULT} at S = 8"]
    # What others do is shown, and is no miss.
    assert result["other"]["16"]["diverged"] is True
    assert "0.550*" not in staleness.table(result).splitlines()[1]
    assert staleness.table(result).splitlines()[2].split() == ["other", "1.000*", "1.000*", "1.000*"]


def test_the_last_line_is_the_verdict_and_the_status_goes_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert tell("parity", {"a": 1}, [], out) == 0
    assert capsys.readouterr().out.splitlines() == ['{"a": 1}', "parity shows all that it must"]
    assert tell("parity", {"a": 2}, ["this", "that"], out) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "parity misses: this; that"
    assert json.loads(out.read_text()) == {"a": 2}


def test_plots_are_drawn(tmp_path: Path) -> None:
    runs = [run_of(0.9), run_of(0.8)]
    staleness.plot({staleness.DEFAULT: dict.fromkeys((0, 16), runs)}, tmp_path / "staleness.png")
    parity.plot(dict.fromkeys(parity.WAYS, runs), tmp_path / "parity.png")
    overlap.plot({"async": overlap.Pace(1.1, 1.0, 1.0, 0.1)}, tmp_path / "overlap.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 3


def parity_of(*, asynchronous: list[float], digests: str = "ab") -> dict[str, Any]:
    colocated = [run_of(0.9)._replace(digest="a"), run_of(1.0)._replace(digest="b")]
    return parity.conclude(
        {
            "colocated": colocated,
            "sequential": [run._replace(digest=name) for run, name in zip(colocated, digests, strict=True)],
            "async": [run_of(final) for final in asynchronous],
        }
    )


def test_sequential_mode_must_give_every_seed_the_same_bits() -> None:
    result = parity_of(asynchronous=[0.95, 0.95])
    assert (result["sequential_equals_colocated"], parity.misses(result)) == (True, [])
    assert result["colocated"]["final_reward"] == pytest.approx({"mean": 0.95, "sd": 0.0707107})
    result = parity_of(asynchronous=[0.95, 0.95], digests="ac")
    assert result["sequential_equals_colocated"] is False
    assert parity.misses(result) == ["sequential mode's final weights differ from the co-located loop's"]


def test_async_must_end_within_one_standard_deviation() -> None:
    assert parity.misses(parity_of(asynchronous=[0.88, 0.89])) == []
    assert parity.misses(parity_of(asynchronous=[0.87, 0.88])) == [
        "async's final reward 0.8750 is not within one standard deviation (0.0707) of the co-located loop's 0.9500"
    ]


def test_a_pace_leaves_the_warm_up_out_and_counts_waits_as_idle() -> None:
    """Steps of 2 s end 3 s apart after a slow start."""
    starting = [{"time": 10.0 * step, "seconds": 9.0} for step in range(overlap.WARM_UP)]
    since = starting[-1]["time"]
    steady = [{"time": since + 3.0 * step, "seconds": 2.0} for step in range(1, 7)]
    pace = overlap.pace_of([*starting, *steady], generate=1.5)
    assert pace == pytest.approx((3.0, 2.0, 1.5, 1 / 3))


def overlap_of(**changes: overlap.Pace) -> dict[str, Any]:
    good = {
        "sequential": overlap.Pace(step=2.1, train=1.0, generate=1.0, idle=0.5),
        "async": overlap.Pace(step=1.05, train=1.0, generate=1.0, idle=0.05),
        "headroom": overlap.Pace(step=1.02, train=1.0, generate=0.8, idle=0.02),
    }
    return overlap.conclude(good | changes)


def test_overlap_is_judged_by_the_longer_part_and_sequential_mode_by_both() -> None:
    result = overlap_of()
    assert overlap.misses(result) == []
    assert result["async_step_over_max"] == pytest.approx(1.05)
    assert result["sequential_step_over_sum"] == pytest.approx(1.05)
    assert result["predicted"] == {"step_seconds": 1.0, "learner_idle": 0.0}
    assert overlap.misses(overlap_of(**{"async": overlap.Pace(1.2, 1.0, 0.9, 0.0)})) == [
        "async_step_over_max is 1.200, more than 1.1"
    ]
    assert overlap.misses(overlap_of(sequential=overlap.Pace(1.2, 1.0, 1.0, 0.0))) == [
        "sequential_step_over_sum is 0.600, outside 0.9 to 1.2"
    ]
    assert overlap.misses(overlap_of(headroom=overlap.Pace(1.1, 1.0, 0.8, 0.09))) == ["learner_idle is 0.090, more than 0.05"]


def test_an_idle_learner_says_nothing_where_the_capacity_rule_is_not_met() -> None:
    result = overlap_of(headroom=overlap.Pace(1.3, 1.0, 1.3, 0.01))
    assert result["predicted"]["learner_idle"] == pytest.approx(0.3 / 1.3)
    assert overlap.misses(result) == ["the producers did not meet the capacity rule, so learner_idle says nothing"]
