"""The main job: `echo-demo` on the embedded broker climbs, accounts for every trajectory, and leaves nothing running."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.e2e.demo import Demo, check_summary
from tests.eventually import eventually
from tests.promql import metrics_in, names_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# The demo trains without a reference policy: it has no distance from one, and 0 would be a lie. All prompts of its
# task can be used.
NOT_IN_THE_DEMO = {"echo_train_reference_kl_nats", "echo_produce_prompts_left_out_total"}


def test_the_reward_climbs_and_every_trajectory_is_accounted_for(tmp_path: Path, started: list[Demo]) -> None:
    """Also: the board shows nothing that a live run does not expose."""
    demo = Demo(tmp_path / "out", "--seed", "0")
    started.append(demo)
    demo.until_step(8)
    exposed = names_of(demo.exposition())
    board = json.loads((ROOT / "grafana" / "echo.json").read_text())
    assert metrics_in(board) - exposed == NOT_IN_THE_DEMO
    assert demo.wait() == 0, demo.log
    check_summary(summary := demo.summary())
    bias = json.loads((demo.out / "bias.json").read_text())["drop_bias"]
    numbers = {outcome: sum(task["number"] for task in tasks.values()) for outcome, tasks in bias.items()}
    assert numbers == {"trained": summary["trained"], "dropped": sum(summary["dropped"].values())}
    with Image.open(demo.out / "reward.png") as plot:
        assert plot.format == "PNG"
    assert eventually(lambda: not demo.processes(), "all of its processes ended"), demo.processes()


def test_ctrl_c_leaves_no_process_behind_and_an_own_model_as_it_was(
    tmp_path: Path, warm_policy: Path, started: list[Demo]
) -> None:
    """A model that the user names is trained from, and never written to."""
    shutil.copytree(warm_policy, model := tmp_path / "own")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    demo = Demo(tmp_path / "out", "learner.steps=100000", f"model.path={model}", "--seed", "5")
    started.append(demo)
    demo.until_step(1)
    assert len(demo.processes()) >= 4
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(60) == 130, demo.log
    assert eventually(lambda: not demo.processes(), "all of its processes ended"), demo.processes()
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert f"the policy is {model}" in demo.log
    assert not (demo.out / "model").exists()


def test_kill_9_leaves_no_process_behind(tmp_path: Path, warm_policy: Path, started: list[Demo]) -> None:
    demo = Demo(tmp_path / "out", "learner.steps=100000", f"model.path={warm_policy}")
    started.append(demo)
    assert eventually(lambda: len(demo.processes()) >= 4, "weight server, trainer and producers are there", timeout_s=120)
    demo.process.kill()
    assert eventually(lambda: not demo.processes(), "all of its processes ended", timeout_s=60), demo.processes()


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, started: list[Demo]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.yaml").write_text("run_id: earlier\n")
    demo = Demo(tmp_path / "out")
    started.append(demo)
    assert demo.wait() == 2
    assert "holds a run already: choose another --out" in demo.log
