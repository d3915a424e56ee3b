"""echo-weights as a process: serving, looking, tidying, pulling; and the child that echo-train starts."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors
from pydantic import SecretStr

from echo.cli.weights import newest
from echo.config import ModelConfig, RunConfig, WeightsConfig
from echo.errors import ConfigError, WeightsError
from echo.run_file import save
from echo.weights.client import WeightClient
from echo.weights.manifest import HostTensor
from echo.weights.spawn import WeightServerProcess
from echo.weights.store import WeightStore
from echo.weights.urls import TOKEN_VARIABLE

TOKEN = "s3cret-token"
MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)
POLICY = [
    HostTensor("matrix", "F32", (2, 3), MATRIX.data),
    HostTensor("half", "BF16", (2,), memoryview(b"\x80\x3f\x00\x40")),
    HostTensor("empty", "F32", (0, 3), memoryview(b"")),
]


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    store = WeightStore(tmp_path / "store")
    store.publish("run", 4, 40, POLICY, chunk_bytes=16, keep=2, created=1.5)
    return store


def run_config(store: WeightStore, **weights: Any) -> RunConfig:
    return RunConfig(
        run_id="run", model=ModelConfig(path="tiny"), weights=WeightsConfig(**{"dir": store.root, "port": 0, **weights})
    )


def echo_weights(*arguments: object, token: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    if token is not None:
        environment[TOKEN_VARIABLE] = token
    return subprocess.run(
        [sys.executable, "-m", "echo.cli.weights", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )


def ends(pid: int, timeout_s: float) -> bool:
    """Whether a process that may not be our child ends in time."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], timeout_s)[0])
    finally:
        os.close(watched)


def test_the_server_process_serves_until_it_is_stopped(tmp_path: Path, store: WeightStore) -> None:
    """It answers when `start` returns, asks for the token that it got, and ends with status 0."""
    log = tmp_path / "logs" / "weights.log"
    server = WeightServerProcess.start(run_config(store, token=SecretStr(TOKEN)), log)
    try:
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert httpx.get(f"{server.url}/v1/runs/run/latest").status_code == 401
        answer = httpx.get(f"{server.url}/v1/runs/run/latest", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.json()["version"] == 4
        assert server.poll() is None
        # The token travels in the environment alone, which only the owner may read.
        assert TOKEN not in Path(f"/proc/{server.pid}/cmdline").read_text()
    finally:
        assert server.stop() == 0
    assert server.poll() == 0
    text = log.read_text()
    assert "serving weights" in text
    assert "stopped" in text
    assert TOKEN not in text


def test_a_server_without_a_token_does_not_inherit_one(
    tmp_path: Path, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that happens to be set does not lock the producers out."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with WeightServerProcess.start(run_config(store), tmp_path / "log") as server:
        assert httpx.get(f"{server.url}/v1/runs/run/latest").status_code == 200


def test_producers_are_told_the_configured_url(tmp_path: Path, store: WeightStore) -> None:
    """`weights.url` wins; listening on every address needs it, and a token."""
    run = run_config(store, host="0.0.0.0", url="http://trainer.example:1", token=SecretStr(TOKEN))
    with WeightServerProcess.start(run, tmp_path / "log") as server:
        assert server.url == "http://trainer.example:1"
        assert httpx.get(f"http://127.0.0.1:{server.port}/health").status_code == 200
    with pytest.raises(ConfigError, match=r"weights\.host is '0\.0\.0\.0'.*set weights\.url"):
        WeightServerProcess.start(run_config(store, host="0.0.0.0", token=SecretStr(TOKEN)), tmp_path / "log")
    with pytest.raises(WeightsError, match=r"serving on '0\.0\.0\.0' without a token"):
        WeightServerProcess.start(run_config(store, host="0.0.0.0", url="http://trainer.example:1"), tmp_path / "log")


def test_a_server_that_does_not_come_up_says_why(tmp_path: Path, store: WeightStore) -> None:
    """The error has the exit status and the end of the child's log."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WeightsError, match=rf"127\.0\.0\.1:{port} ended with status 1.*\n.*Address already in use"):
            WeightServerProcess.start(run_config(store, port=port), tmp_path / "log")


@pytest.mark.parametrize("log", ["file/server.log", "."], ids=["no folder", "no file"])
def test_a_log_that_cannot_be_written_names_the_setting(tmp_path: Path, log: str) -> None:
    """The log lies beside the store, so that a store where nothing may be made fails here first."""
    (tmp_path / "file").touch()
    run = run_config(WeightStore(tmp_path / "file" / "weights"))
    with pytest.raises(WeightsError, match=r"written: (File exists|Is a directory).*weights\.dir, which is .*/weights"):
        WeightServerProcess.start(run, tmp_path / log)


def test_the_server_ends_with_its_parent(tmp_path: Path, store: WeightStore) -> None:
    """kill -9 of the trainer leaves no server behind."""
    run_file = tmp_path / "run.yaml"
    save(run_config(store), run_file)
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from pathlib import Path\n"
            "from echo.run_file import load\n"
            "from echo.weights.spawn import WeightServerProcess\n"
            "server = WeightServerProcess.start(load(Path(sys.argv[1])), Path(sys.argv[2]))\n"
            "print(server.pid, file=sys.stderr, flush=True)\n"
            "sys.stdin.read()\n",
            str(run_file),
            str(tmp_path / "log"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stderr is not None
        pid = int(parent.stderr.readline())
        assert not ends(pid, 0)
        parent.send_signal(signal.SIGKILL)
    assert ends(pid, 20)


def test_serve_refuses_the_world_without_a_token(store: WeightStore) -> None:
    """Beyond loopback there is a token, or no server."""
    ran = echo_weights("serve", store.root, "--host", "0.0.0.0", "--port", "0")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.splitlines()[-1].startswith("error: serving on '0.0.0.0' without a token: set weights.token or")


def test_ls_lists_versions(tmp_path: Path, store: WeightStore) -> None:
    """For programs as JSON, from the folder or a run file; for people as a table."""
    store.publish("other", 0, 0, POLICY[:1], chunk_bytes=16, keep=2, created=2.5)
    store.hold("other", 0)
    _, digest = store.read_manifest("run", 4)
    listed = json.loads(echo_weights("ls", store.root, "--json").stdout)
    assert listed["store"] == str(store.root)
    assert listed["stored_bytes"] == 28
    assert [(row["run"], row["version"], row["being_read"]) for row in listed["versions"]] == [
        ("other", 0, True),
        ("run", 4, False),
    ]
    expected = {"run": "run", "version": 4, "step": 40, "created": 1.5, "tensors": 3, "bytes": 28}
    assert listed["versions"][1] == {**expected, "digest": digest, "being_read": False}
    run_file = tmp_path / "run.yaml"
    save(run_config(store), run_file)
    assert json.loads(echo_weights("ls", run_file, "--json").stdout)["versions"] == listed["versions"][1:]
    table = echo_weights("ls", store.root)
    assert table.returncode == 0
    assert digest[:8] in table.stdout


def test_ls_shows_the_newest_ten_and_counts_the_others(tmp_path: Path) -> None:
    """--all and --json list every version."""
    store = WeightStore(tmp_path / "store")
    for version in range(100, 113):
        store.publish("run", version, version, POLICY, chunk_bytes=16, keep=20, created=1.5)
    short, full = echo_weights("ls", store.root).stdout, echo_weights("ls", store.root, "--all").stdout
    assert [version for version in range(100, 113) if f" {version} " in short] == list(range(103, 113))
    assert short.endswith("3 older versions more: --all lists them\n")
    assert [version for version in range(100, 113) if f" {version} " in full] == list(range(100, 113))
    assert "older" not in full
    assert len(json.loads(echo_weights("ls", store.root, "--json").stdout)["versions"]) == 13


def test_a_pull_without_a_server_asks_whether_there_is_one() -> None:
    """Where nothing listens, and only there."""
    client = WeightClient(attempts=2, first_wait_s=0.01)
    with pytest.raises(WeightsError, match=r"attempt 2 of 2\): is echo-train, or `echo-weights serve`, running\?$"):
        newest(client, "http://127.0.0.1:1", "run")
    with pytest.raises(WeightsError) as caught:
        newest(client, "http://no-such-host.invalid:1", "run")
    assert "running?" not in str(caught.value)


def test_verify_tells_damage_by_its_status(store: WeightStore) -> None:
    """0 and silence, or 2 with what is wrong where."""
    assert echo_weights("verify", store.root).returncode == 0
    path = next((store.root / "chunks").glob("*/*"))
    path.write_bytes(b"?")
    ran = echo_weights("verify", store.root, "--json")
    (problem,) = json.loads(ran.stdout)["problems"]
    assert (ran.returncode, problem["path"]) == (2, str(path))
    assert echo_weights("verify", store.root).returncode == 2


def test_gc_retires_and_collects(store: WeightStore) -> None:
    """With --keep older versions go first; what they alone named goes with them."""
    store.publish("run", 5, 50, POLICY[1:], chunk_bytes=16, keep=2, created=1.5)
    ran = echo_weights("gc", store.root, "--keep", 1)
    assert ran.stdout.splitlines() == ["retired version 4 of run run", f"{store.root}: 2 chunks, 24 bytes removed"]
    assert (store.versions("run"), store.verify(), store.stored_bytes()) == ([5], [], 4)


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
def test_a_store_that_is_not_there_is_an_error(tmp_path: Path, command: str) -> None:
    """A mistyped folder is not an empty, healthy store."""
    ran = echo_weights(command, tmp_path / "nowhere")
    assert ran.returncode == 1
    assert (
        ran.stderr
        == f"error: {tmp_path}/nowhere: no such folder; echo-train makes the store when it publishes its first version\n"
    )


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
def test_another_folder_is_no_store(tmp_path: Path, command: str) -> None:
    """verify would find no damage there, and gc would leave a lock."""
    (tmp_path / "model").mkdir()
    done = echo_weights(command, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}: no store of weights, it has no folder runs: name the run file")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("out", "why"), [("nowhere/x", "No such file or directory"), (".", "Is a directory")])
def test_a_pull_that_can_not_be_written_is_not_begun(tmp_path: Path, out: str, why: str) -> None:
    """Port 9 has no server: it isn't asked."""
    done = echo_weights("pull", "http://127.0.0.1:9", "--run", "run", "--out", tmp_path / out)
    assert done.returncode == 1
    assert done.stderr == f"error: --out {tmp_path / out}: {why}: name a file in a folder that can be written\n"


@pytest.mark.parametrize("option", [("--port", "99999"), ("--port", "-1"), ("--max-egress", "-5")])
def test_serve_refuses_numbers_that_can_not_be(store: WeightStore, option: tuple[str, str]) -> None:
    done = echo_weights("serve", store.root, *option)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: Invalid value for '{option[0]}'")


def test_pull_writes_safetensors(tmp_path: Path, store: WeightStore) -> None:
    """The newest policy lands in a file that safetensors reads back exactly, also bfloat16 and empty tensors."""
    out = tmp_path / "policy.safetensors"
    with WeightServerProcess.start(run_config(store, token=SecretStr(TOKEN)), tmp_path / "log") as server:
        refused = echo_weights("pull", server.url, "--run", "run", "--out", out)
        assert refused.returncode == 1
        assert "asks for a token" in refused.stderr
        assert not out.exists()
        ran = echo_weights("pull", server.url, "--run", "run", "--out", out, token=TOKEN)
    assert ran.returncode == 0, ran.stderr
    assert TOKEN not in ran.stdout + ran.stderr + refused.stderr
    assert "version 4 of run run, 28 bytes" in ran.stdout
    read = dict(safetensors.deserialize(out.read_bytes()))
    assert {name: (item["dtype"], tuple(item["shape"]), bytes(item["data"])) for name, item in read.items()} == {
        one.name: (one.dtype, one.shape, one.data.tobytes()) for one in POLICY
    }
    with safetensors.safe_open(out, "np") as opened:
        assert opened.metadata()["echo_version"] == "4"
    assert list(tmp_path.glob("*.tmp")) == []
