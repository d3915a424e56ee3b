"""deploy/ and grafana/provisioning agree with each other, with the run file and with the project, as far as reading tells."""

import json
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from echo.config import RunConfig
from echo.run_file import load

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROMETHEUS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
RUN_FILE = "/etc/echo/run.yaml"
ECHO = {name: service for name, service in SERVICES.items() if service["image"].startswith("echo-rl:")}


@pytest.fixture(scope="module")
def run() -> RunConfig:
    return load(DEPLOY / "run.yaml")


def _mounts(service: dict[str, Any]) -> dict[str, str]:
    """Place in the container -> what is mounted there."""
    parts = (volume.split(":") for volume in service.get("volumes", ()))
    return {place: source for source, place, *_ in parts}


def _ports(run: RunConfig) -> dict[str, int]:
    """Port that each Echo service serves metrics on."""
    return {"echo-train": run.metrics.train_port, "echo-produce": run.metrics.produce_port, "echo-weights": run.weights.port}


@pytest.mark.parametrize("image", sorted({service["image"] for service in SERVICES.values()}))
def test_an_image_names_its_version(image: str) -> None:
    name, _, tag = image.rpartition(":")
    assert name
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag)


def test_the_image_is_of_this_version_and_built_once() -> None:
    assert {service["image"] for service in ECHO.values()} == {f"echo-rl:{PROJECT['version']}"}
    assert [name for name, service in SERVICES.items() if "build" in service] == ["echo-topics"]


def test_the_dockerfile_copies_what_exists_and_is_sent() -> None:
    kept = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [source for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M) for source in line.split()[:-1]]
    assert sorted(kept) == sorted(copied)
    assert all((ROOT / source).exists() for source in copied)
    packages = {"echo", "producers", "consumers"}
    assert packages <= set(copied)


def test_the_dockerfile_fits_the_project() -> None:
    """Extras that exist, the versions that the tests ran with, a Python that it takes, and no root."""
    (extras,) = re.findall(r'pip install "\.\[([\w,]+)\]"', DOCKERFILE)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    (constraints,) = re.findall(r"^ENV PIP_CONSTRAINT=/src/(\S+)$", DOCKERFILE, re.M)
    assert "torch==" in (ROOT / constraints).read_text()
    assert DOCKERFILE.index(f"COPY {constraints}") < DOCKERFILE.index("pip install ${")
    (python,) = re.findall(r"^FROM python:(\d+)\.(\d+)\.\d+-slim-\w+$", DOCKERFILE, re.M)
    assert tuple(map(int, python)) >= tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    assert re.findall(r"^USER (\w+)$", DOCKERFILE, re.M) == ["echo"]


def test_every_service_waits_for_services_that_can_say_so() -> None:
    for name, service in SERVICES.items():
        for other, wait in service.get("depends_on", {}).items():
            assert other in SERVICES, f"{name} waits for {other}"
            match wait["condition"]:
                case "service_healthy":
                    assert SERVICES[other]["healthcheck"]["test"]
                case "service_completed_successfully":
                    assert SERVICES[other]["restart"] in {"no", "on-failure"}, f"{other} never completes"
                case unknown:
                    pytest.fail(f"{name} waits for {other} to be {unknown}")


def test_a_service_that_stays_restarts_and_is_checked() -> None:
    for name, service in SERVICES.items():
        assert service["restart"] in {"on-failure", "unless-stopped"}, name
        if name != "echo-topics":
            assert "healthcheck" in service, name


@pytest.mark.parametrize("name", sorted(ECHO))
def test_an_echo_service_runs_a_command_of_the_project_on_the_run_file(name: str) -> None:
    service = ECHO[name]
    command, *arguments = service["command"]
    assert command in PROJECT["scripts"]
    assert RUN_FILE in arguments
    assert _mounts(service)[RUN_FILE] == "./run.yaml"
    assert service["secrets"] == ["weights_token"]
    assert service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("name", sorted(ECHO))
def test_a_command_line_is_one_that_the_command_takes(name: str) -> None:
    """The subcommand exists, and so do its options: asked of the command itself, with --help before anything is done."""
    command, *arguments = ECHO[name]["command"]
    module, _, function = PROJECT["scripts"][command].partition(":")
    asked = [argument for argument in arguments if argument != RUN_FILE]
    answer = subprocess.run(
        [sys.executable, "-c", f"from {module} import {function}; {function}()", *asked, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )
    assert answer.returncode == 0, answer.stderr
    for option in asked:
        assert not option.startswith("-") or option in answer.stdout


def test_the_run_file_speaks_to_the_services(run: RunConfig) -> None:
    kafka = SERVICES["kafka"]["environment"]
    assert run.broker.settings["bootstrap.servers"] in kafka["KAFKA_ADVERTISED_LISTENERS"].replace("INTERNAL://", "").split(",")
    weights = urlsplit(run.weights_url)
    assert weights.hostname in ECHO
    assert weights.port == run.weights.port
    assert run.weights.host == run.metrics.host == "0.0.0.0"
    assert run.weights.token is None, "the token belongs in the environment"
    assert not run.weights.serve, "echo-weights is a service of its own"


def test_what_must_outlive_a_container_lies_in_a_volume(run: RunConfig) -> None:
    train, weights = _mounts(SERVICES["echo-train"]), _mounts(SERVICES["echo-weights"])
    assert train[str(run.checkpoint.dir)] == "checkpoints"
    assert train[str(run.weights.dir)] == weights[str(run.weights.dir)] == "weights"
    cache = SERVICES["echo-train"]["environment"]["HF_HOME"]
    assert _mounts(SERVICES["echo-produce"])[cache] == train[cache] == "models"
    assert _mounts(SERVICES["kafka"])[SERVICES["kafka"]["environment"]["KAFKA_LOG_DIRS"]] == "kafka"
    # A volume belongs to the user of the image only where the image has the folder.
    for place, source in train.items():
        assert source.startswith(".") or place in DOCKERFILE


def test_volumes_and_secrets_are_declared_and_mounted_files_exist() -> None:
    mounted = {source for service in SERVICES.values() for source in _mounts(service).values()}
    files = {source for source in mounted if source.startswith(".")}
    assert mounted - files == COMPOSE["volumes"].keys()
    assert all((DEPLOY / source).exists() for source in files)
    secrets = {secret for service in SERVICES.values() for secret in service.get("secrets", ())}
    assert secrets == COMPOSE["secrets"].keys()
    assert all(secret.keys() == {"environment"} for secret in COMPOSE["secrets"].values())


def test_published_ports_are_on_loopback() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(published) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published)


def test_kafka_names_every_listener_it_needs() -> None:
    kafka = SERVICES["kafka"]["environment"]
    listeners = dict(item.split("://") for item in kafka["KAFKA_LISTENERS"].split(","))
    advertised = dict(item.split("://") for item in kafka["KAFKA_ADVERTISED_LISTENERS"].split(","))
    controller = kafka["KAFKA_CONTROLLER_LISTENER_NAMES"]
    assert advertised.keys() == listeners.keys() - {controller}
    assert dict(item.split(":") for item in kafka["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")).keys() == listeners.keys()
    assert kafka["KAFKA_INTER_BROKER_LISTENER_NAME"] in advertised
    for name, address in advertised.items():
        assert address.rpartition(":")[2] == listeners[name].rpartition(":")[2]
    assert kafka["KAFKA_CONTROLLER_QUORUM_VOTERS"] == f"{kafka['KAFKA_NODE_ID']}@localhost{listeners[controller]}"
    host_port = advertised["HOST"].rpartition(":")[2]
    assert SERVICES["kafka"]["ports"] == [f"127.0.0.1:{host_port}:{host_port}"]
    topics = yaml.safe_load((ROOT / "topics.yaml").read_text())["topics"]
    largest = max(topic["config"].get("max.message.bytes", 0) for topic in topics.values())
    assert int(kafka["KAFKA_MESSAGE_MAX_BYTES"]) >= largest


def test_prometheus_scrapes_every_echo_service_on_its_port(run: RunConfig) -> None:
    targets: dict[str, int] = {}
    for job in PROMETHEUS["scrape_configs"]:
        hosts = [target for static in job.get("static_configs", ()) for target in static["targets"]]
        hosts += [f"{name}:{dns['port']}" for dns in job.get("dns_sd_configs", ()) for name in dns["names"]]
        for host, port in (target.split(":") for target in hosts):
            assert job["job_name"] == host
            targets[host] = int(port)
    assert targets == _ports(run)


def test_prometheus_shows_the_weight_server_its_token() -> None:
    (job,) = (job for job in PROMETHEUS["scrape_configs"] if job["job_name"] == "echo-weights")
    (secret,) = SERVICES["prometheus"]["secrets"]
    assert job["authorization"] == {"credentials_file": f"/run/secrets/{secret}"}
    (config,) = (arg.partition("=")[2] for arg in SERVICES["prometheus"]["command"] if arg.startswith("--config.file="))
    assert _mounts(SERVICES["prometheus"])[config] == "./prometheus.yml"


def test_the_board_finds_the_jobs() -> None:
    board = json.loads((ROOT / "grafana/echo.json").read_text())
    (job,) = (variable for variable in board["templating"]["list"] if variable["name"] == "job")
    for scraped in PROMETHEUS["scrape_configs"]:
        assert re.fullmatch(job["allValue"], scraped["job_name"])
        assert re.search(job["regex"].strip("/"), scraped["job_name"])


def test_health_is_asked_on_the_port_that_answers(run: RunConfig) -> None:
    for name, port in _ports(run).items():
        *_, script, target = SERVICES[name]["healthcheck"]["test"]
        assert target.partition("/")[0] == str(port)
        assert fnmatch(script, "/opt/echo/*.py")
        assert (DEPLOY / Path(script).name).exists()


def test_grafana_is_provisioned_with_the_board_and_prometheus() -> None:
    mounts = _mounts(SERVICES["grafana"])
    provisioning = DEPLOY / mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    url = urlsplit(source["url"])
    assert url.hostname in SERVICES
    assert any(port.endswith(f":{url.port}") for port in SERVICES["prometheus"]["ports"])
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/echo.yaml").read_text())["providers"]
    boards = {place: mounted for place, mounted in mounts.items() if place.endswith(".json")}
    assert boards == {f"{provider['options']['path']}/echo.json": "../grafana/echo.json"}
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in boards


def _enter(home: Path, token_file: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEPLOY / "entrypoint.py"), *command],
        env={
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "ECHO_RUN_FILE": str(DEPLOY / "run.yaml"),
            "ECHO_WEIGHTS_TOKEN_FILE": str(token_file),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_entrypoint_gives_the_token_in_a_private_file_alone(tmp_path: Path) -> None:
    """The command finds the token in the run file that it is handed, and neither its arguments nor its environment have it."""
    token = '01234: "not" a number'
    (tmp_path / "token").write_text(token + "\n")
    report = "import json, os, sys; json.dump([sys.argv, dict(os.environ)], sys.stdout)"
    run_file = str(DEPLOY / "run.yaml")
    entered = _enter(tmp_path, tmp_path / "token", sys.executable, "-c", report, run_file, "--dry-run")
    assert entered.returncode == 0, entered.stderr
    assert token not in entered.stdout
    (_, private, *rest), _ = json.loads(entered.stdout)
    assert rest == ["--dry-run"]
    assert Path(private).stat().st_mode & 0o777 == 0o600
    run = load(Path(private))
    assert run.weights.token is not None
    assert run.weights.token.get_secret_value() == token
    given = load(DEPLOY / "run.yaml")
    assert run.model_copy(update={"weights": given.weights}) == given


def test_the_entrypoint_refuses_an_empty_token(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    entered = _enter(tmp_path, tmp_path / "token", "true", str(DEPLOY / "run.yaml"))
    assert entered.returncode == 1
    assert "empty" in entered.stderr


def test_the_entrypoint_leaves_other_commands_alone(tmp_path: Path) -> None:
    entered = _enter(tmp_path, tmp_path / "no-token", "printf", "%s", str(DEPLOY / "run.yaml"))
    assert entered.stdout == str(DEPLOY / "run.yaml")
    assert list(tmp_path.iterdir()) == []


def test_the_health_check_tells_an_answer_from_none(tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry

    from echo.metrics_server import MetricsServer

    def ask(port: int) -> int:
        check = [sys.executable, str(DEPLOY / "healthcheck.py"), f"{port}/metrics"]
        return subprocess.run(check, capture_output=True, timeout=60, check=False).returncode

    server = MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, key="test")
    try:
        assert ask(server.port) == 0
    finally:
        server.close()
    assert ask(server.port) == 1
