"""One rank of a job that `accelerate launch` starts: the same steps as one process would do, written down by rank 0.

    accelerate launch --multi_gpu --num_processes 2 -m tests.parallel.ranks SCENARIOS.json

SCENARIOS.json: a list of {name, run, batches, load, nan_at}: a run file, seeds of batches (see `batch_of`), a checkpoint folder
to begin with or null, and a step in which the last rank's loss is NaN or null. For each, rank 0 leaves `<name>/`: a checkpoint
of the state after the steps, `gradients.safetensors` of the first step, `published.safetensors`, `adapters.safetensors` where
there are some, and `stats.json`, a line per step.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file

from consumers.checkpoint import CheckpointStore
from consumers.groups import Group
from consumers.learner import Learner, team_of
from consumers.parallel import Command, Team, whole
from consumers.step import StepStats
from echo.config import RunConfig
from echo.process import die_with_parent
from echo.weights.manifest import HostTensor
from tests.helpers import RUN_ID, make_group
from tests.unit.test_learner import make_batch

SINGLE = -1


def batch_of(seed: int) -> list[Group]:
    """Random groups; for SINGLE, fewer rows than there are ranks."""
    if seed == SINGLE:
        return [make_group(1, members=[{"completion_ids": [3, 4, 5, 6, 7]}])]
    return make_batch(seed)


def watched(learner: Learner) -> dict[str, torch.Tensor]:
    """The whole gradients of the first step, read before the optimiser moves the weights. On every rank: they are gathered."""
    found: dict[str, torch.Tensor] = {}

    def read(*_: Any) -> None:
        fresh = {name: whole(p.grad).clone() for name, p in learner._parameters.items() if p.grad is not None}
        found.update({} if found else fresh)

    learner._adam.register_step_pre_hook(read)
    return found


def poison(learner: Learner, step: int) -> None:
    """Have this process's part of the loss be NaN in that step, counted from the start of the run."""
    real = learner._loss

    def loss(*given: Any) -> Any:
        found = real(*given)
        return found._replace(loss=found.loss * (np.nan if learner._steps == step else 1.0))

    learner._loss = loss  # type: ignore[method-assign]


def steps_of(learner: Learner, seeds: list[int]) -> list[StepStats]:
    return [learner.step(batch_of(seed), newest_version=7) for seed in seeds]


def tensor_of(tensor: HostTensor) -> torch.Tensor:
    assert tensor.dtype == "F32"
    return torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).reshape(tensor.shape)


def lead(team: Team, run: RunConfig, seeds: list[int], out: Path, *, load: str | None, nan_at: int | None = None) -> None:
    learner = Learner(run, team)
    store = CheckpointStore(out, RUN_ID, keep=1)
    if load is not None:
        loaded = store.load(Path(load))
        learner.load_state(loaded.tensors, loaded.meta)
    gradients = watched(learner)
    if team.size == 1 and nan_at is not None:
        poison(learner, nan_at)
    stats = steps_of(learner, seeds)
    store.save(len(seeds), *learner.state(), policy_version=0, reader={})
    save_file(gradients, out / "gradients.safetensors")
    save_file({t.name: tensor_of(t) for t in learner.host_tensors()}, out / "published.safetensors")
    adapters = {t.name: tensor_of(t) for t in learner.adapter_tensors()}
    if adapters:
        save_file(adapters, out / "adapters.safetensors")
    kept = ("loss", "grad_norm", "entropy", "ess_ratio", "reference_kl", "loss_tokens", "skipped", "learning_rate")
    lines = [{name: getattr(one, name) for name in kept} | {"mismatch_kl": one.mismatch_kl} for one in stats]
    (out / "stats.json").write_text(json.dumps(lines))


def main() -> None:
    die_with_parent(os.getppid())
    path = Path(sys.argv[1])
    torch.set_num_threads(1)
    for scenario in json.loads(path.read_text()):
        run = RunConfig.model_validate(scenario["run"])
        out = path.parent / scenario["name"]
        AcceleratorState._reset_state(False)  # It keeps one precision; the ranks stay.
        team = team_of(run)
        assert team.size == 2
        if team.leads:
            out.mkdir()
            lead(team, run, scenario["batches"], out, load=scenario["load"], nan_at=scenario["nan_at"])
        else:
            command, _ = team.listen()
            assert command is Command.BUILD
            learner = Learner(run, team)
            watched(learner)
            if scenario["nan_at"] is not None:
                poison(learner, scenario["nan_at"])
            learner.follow()
        team.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
