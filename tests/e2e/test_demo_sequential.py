"""`echo-demo --mode sequential` with producers that pull from each other: whole processes, and staleness 0."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.demo import Demo, check_summary
from tests.eventually import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS, GROUPS, GROUP = 12, 8, 8
PRODUCERS = {"p0", "p1"}


def sent_to_peers(exposition: str) -> dict[str, float]:
    """Chunk bytes that each producer has sent to others so far."""
    samples = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples]
    return {one.labels["producer"]: one.value for one in samples if one.name == "echo_produce_peer_sent_bytes_total"}


def pulls(log: Path) -> list[tuple[int, int]]:
    """A producer's pulls that went well: version, bytes that came from peers."""
    lines = [dict(re.findall(r"(\w+)=(\d+)", line)) for line in log.read_text().splitlines() if "] pulled " in line]
    return [(int(line["version"]), int(line["from_peers"])) for line in lines]


def test_producers_that_are_asked_for_each_step_feed_each_other(tmp_path: Path, warm_policy: Path, started: list[Demo]) -> None:
    """Both ways, as sender and receiver count it; no trajectory is stale, and each step trains what it asked for."""
    demo = Demo(
        tmp_path / "out",
        "--mode",
        "sequential",
        f"model.path={warm_policy}",
        f"learner.steps={STEPS}",
        f"batch.groups_per_step={GROUPS}",
        "producer.groups_per_call=4",
        "weights.peers=true",
        # On one machine a pull would be over before anybody hears of it: a narrow link, and many chunks.
        "weights.max_egress_bytes_per_s=6e6",
        "weights.chunk_bytes=32768",
        # Deltas are less than a MiB, below which nobody asks for peers.
        "weights.delta_chain=0",
    )
    started.append(demo)
    demo.until_step(1)

    def serving() -> set[str]:
        assert len(demo.steps()) < STEPS, f"the run is over, and not both have served the other:\n{demo.log}"
        return {name for name, sent in sent_to_peers(demo.exposition()).items() if sent}

    eventually(lambda: serving() == PRODUCERS, "both serve the other", timeout_s=60)
    assert demo.wait() == 0, demo.log
    check_summary(summary := demo.summary(), learned=False)
    assert (summary["steps"], summary["trained"], summary["pending"]) == (STEPS, STEPS * GROUPS * GROUP, 0)
    assert (summary["staleness_max"], summary["staleness_bound"]) == (0, 0)
    assert [set(line["staleness"]) for line in demo.steps()] == [{"0"}] * STEPS
    for name in PRODUCERS:
        pulled = pulls(log := demo.out / "logs" / f"produce-{name[1:]}.log")
        versions = [version for version, _ in pulled]
        assert versions == sorted(set(versions)), "if_behind: no version is pulled twice"
        assert sum(from_peers for _, from_peers in pulled) > 0, log.read_text()
    assert eventually(lambda: not demo.processes(), "all of its processes ended"), demo.processes()
