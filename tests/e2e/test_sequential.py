"""Sequential mode with real processes on a real broker: staleness 0, whatever dies, and the weights of a run where nothing did.

Only the engine samples without a model; what it gives follows from the seed, as that of a real one does.
"""

from pathlib import Path
from typing import Any

from consumers.checkpoint import CheckpointStore
from echo.broker import RunningBroker
from tests.chaos.audit import Verdict, audit
from tests.chaos.swarm import GROUP, TRAINER, WEIGHTS, Swarm

STEPS = 4
KEYS: dict[str, Any] = {
    "mode": "sequential",
    "learner.steps": STEPS,
    # Longer than a dead producer is looked for: so its half of a group is completed, and not dropped.
    "batch.group_deadline_s": 60.0,
}


def check(swarm: Swarm) -> Verdict:
    verdict = audit(swarm)
    assert (verdict.lost, verdict.trained_twice, verdict.wrong, verdict.steps) == (0, 0, (), STEPS), swarm.events
    steps = [line for line in swarm.journal() if "batch" in line]
    assert [set(line["staleness"]) for line in steps] == [{"0"}] * STEPS
    return verdict


def weights(swarm: Swarm) -> dict[str, bytes]:
    checkpoint = CheckpointStore(swarm.run.checkpoint.dir, swarm.run.run_id, swarm.run.checkpoint.keep).newest()
    assert checkpoint is not None
    return {name: tensor.numpy().tobytes() for name, tensor in checkpoint.tensors.items()}


def test_deaths_cost_time_and_change_nothing_that_is_learned(tansu: RunningBroker, tmp_path: Path) -> None:
    """One run where nothing happens, with one producer. Another with two: one dies in the middle of a request, with a group and
    a half in the log, and the trainer dies after two steps."""
    with Swarm(tmp_path / "calm", tansu, producers=1, keys=KEYS) as calm:
        calm.start_all()
        calm.await_end()
        counts = check(calm).counts
        assert counts is not None
        assert (counts.trained, counts.dropped, counts.pending) == (STEPS * 4 * GROUP, {}, 0)
        expected = weights(calm)
    with Swarm(tmp_path / "stormy", tansu, keys={**KEYS, "checkpoint.every": 1}) as stormy:
        for role in (WEIGHTS, "p1"):
            stormy.start(role)
        stormy.start("p0", die_at=GROUP + GROUP // 2 + 1)
        stormy.start(TRAINER, die_at="before-announced:3")
        stormy.await_death("p0")
        stormy.start("p0")
        stormy.await_death(TRAINER)
        stormy.start(TRAINER)
        stormy.await_end()
        counts = check(stormy).counts
        assert counts is not None
        assert counts.trained == STEPS * 4 * GROUP
        # A step was done again, and what the dead producer had delivered came again from the other.
        assert set(counts.dropped) <= {"duplicate", "stale"}
        assert sum(counts.dropped.values()) >= GROUP + GROUP // 2 + 4 * GROUP
        assert weights(stormy) == expected
