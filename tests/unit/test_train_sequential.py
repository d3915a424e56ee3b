"""The trainer's loop in sequential mode, with a real learner and producers that a test plays: staleness 0, and weights that
depend on nothing but the run file."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from consumers.dispatcher import MAX_ATTEMPTS, UndeliverableGroupError
from consumers.train import Trainer
from consumers.wiring import trainer_of
from echo import codec, control, journal
from echo.config import RunConfig
from echo.control import Announcement, EndOfRun, Heartbeat, Request
from echo.metrics import TrainerMetrics
from echo.process import StopSignal
from tests.helpers import RUN_ID, make_trajectory
from tests.unit.test_control import HEARTBEAT
from tests.unit.test_learner import make_model
from tests.unit.test_train_loop import GROUP, NAMES, Cluster, make_run

STEPS = 3


pytestmark = pytest.mark.usefixtures("own_process")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def answer(request: Request, cluster: Cluster, group: int, members: range = range(GROUP), **fields: Any) -> None:
    """What any producer publishes for a request's group: it follows from the request alone."""
    for index in members:
        draw = random.Random(f"{request.seed}/{group}/{index}")
        trajectory = make_trajectory(
            **{
                "group_id": request.group_ids[group],
                "group_size": GROUP,
                "group_index": index,
                "trajectory_id": f"{RUN_ID}/{request.producer}/{draw.randrange(10**9)}",
                "prompt_id": f"prompt-{request.first_prompt + group}",
                "completion_ids": [draw.randrange(3, 12) for _ in range(4)],
                "reward": float(draw.randrange(2)),
                "spans": ((0, request.version),),
                **fields,
            }
        )
        key, headers, value = codec.encode(trajectory)
        with cluster.log.changed:
            cluster.log.append(NAMES.trajectories, key, value, headers)


class Swarm:
    """Producers that a test plays, from inside the trainer's looks: `names` live, `deliver` answers what they were asked."""

    def __init__(self, cluster: Cluster, *names: str, deliver: Callable[["Swarm", list[Request]], None]) -> None:
        self.cluster = cluster
        self.names = list(names)
        self.requests: list[Request] = []
        self._deliver = deliver
        self._read = 0
        self._beats = 0

    def look(self) -> None:
        self._beats += 1
        for name in self.names:
            self.beat(name)
        records = self.cluster.log.records(NAMES.requests)
        fresh = [control.decode_request(record.value, record.where) for record in records[self._read :]]
        self._read = len(records)
        self.requests += fresh
        self._deliver(self, fresh)

    def beat(self, name: str, **fields: Any) -> None:
        message: Heartbeat = msgspec.structs.replace(
            HEARTBEAT,
            **{
                "run_id": RUN_ID,
                "producer_id": name,
                "incarnation": f"{name}.1",
                "sequence": self._beats,
                "created": 1.0,
                **fields,
            },
        )
        with self.cluster.log.changed:
            self.cluster.log.append(NAMES.heartbeats, b"p", control.encode(message), [])


def all_at_once(swarm: Swarm, requests: list[Request]) -> None:
    for request in requests:
        for group in range(len(request.group_ids)):
            answer(request, swarm.cluster, group)


def sequential_run(model: str, folder: Path, *, steps: int = STEPS, **sections: dict[str, Any]) -> RunConfig:
    run = make_run(
        model, folder, steps=steps, **{"batch": {"groups_per_step": 4}, "producer": {"groups_per_call": 2}, **sections}
    )
    return run.model_copy(update={"mode": "sequential"})


def train(run: RunConfig, cluster: Cluster, swarm: Swarm, *, stop: StopSignal | None = None) -> Trainer:
    metrics = TrainerMetrics(RUN_ID, CollectorRegistry())
    with trainer_of(run, cluster.clients, metrics=metrics, stop=stop or StopSignal()) as trainer:
        trainer._check_children = swarm.look
        trainer.run()
    return trainer


def weights(trainer: Trainer) -> dict[str, bytes]:
    return {tensor.name: bytes(tensor.data) for tensor in trainer._learner.host_tensors()}


def steps_of(run: RunConfig) -> list[dict[str, Any]]:
    return [line for line in journal.read(run.checkpoint.dir / journal.FILE_NAME) if "batch" in line]


def test_every_step_trains_what_it_asked_for_of_the_newest_version(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    swarm = Swarm(cluster, "a", deliver=all_at_once)
    run = sequential_run(model_path, tmp_path)
    train(run, cluster, swarm)
    assert [(r.step, r.version, r.first_prompt) for r in swarm.requests] == [
        (step, step, 4 * step + first) for step in range(STEPS) for first in (0, 2)
    ]
    assert [line["staleness"] for line in steps_of(run)] == [{"0": 4 * GROUP}] * STEPS
    trained = [group[0] for line in steps_of(run) for group in line["batch"]]
    assert trained == [f"{RUN_ID}/requested/v{prompt // 4}-{prompt}" for prompt in range(4 * STEPS)]
    assert isinstance(cluster.messages()[-1], EndOfRun)
    assert all(not message.grants for message in cluster.messages() if isinstance(message, Announcement))


def test_requests_go_out_after_their_version_is_announced(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    newest = []

    def deliver(swarm: Swarm, requests: list[Request]) -> None:
        announced = max(message.version for message in cluster.messages() if isinstance(message, Announcement))
        newest.extend((request.version, announced) for request in requests)
        all_at_once(swarm, requests)

    train(sequential_run(model_path, tmp_path), cluster, Swarm(cluster, "a", deliver=deliver))
    assert len(newest) == 2 * STEPS
    assert all(asked == announced for asked, announced in newest)


def test_the_weights_do_not_depend_on_who_answers_and_in_which_order(model_path: str, tmp_path: Path) -> None:
    """One producer in order; or three, of which one is dead, backwards, members apart, and some of it twice."""

    def backwards(swarm: Swarm, requests: list[Request]) -> None:
        swarm.names = ["b", "c"] if swarm.requests else ["a", "b", "c"]
        for request in reversed(requests):
            if request.producer == "a.1":
                answer(request, cluster, 0, range(1))
                continue
            for group in reversed(range(len(request.group_ids))):
                answer(request, cluster, group, range(GROUP - 1, GROUP))
                answer(request, cluster, group)

    found = []
    for number, (names, deliver) in enumerate([(("a",), all_at_once), (("a", "b", "c"), backwards)]):
        cluster = Cluster()
        run = sequential_run(model_path, tmp_path / str(number), batch={"groups_per_step": 4, "producer_dead_s": 0.4})
        found.append(weights(train(run, cluster, Swarm(cluster, *names, deliver=deliver))))
        counts = cluster.counts(run)
        assert (counts.trained, counts.staleness_max, counts.pending) == (STEPS * 4 * GROUP, 0, 0)
        assert ("duplicate" in counts.dropped) == (number == 1)
    assert found[0] == found[1]


def test_a_killed_trainer_comes_to_the_weights_of_one_that_lived(model_path: str, tmp_path: Path) -> None:
    """Its steps after the checkpoint are asked for again, under a new version: nothing of the old ones is trained."""
    cluster = Cluster()
    whole = weights(train(sequential_run(model_path, tmp_path / "a"), cluster, Swarm(cluster, "a", deliver=all_at_once)))
    cluster = Cluster()
    run = sequential_run(model_path, tmp_path / "b", checkpoint={"every": 1})
    swarm = Swarm(cluster, "a", deliver=all_at_once)
    with trainer_of(run, cluster.clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=StopSignal()) as trainer:
        trainer._check_children = swarm.look
        trainer._checkpoint, kept = lambda: kept() if trainer.step == 1 else None, trainer._checkpoint  # type: ignore[method-assign]
        trainer.run()
    first_life = list(swarm.requests)
    again = train(run, cluster, swarm)
    assert weights(again) == whole
    second_life = swarm.requests[len(first_life) :]
    assert [(r.step, r.version) for r in second_life] == [(1, 4), (1, 4), (2, 5), (2, 5)]
    assert not {name for r in first_life for name in r.group_ids} & {name for r in second_life for name in r.group_ids}
    counts = cluster.counts(run)
    assert (counts.trained, counts.dropped, counts.staleness_max) == (STEPS * 4 * GROUP, {"stale": 2 * 4 * GROUP}, 0)


def test_steps_of_one_version_ask_for_prompts_of_their_own(model_path: str, tmp_path: Path) -> None:
    """publish_every 2: two steps name the same version, and no group id comes twice."""
    cluster = Cluster()
    swarm = Swarm(cluster, "a", deliver=all_at_once)
    run = sequential_run(model_path, tmp_path, learner={"publish_every": 2})
    train(run, cluster, swarm)
    assert [(r.step, r.version) for r in swarm.requests] == [(0, 0), (0, 0), (1, 0), (1, 0), (2, 1), (2, 1)]
    assert len({name for request in swarm.requests for name in request.group_ids}) == 4 * STEPS
    assert [line["staleness"] for line in steps_of(run)] == [{"0": 4 * GROUP}] * STEPS


def test_what_nobody_asked_for_is_not_trained(model_path: str, tmp_path: Path) -> None:
    """Also where it is fresh and would make a batch."""

    def deliver(swarm: Swarm, requests: list[Request]) -> None:
        for request in requests:
            answer(request, cluster, 0, group_id=f"{RUN_ID}/p.9/g{request.first_prompt}")
        all_at_once(swarm, requests)

    cluster = Cluster()
    run = sequential_run(model_path, tmp_path)
    train(run, cluster, Swarm(cluster, "a", deliver=deliver))
    assert cluster.counts(run).dropped == {"unrequested": 2 * STEPS * GROUP}
    assert all("requested" in group[0] for line in steps_of(run) for group in line["batch"])


def test_a_group_that_can_not_be_read_is_asked_for_again(model_path: str, tmp_path: Path) -> None:
    def deliver(swarm: Swarm, requests: list[Request]) -> None:
        for request in requests:
            if request is swarm.requests[0]:
                answer(request, cluster, 0, range(1), completion_ids=[10**6])
            all_at_once(swarm, [request])

    cluster = Cluster()
    swarm = Swarm(cluster, "a", deliver=deliver)
    run = sequential_run(model_path, tmp_path)
    train(run, cluster, swarm)
    again = [request for request in swarm.requests if request.issue]
    assert [request.group_ids for request in again] == [(f"{RUN_ID}/requested/v0-0-1", f"{RUN_ID}/requested/v0-1")]
    assert cluster.counts(run).dead_lettered == 1


def test_a_call_that_no_producer_can_answer_ends_the_run_with_their_words(model_path: str, tmp_path: Path) -> None:
    """One lives on and gives it up, the others end of it; nothing waits for a deadline."""
    lives: list[str] = []

    def deliver(swarm: Swarm, requests: list[Request]) -> None:
        assert swarm._beats < 100, "the trainer hears none of it"
        for request in requests:
            if request.first_prompt != 2:
                all_at_once(swarm, [request])
                continue
            name = request.producer.removesuffix(".1")
            lives.append(name)
            swarm.beat(name, sequence=10**6 + len(lives), given_up={request.request_id: "99 bytes"}, leaving=name != "a")
            if name != "a":
                swarm.names = ["a", f"b{len(lives)}"]

    cluster = Cluster()
    told = r"step 0 .* prompts 2 to 3 .* given up 8 times, by .*; the last time: 99 bytes"
    with pytest.raises(UndeliverableGroupError, match=told):
        train(sequential_run(model_path, tmp_path), cluster, Swarm(cluster, "a", "b0", deliver=deliver))
    assert len(lives) == MAX_ATTEMPTS
    assert len(set(lives)) > 2


def test_a_waiting_trainer_says_which_groups_it_misses_and_at_whom(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    stop = StopSignal()

    def deliver(swarm: Swarm, requests: list[Request]) -> None:
        if any("at a.1" in entry["event"] for entry in said):
            stop.request()

    with capture_logs() as said:
        train(sequential_run(model_path, tmp_path), cluster, Swarm(cluster, "a", deliver=deliver), stop=stop)
    told = [entry["event"] for entry in said if entry["event"].startswith("waiting for a batch")]
    assert "step 0 lacks 4 groups of version 0: 2 groups from prompt 0 on asked of nobody" in told[0]
    assert "2 groups from prompt 0 on at a.1 for 0 s; 2 groups from prompt 2 on at a.1 for 0 s" in told[-1]
