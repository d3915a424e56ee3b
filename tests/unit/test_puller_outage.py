"""A weight server that is killed in mid-pull and stays away for longer than a pull tries: the producer outlives it."""

from contextlib import closing
from pathlib import Path

import msgspec

from echo.control import Announcement, Grant
from echo.weights.client import WeightClient
from echo.weights.spawn import WeightServerProcess
from echo.weights.store import WeightStore
from tests.eventually import eventually
from tests.fakes.wire import Wire
from tests.unit.test_produce_loop import RUN, Harness, announcement
from tests.unit.test_weights_http import CHUNK, publish, run_config, tensor

CHUNKS = 20


def pulls(h: Harness, outcome: str) -> float:
    labels = {"run": RUN, "producer": "p0", "outcome": outcome}
    return h.metrics.registry.get_sample_value("echo_produce_pulls_total", labels) or 0.0


def served(h: Harness) -> float | None:
    return h.metrics.registry.get_sample_value("echo_produce_serving_version", {"run": RUN, "producer": "p0"})


def test_a_server_that_stays_away_delays_the_newest_version_and_nothing_else(tmp_path: Path) -> None:
    """Nothing is announced anew then: the producer's own next try must find it. Until then it samples from what it has."""
    store = WeightStore(tmp_path / "store")
    run = run_config(store)
    # Gives up after three tries, within a tenth of a second.
    with (
        closing(WeightClient(attempts=3, first_wait_s=0.01, longest_wait_s=0.02)) as client,
        WeightServerProcess.start(run, tmp_path / "first.log") as first,
        Wire(first.port) as wire,
    ):

        def publish_and_announce(version: int, resolved: int) -> Announcement:
            published = publish(store, version, [tensor("a", version, CHUNKS * CHUNK)], run=RUN)
            return msgspec.structs.replace(
                announcement(version, grants={h.me: Grant(window=4, resolved=resolved)}),
                manifest_urls=(f"{wire.url}/v1/runs/{RUN}/manifests/{version}",),
                manifest_digest=published.digest,
            )

        h = Harness(puller=client)
        try:
            h.start().tell(publish_and_announce(0, 0))
            eventually(lambda: len(h.groups()) == 4, "version 0 is sampled from")

            wire.break_after(CHUNKS * CHUNK // 2, "close", then=first.kill)
            h.tell(publish_and_announce(1, 4))
            told = h.wait_for_heartbeat(lambda one: one.failed_pulls >= 2, "whole pulls fail")
            assert wire.cut.wait(10), "the first of them had half of the bytes"
            assert first.poll() == -9
            assert (told.serving, told.announced, told.pulls) == (0, 1, 1)
            assert "version 1 could not be pulled" in told.last_pull_error
            assert wire.url in told.last_pull_error
            # The window of 4 is one of 3 for who is a version behind, and of 2 for two.
            eventually(lambda: len(h.groups()) == 7, "sampling goes on")

            h.tell(publish_and_announce(2, 7))
            h.wait_for_heartbeat(lambda one: "version 2 could not be pulled" in one.last_pull_error, "also of the newest")
            eventually(lambda: len(h.groups()) == 9, "sampling still goes on")
            assert {trajectory.spans for trajectory in h.trajectories()} == {((0, 0),)}
            eventually(lambda: pulls(h, "failed") >= 3, "metrics say so")
            assert (served(h), pulls(h, "ok")) == (0, 1)

            back = run.model_copy(update={"weights": run.weights.model_copy(update={"port": first.port})})
            with WeightServerProcess.start(back, tmp_path / "second.log") as second:
                assert second.port == first.port
                told = h.wait_for_heartbeat(lambda one: one.serving == 2, "the newest version serves")
                assert (told.last_pull_error, told.pulls, told.announced) == ("", 2, 2)
                eventually(lambda: (served(h), pulls(h, "ok")) == (2, 2), "metrics say so")
                assert h.engine.loads == [0, 2], "nothing partial and nothing that is out of date was loaded"
        finally:
            h.stop.set()
            h.join()
        assert h.error is None
