"""Sequential mode and a loop in one process come to the same weights, bit for bit: decoupling by itself changes nothing."""

from pathlib import Path

import pytest

from tests.experiments import loop, parity
from tests.experiments.untrained import untrained_run

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("tansu", "own_process"), pytest.mark.timeout(600)]


def test_sequential_mode_gives_the_bits_of_the_colocated_loop(tmp_path: Path) -> None:
    """Two producers, trainer, weight server and log against none of them, in float32 on one thread."""
    run = untrained_run(tmp_path / "model", steps=3, mode="sequential", max_staleness=0, checkpoint={"every": 3})
    alone = loop.train(run, 0, judge=False)
    apart = parity.in_processes(run, tmp_path / "processes")
    assert apart.digest == alone.digest
    assert apart.sampled == alone.sampled != [0.0] * 3
