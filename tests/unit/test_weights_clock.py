"""The difference of two clocks is right within what it says, whatever the network does; a server's nonsense changes nothing."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from echo.metrics import WeightsMetrics
from echo.weights.clock import Difference, ServerClock, difference
from echo.weights.server import WeightServer, create_app
from echo.weights.store import WeightStore
from tests.eventually import eventually
from tests.unit.test_produce_loop import RUN, Harness, announcement, make
from tests.unit.test_weights_http import client, publish, pull

__all__ = ["make"]

delays = st.floats(0, 100)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(delays, delays), min_size=1, max_size=80))
def test_the_difference_is_right_within_what_it_says(truth: float, ways: list[tuple[float, float]]) -> None:
    """Each answer takes so long there and so long back, at a server whose clock differs by `truth`."""
    clock, now = ServerClock(), 1.7e9
    for there, back in ways:
        clock.saw(now, f"{now + there + truth:.6f}", now + there + back)
        now += there + back
    found = clock.difference()
    assert found is not None
    assert abs(found.seconds - truth) <= found.within_s + 1e-5
    assert found.within_s == pytest.approx(min(sum(way) for way in ways[-32:]) / 2, abs=1e-5)


@pytest.mark.parametrize("header", [None, "", "soon", "nan", "inf", "-1", "1e300", "9" * 400, "1,700,000,000"])
def test_what_is_no_time_is_ignored(header: str | None) -> None:
    clock = ServerClock()
    clock.saw(1.7e9, header, 1.7e9 + 1)
    assert clock.difference() is None


def test_an_answer_during_which_our_own_clock_was_set_back_is_ignored() -> None:
    clock = ServerClock()
    clock.saw(1.7e9, "1700000000", 1.7e9 - 5)
    assert clock.difference() is None


def test_one_answer() -> None:
    assert difference(100.0, 150.0, 104.0) == (48.0, 2.0)


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 90.0])
def test_a_pull_tells_by_how_much_the_servers_clock_differs(tmp_path: Path, ahead_s: float) -> None:
    store = WeightStore(tmp_path)
    published = publish(store, 0)
    metrics = WeightsMetrics(CollectorRegistry())
    server = WeightServer(
        create_app(store, token=None, metrics=metrics, clock=lambda: time.time() + ahead_s), host="127.0.0.1", port=0
    ).start()
    try:
        puller = client()
        assert puller.clock_difference() is None
        pull(puller, server.url, published)
    finally:
        server.stop()
    found = puller.clock_difference()
    assert found is not None
    assert abs(found.seconds - ahead_s) <= found.within_s + 1e-3


@pytest.mark.parametrize("ahead_s", [-500.0, 500.0])
def test_the_time_from_announcement_to_serving_is_right_although_clocks_differ(
    make: Callable[..., Harness], ahead_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    h = make()
    h.weights.clocks = Difference(ahead_s, 0.001)
    h.start()
    h.wait_for_heartbeat(lambda one: True, "the first")
    h.tell(msgspec.structs.replace(announcement(0), created=time.time() + ahead_s))
    h.wait_for_heartbeat(lambda one: one.serving == 0, "version 0 serves")
    get, labels = h.metrics.registry.get_sample_value, {"run": RUN, "producer": "p0"}
    eventually(lambda: get("echo_produce_announce_to_serving_seconds_count", labels) == 1, "the delay is known")
    assert 0 <= (get("echo_produce_announce_to_serving_seconds_sum", labels) or 0) < 30
    assert get("echo_produce_clock_difference_seconds", labels) == ahead_s
    assert "the weight server's clock differs" in capsys.readouterr().out
