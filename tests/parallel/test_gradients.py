"""Two ranks under `accelerate launch`, whole or sharded, do what one process does: gradients, weights, skips, checkpoints."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from consumers.checkpoint import CheckpointStore
from consumers.learner import Learner, team_of
from echo.config import RunConfig
from tests.helpers import RUN_ID
from tests.parallel.launch import launch
from tests.parallel.ranks import SINGLE, lead
from tests.unit.test_learner import make_model

# What a gradient of norm 1 may differ by where its sum was taken in another order; and of bfloat16, whose parts were rounded.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
PATIENCE_S = 150

SCENARIOS: dict[str, dict[str, Any]] = {
    "whole": {"batches": [1, 3, SINGLE, 2], "nan_at": 1},
    "sharded": {"sharding": "full", "batches": [3, 1, SINGLE], "load": True, "nan_at": 3},
    "whole-adapters": {
        "lora": {"rank": 4},
        "kl_coefficient": 0.1,
        "gradient_checkpointing": True,
        "batches": [1, 2],
        "tokens_per_microbatch": 10_000,
    },
    "sharded-adapters": {"sharding": "full", "grad_clip": 0.5, "lora": {"rank": 3}, "kl_coefficient": 0.1, "batches": [1, 2]},
    "whole-preferences": {"objective": "dpo", "batches": [1, SINGLE, 2]},
    "sharded-bfloat16": {"sharding": "full", "dtype": "bfloat16", "batches": [1]},
    "sharded-reference": {"sharding": "full", "kl_coefficient": 0.1, "gradient_checkpointing": True, "batches": [1, 2]},
}

EXACT = [name for name, values in SCENARIOS.items() if "dtype" not in values]


class Outcome(NamedTuple):
    """What a scenario left behind."""

    gradients: dict[str, torch.Tensor]
    published: dict[str, torch.Tensor]
    adapters: dict[str, torch.Tensor]
    stats: list[dict[str, Any]]
    checkpoint: Path

    @classmethod
    def of(cls, folder: Path) -> "Outcome":
        adapters = folder / "adapters.safetensors"
        (checkpoint,) = folder.glob("step-*")
        return cls(
            load_file(folder / "gradients.safetensors"),
            load_file(folder / "published.safetensors"),
            load_file(adapters) if adapters.exists() else {},
            json.loads((folder / "stats.json").read_text()),
            checkpoint,
        )


def run_of(model: str, *, dtype: str = "float32", **learner: Any) -> RunConfig:
    base = {
        "lr": 3e-3,
        "tokens_per_microbatch": 40,
        "entropy_coefficient": 0.01,
        "threads": 1,
        "rank_timeout_s": 40,
        "grad_clip": 1e9,
    }
    schedule = {"schedule": "cosine", "warmup_steps": 1, "steps": 8}
    return RunConfig.model_validate(
        {"run_id": RUN_ID, "model": {"path": model, "dtype": dtype}, "learner": base | schedule | learner}
    )


def alone(run: RunConfig, seeds: list[int], load: Path | None, nan_at: int | None, out: Path) -> Outcome:
    AcceleratorState._reset_state(True)
    threads = torch.get_num_threads()
    out.mkdir()
    lead(team_of(run), run, seeds, out, load=None if load is None else str(load), nan_at=nan_at)
    torch.set_num_threads(threads)
    return Outcome.of(out)


class Results(NamedTuple):
    model: str
    one: dict[str, Outcome]
    two: dict[str, Outcome]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Every scenario on two ranks, all in one launch, and in this process."""
    folder = tmp_path_factory.mktemp("ranks")
    model = make_model(folder / "tiny")
    before = alone(run_of(model), [4, 5], None, None, folder / "before").checkpoint
    scenarios, runs = [], {}
    for name, values in SCENARIOS.items():
        learner = dict(values)
        batches, nan_at = learner.pop("batches"), learner.pop("nan_at", None)
        load = before if learner.pop("load", False) else None
        runs[name] = run_of(model, **learner), batches, load, nan_at
        scenarios.append(
            {
                "name": name,
                "run": runs[name][0].model_dump(mode="json"),
                "batches": batches,
                "load": None if load is None else str(load),
                "nan_at": nan_at,
            }
        )
    path = folder / "scenarios.json"
    path.write_text(json.dumps(scenarios))
    log_path = folder / "launch.log"
    job = launch("tests.parallel.ranks", str(path), log_path=log_path)
    try:
        one = {name: alone(*values, folder / f"{name}-alone") for name, values in runs.items()}
        assert job.wait(PATIENCE_S) == 0, log_path.read_text()
    finally:
        job.kill()
        job.wait()
    return Results(model, one, {name: Outcome.of(folder / name) for name in runs})


def assert_close(two: dict[str, torch.Tensor], one: dict[str, torch.Tensor], tolerance: float) -> None:
    assert two.keys() == one.keys()
    assert one
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_gradient_is_that_of_one_process(results: Results, name: str) -> None:
    """Rows, padding and the number of micro-batches differ by rank; the sum does not."""
    one, two = results.one[name], results.two[name]
    norm = torch.linalg.vector_norm(torch.stack([value.norm() for value in one.gradients.values()]))
    a, b = ({key: value / norm for key, value in outcome.gradients.items()} for outcome in (two, one))
    assert_close(a, b, TOLERANCE["bfloat16" if "bfloat16" in name else "float32"])


@pytest.mark.parametrize("name", EXACT)
def test_statistics_are_those_of_the_whole_batch(results: Results, name: str) -> None:
    for two, one in zip(results.two[name].stats, results.one[name].stats, strict=True):
        assert two["skipped"] == one["skipped"]
        assert two["loss_tokens"] == one["loss_tokens"]
        assert two["learning_rate"] == one["learning_rate"]
        if not one["skipped"]:
            assert two["mismatch_kl"] == pytest.approx(one["mismatch_kl"], rel=1e-3)
            for field in ("loss", "grad_norm", "entropy", "ess_ratio", "reference_kl"):
                assert two[field] == pytest.approx(one[field], rel=1e-3, abs=1e-5), field


@pytest.mark.parametrize("name", ["whole", "sharded"])
def test_all_ranks_leave_out_the_same_step(results: Results, name: str) -> None:
    """One rank alone had a loss that is NaN; had it alone left out the step, weights would differ."""
    assert [line["skipped"] for line in results.two[name].stats][:3] == [False, True, False]


@pytest.mark.parametrize("name", EXACT)
def test_published_weights_are_whole_and_those_of_one_process(results: Results, name: str) -> None:
    """Adam divides by a gradient's own size, so rounding of a tiny one may move its weight by a part of lr = 3e-3."""
    assert_close(results.two[name].published, results.one[name].published, 1e-3)
    if "adapters" in name:
        assert_close(results.two[name].adapters, results.one[name].adapters, 1e-3)
        assert results.two[name].adapters.keys().isdisjoint(results.two[name].published)


@pytest.mark.parametrize("name", EXACT)
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(results: Results, name: str, tmp_path: Path) -> None:
    """Every tensor whole, moments included, and the very weights that were published; the next step then is the same."""
    values = {key: value for key, value in SCENARIOS[name].items() if key not in ("batches", "load", "nan_at", "sharding")}
    run = run_of(results.model, **values)
    published, gradients = [], []
    for outcome in (results.one[name], results.two[name]):
        learned = alone(run, [6], outcome.checkpoint, None, tmp_path / f"next-{len(published)}")
        gradients.append(learned.gradients)
        AcceleratorState._reset_state(True)
        again = Learner(run)
        loaded = CheckpointStore(tmp_path, RUN_ID, keep=1).load(outcome.checkpoint)
        again.load_state(loaded.tensors, loaded.meta)
        published.append({t.name: bytes(t.data) for t in again.host_tensors()})
    assert published[1] == {key: value.numpy().tobytes() for key, value in results.two[name].published.items()}
    assert_close(gradients[1], gradients[0], 1e-2)
