"""A weight server that dies is started again by its trainer: same port, same log, and not for ever."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from consumers.wiring import _weight_server
from echo.errors import WeightsError
from echo.restarts import Restarts
from echo.weights.spawn import KeptWeightServer
from echo.weights.store import WeightStore
from tests.eventually import eventually
from tests.fakes.wire import Wire
from tests.unit.test_weights_http import POLICY, TOKEN, UNIQUE_BYTES, assert_is, client, publish, pull, run_config


def servers() -> list[psutil.Process]:
    """The weight servers of this process, which may have other children: brokers of the session."""
    return [child for child in psutil.Process().children() if "echo.cli.weights" in child.cmdline()]


def killed(server: KeptWeightServer) -> None:
    """Kill the process, and wait until another one has its place."""
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: server.pid != pid, "another process")


def test_a_server_that_is_killed_in_mid_pull_costs_the_trainer_a_restart_of_it(tmp_path: Path) -> None:
    """What the trainer has announced stays valid: the pull ends well at the same URL, and so does the next one."""
    store = WeightStore(tmp_path / "weights")
    published = publish(store, 0)
    run = run_config(store, token=SecretStr(TOKEN))
    with ExitStack() as opened, capture_logs() as said:
        url, check = _weight_server(run, opened)
        port = httpx.URL(url).port or 0
        (process,) = servers()
        with Wire(port) as wire:
            wire.break_after(UNIQUE_BYTES // 2, "close", then=process.kill)
            puller = client(token=run.weights.token, attempts=50, longest_wait_s=0.5)
            pulled = pull(puller, wire.url, published)
        assert wire.cut.is_set()
        assert_is(pulled, POLICY)
        assert pulled.received_bytes == UNIQUE_BYTES
        assert_is(pull(client(token=run.weights.token), url, published), POLICY)
        check()
        (line,) = [entry for entry in said if "started again" in entry["event"]]
        assert (line["status"], line["port"], line["log_level"]) == (-9, port, "error")
        (other,) = servers()
        assert other.pid != process.pid
    assert not other.is_running()
    log = (tmp_path / "weights-server.log").read_text()
    assert log.count("serving weights") == 2, "the log of the first life is still there"
    assert TOKEN not in log


def test_a_server_that_dies_over_and_over_is_an_error(tmp_path: Path) -> None:
    log_path = tmp_path / "server.log"
    run = run_config(WeightStore(tmp_path / "store"))
    server = KeptWeightServer.start(run, log_path, restarts=Restarts(limit=1, first_s=0.01))
    try:
        killed(server)
        server.check()
        os.kill(server.pid, signal.SIGKILL)

        def error() -> str:
            try:
                server.check()
            except WeightsError as found:
                return str(found)
            return ""

        text = eventually(error, "the keeper gives up")
        assert f"died more than 1 times within 60 s, last with status -9: see {log_path}" in text
    finally:
        server.stop()


def test_a_start_that_fails_counts_as_a_death_and_is_tried_again(tmp_path: Path) -> None:
    log_path = tmp_path / "server.log"
    run = run_config(WeightStore(tmp_path / "store"))
    server = KeptWeightServer.start(run, log_path, restarts=Restarts(limit=20, within_s=600, first_s=0.1))
    try:
        with capture_logs() as said:
            # In the way of the next life's log.
            log_path.unlink()
            log_path.mkdir()
            pid = server.pid
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: any("could not be started again" in entry["event"] for entry in said), "a start fails")
            log_path.rmdir()
            eventually(lambda: server.pid != pid, "another process")
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.check()
    finally:
        server.stop()


def test_a_stopped_server_stays_stopped(tmp_path: Path) -> None:
    with capture_logs() as said:
        server = KeptWeightServer.start(run_config(WeightStore(tmp_path / "store")), tmp_path / "server.log")
        process = psutil.Process(server.pid)
        server.stop()
    assert not process.is_running()
    assert not servers()
    assert not [entry for entry in said if entry["log_level"] == "error"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
