"""Whatever is killed, and whenever: no acknowledged record is lost, none is trained twice, nothing waits for ever.

Real processes, a real broker (Apache Kafka where a home is there, else Tansu), the real commands; only the engine samples
without a model. After each scenario the run is brought to its end and every id is compared (`audit`).
"""

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo import codec, control
from echo.broker import ApacheBroker, RunningBroker
from echo.control import Announcement, Progress
from tests.chaos.audit import Verdict, audit
from tests.chaos.small_disk import mounted
from tests.chaos.storm import storm
from tests.chaos.swarm import GROUP, TRAINER, WEIGHTS, Swarm, choose_broker, open_broker
from tests.chaos.trainer_process import POINTS

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """One for this module, which may kill it."""
    with open_broker(choose_broker(), tmp_path_factory.mktemp("chaos")) as started:
        yield started


@pytest.fixture
def swarm(broker: RunningBroker, tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path / "run", broker) as made:
        yield made


def check(swarm: Swarm) -> Verdict:
    verdict = audit(swarm)
    events = "\n".join(swarm.events)
    assert (verdict.lost, verdict.trained_twice, verdict.wrong) == (0, 0, ()), f"{verdict}\n{events}"
    assert verdict.counts is not None
    assert verdict.counts.trained > 0
    return verdict


def test_the_trainer_dies_before_and_after_every_step_of_its_loop(swarm: Swarm) -> None:
    """One run, twelve lives that end at a named point each, and a thirteenth that ends well.

    Each life but the first goes on from a checkpoint, writes one, and dies with one to three steps on top of it, which its
    successor has to take back. In each a producer leaves half a group behind, so that in some, as the broker and the producers
    happen to go, records are resolved above a frontier when the checkpoint is written; property tests have that for certain.
    """
    swarm.start(WEIGHTS)
    swarm.start("p1")
    for point in [point for point in POINTS if not point.endswith("ended")]:
        swarm.start("p0", die_at=2 * GROUP + GROUP // 2 + 1)
        # The first announcement of a life is made before any step; checkpoints are written after every second one.
        passing = {"cut": 4, "optimised": 4, "stored": 5, "announced": 5, "checkpointed": 2}[point.partition("-")[2]]
        # Half groups wait for longer than a life, so that a checkpoint may have some.
        swarm.start(TRAINER, "batch.group_deadline_s=60", die_at=f"{point}:{passing}")
        assert swarm.await_death(TRAINER).startswith(point)
        swarm.kill("p0")
    swarm.start("p0")
    # The producers are gone once they have heard of the end: no later life may need more from them than what is in the log.
    # With one checkpoint only, at the end, it would.
    last = swarm.step() + 8
    at_the_end = (f"learner.steps={last}", "checkpoint.every=1000")
    for point in ("before-ended", "after-ended"):
        swarm.start(TRAINER, *at_the_end, die_at=point)
        assert swarm.await_death(TRAINER).startswith(point)
    swarm.start(TRAINER, *at_the_end)
    swarm.await_end()
    assert check(swarm).steps == last


def test_a_producer_dies_in_mid_group(swarm: Swarm) -> None:
    """Half a group is in the log: it is never trained, and nobody waits for the other half."""
    swarm.start(WEIGHTS)
    swarm.start(TRAINER)
    swarm.start("p1")
    swarm.start("p0", die_at=GROUP + GROUP // 2 + 1)
    swarm.await_death("p0")
    swarm.start("p0")
    swarm.await_training()
    swarm.end_well()
    check(swarm)
    members: Counter[str] = Counter()
    for record in swarm.records(swarm.spec.names.trajectories):
        members[codec.decode_headers(record.headers).group_id] += 1
    halves = {group for group, count in members.items() if count < GROUP}
    assert [members[group] for group in halves] == [GROUP // 2]
    trained = {group[0] for line in swarm.journal() for group in line.get("batch", ())}
    assert trained.isdisjoint(halves)


def test_the_weight_server_dies_in_mid_pull(swarm: Swarm) -> None:
    """At the first pull of all, and in a later one: what was verified serves on, and the pull is done again."""
    swarm.start(WEIGHTS, die_at=3)
    swarm.start(TRAINER)
    for producer in swarm.producers:
        swarm.start(producer)
    assert swarm.await_death(WEIGHTS).startswith("in mid-pull")
    swarm.start(WEIGHTS, die_at=40)
    assert swarm.await_death(WEIGHTS).startswith("in mid-pull")
    swarm.start(WEIGHTS)
    swarm.await_training()
    swarm.end_well()
    check(swarm)


def granted(swarm: Swarm) -> set[str]:
    """Producers that the newest message with grants names, by their ids."""
    names: set[str] = set()
    for record in swarm.records(swarm.spec.names.control):
        message = control.decode_control(record.value, record.where)
        if isinstance(message, Announcement | Progress):
            names = {incarnation.rpartition("-")[0] for incarnation in message.grants}
    return names


def test_a_producer_sleeps_past_the_dead_limit_and_wakes(swarm: Swarm) -> None:
    """Its window goes to the other one and comes back; what it had in flight is judged like any other record."""
    swarm.start_all()
    swarm.until(lambda: granted(swarm) == set(swarm.producers), "both producers have a window")
    swarm.send("p0", signal.SIGSTOP)
    swarm.until(lambda: granted(swarm) == {"p1"}, "the sleeping producer is held for dead")
    swarm.await_training()
    swarm.send("p0", signal.SIGCONT)
    swarm.until(lambda: granted(swarm) == set(swarm.producers), "the producer that woke has a window again")
    swarm.end_well()
    check(swarm)


@pytest.mark.kafka
def test_the_broker_is_killed_and_comes_back_with_its_data(broker: RunningBroker, swarm: Swarm) -> None:
    """Trainer and producers wait, none of them ends, and the run goes on."""
    if not isinstance(broker, ApacheBroker):
        pytest.skip("a restart of Tansu loses everything by design; needs an Apache Kafka home (KAFKA_HOME or ../shared/kafka)")
    swarm.start_all()
    swarm.await_training(3)
    swarm.restart_broker()
    before = len(swarm.journal())
    swarm.until(lambda: len(swarm.journal()) > before + 3, "steps after the broker is back")
    swarm.end_well()
    check(swarm)


def test_twenty_random_kills_with_other_faults_between(broker: RunningBroker, tmp_path: Path) -> None:
    """Hostile records, strangers' connections, bad peers, new partitions, a frozen broker, a full disk: see `Faults`."""
    with mounted(tmp_path / "disk", print) as disk, Swarm(tmp_path / "run", broker, small_disk=disk) as swarm:
        told = storm(swarm, kills=20, seed=1)
        assert sum(told.killed.values()) == 20
        assert sum(told.faults.values()) > 5
        check(swarm)
        assert swarm.grown() == []
