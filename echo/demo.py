"""The whole of Echo on one machine: broker, topics, weight server, two producers and a trainer, each a process of its own.

Refuses to be another code path: it writes a run file and starts the same commands that anybody would start with it. What it
reports is counted from the log (`report`). It leaves no process behind, however it ends.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import yaml

from echo import journal, report, topics
from echo.addresses import http_url, local_host
from echo.broker import BrokerPlan, plan_broker, start_broker
from echo.broker.process import free_ports
from echo.config import RunConfig
from echo.demo_view import View
from echo.errors import ConfigError, EchoError
from echo.kafka import KafkaLogAdmin, KafkaLogReader
from echo.model_path import check_model_path
from echo.process import Child, StopSignal, stop_children
from echo.run_file import resolve, save
from echo.waiting import Watch
from echo.weights.spawn import KeptWeightServer

log = structlog.get_logger("demo")

# One thread for each process: more of them on two cores only wait for each other.
_CHILD_ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
_TICK_S = 0.5
_STOP_S = 20.0
_READ_BACK_S = 60.0


class DemoError(EchoError):
    """A process of the demo failed; the message holds the end of its log."""


class Outcome(NamedTuple):
    """How the demo ended. `summary` and `bias` (as in bias.json) are None where a stop was asked for before the run's end."""

    out: Path
    summary: dict[str, Any] | None = None
    bias: dict[str, Any] | None = None


def prepare(out: Path, *, seed: int, overrides: Sequence[str], apache_home: Path | None) -> tuple[RunConfig, BrokerPlan]:
    """The demo's run, written to `out/run.yaml`, and the broker that it will have. Starts nothing.

    Raises ConfigError where `out` holds anything already or can't be written, for a wrong override, or where model.path can
    only be a folder and is none; BrokerError where there is no broker to start. `out` may then be chosen again.
    """
    path = out / "run.yaml"
    contents = yaml.safe_load(resources.files("echo.cli").joinpath("demo_run.yaml").read_text())
    train_port, weights_port = free_ports(2)
    contents |= {"run_id": f"demo-{seed}-{secrets.token_hex(3)}", "seed": seed}
    contents["model"] = {"path": str(out / "model")}
    contents["metrics"] = {"train_port": train_port, "produce_port": 0}
    contents["weights"] = {"port": weights_port, "serve": False}
    contents["producer"]["seed"] = seed
    contents["task"]["seed"] = seed
    run = resolve(contents, overrides, path)
    if run.weights.serve:
        raise ConfigError("weights.serve: the demo itself starts the weight server, beside the trainer: leave it out")
    if _has_own_model(run, out):
        check_model_path(run.model.path)
        if Path(run.model.path).is_dir():
            # Named from here: whoever reads the run file may be elsewhere.
            run = run.model_copy(update={"model": run.model.model_copy(update={"path": os.path.abspath(run.model.path)})})
    plan = plan_broker(run.broker, apache_home=apache_home)
    _claim(path)
    save(run, path)
    return run, plan


def _claim(run_file: Path) -> None:
    """Make the run file, and the folder around it. Another demo that chose the folder in the same moment is refused by that.

    Raises ConfigError where the folder holds anything: a model in it may be the user's, and would be written over.
    """
    out = run_file.parent
    try:
        out.mkdir(parents=True, exist_ok=True)
        if run_file.exists():
            raise ConfigError(f"{out} holds a run already: choose another --out")
        if held := sorted(os.listdir(out)):
            raise ConfigError(f"{out} is not empty, it holds {held[0]}: choose another --out")
        run_file.touch(exist_ok=False)
    except OSError as error:
        raise ConfigError(f"{out} can't be written: {error.strerror}: choose another --out") from None


def _has_own_model(run: RunConfig, out: Path) -> bool:
    """Whether model.path was overridden: that model is the user's, and only read."""
    return Path(run.model.path) != out / "model"


def run_demo(
    *,
    out: Path,
    seed: int,
    overrides: Sequence[str],
    apache_home: Path | None,
    nodes: int,
    producers: int,
    stop: StopSignal,
    say: Callable[[str], None],
    draw: Callable[[View], None],
) -> Outcome:
    """Run the demo to its end, or until a stop is asked for.

    say: a line for people. draw: called about twice a second with fresh numbers. Raises EchoError.
    """
    began = time.monotonic()
    run, plan = prepare(out, seed=seed, overrides=overrides, apache_home=apache_home)
    say(plan.describe())
    logs = out / "logs"
    with _writing(out):
        logs.mkdir()
    with ExitStack() as opened:
        broker = opened.enter_context(start_broker(plan, data_dir=out / "broker", nodes=nodes))
        settings = {**run.broker.settings, "bootstrap.servers": broker.bootstrap_servers}
        run = run.model_copy(update={"broker": run.broker.model_copy(update={"settings": settings})})
        save(run, out / "run.yaml")
        children: list[Child] = []
        opened.callback(lambda: stop_children(children, timeout_s=_STOP_S))
        env = {**os.environ, **_CHILD_ENV}
        start = partial(_start, children=children, logs=logs, env=env)
        run_file = str(out / "run.yaml")
        maker = None
        if _has_own_model(run, out):
            say(f"the policy is {run.model.path}")
        else:
            say("making a tiny policy: random weights, then a short supervised warm-up (see logs/model.log)")
            env["HF_HUB_OFFLINE"] = "1"
            make = ["-m", "producers.tiny_policy", "--task-file", run_file, "--out", run.model.path, "--seed", str(seed)]
            maker = start("model", *make)
        spec = make_topics(run)
        server = KeptWeightServer.start(run, logs / "weights.log")
        opened.callback(server.stop)
        if maker is not None and not _wait(maker, stop):
            return Outcome(out)
        say("starting the trainer and the producers")
        trainer = start("train", "-m", "consumers.cli", run_file)
        ports = free_ports(producers)
        workers = [
            start(f"produce-{n}", "-m", "producers.cli", run_file, f"metrics.produce_port={port}", "--id", f"p{n}")
            for n, port in enumerate(ports)
        ]
        with _view(run, ports) as view:
            while trainer.poll() is None and not stop.is_set():
                view.refresh()
                draw(view)
                # Before its clients, which end of its end.
                broker.check()
                _check(workers)
                server.check()
                stop.event.wait(_TICK_S)
            if stop.is_set():
                return Outcome(out)
            view.refresh()
            draw(view)
        _check([trainer])
        for worker in workers:
            if not _wait(worker, stop):
                return Outcome(out)
        say("the run is over; counting every record of it in the log")
        summary, bias = _report(run, spec, out, seconds=lambda: time.monotonic() - began)
    return Outcome(out, summary, bias)


def make_topics(run: RunConfig) -> topics.Spec:
    """Create those of the run's topics that are missing. One that is there may hold another run's records, which a shorter
    retention would delete: it is taken as it is.

    Raises TopicError where such a one does not fit, BrokerError.
    """
    spec = topics.of_run(run)
    admin = KafkaLogAdmin(run.broker.settings, client_id="echo-demo")
    difference = topics.plan(spec, topics.read_actual(admin, spec.names, run.broker.timeout_s))
    topics.apply(topics.Plan(creates=difference.creates), admin, run.broker.timeout_s)
    topics.require(spec, topics.read_actual(admin, spec.names, run.broker.timeout_s), run.limits)
    return spec


def _report(
    run: RunConfig, spec: topics.Spec, out: Path, *, seconds: Callable[[], float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Count the run from the log, write what was found into `out`: the summary and the drop bias."""
    names = spec.names
    admin = KafkaLogAdmin(run.broker.settings, client_id="echo-demo")
    lines = list(journal.read(run.checkpoint.dir / journal.FILE_NAME))

    @contextmanager
    def records(topic: str) -> Iterator[Iterator[Any]]:
        reader = KafkaLogReader(
            run.broker.settings,
            client_id="echo-demo",
            max_record_bytes=run.limits.record_bytes,
            committed=topic == names.control,
        )
        try:
            partitions = admin.partitions(topic, run.broker.timeout_s)
            yield report.read_topic(reader, topic, partitions, deadline_s=_READ_BACK_S)
        finally:
            reader.close()

    with records(names.trajectories) as trajectories, records(names.dead_letter) as dead_letters:
        fates = report.fates(lines)
        bias = report.DropBias(run.run_id, fates)
        counts = report.count(run.run_id, bias.watch(trajectories), dead_letters, fates)
    with records(names.control) as messages:
        versions = report.count_announcements(run.run_id, messages)
    with records(names.heartbeats) as heartbeats:
        pulls = sum(beat.pulls for beat in report.last_heartbeats(run.run_id, heartbeats).values())
    summary = report.summary(
        lines=lines,
        counts=counts,
        staleness_bound=run.staleness_bound,
        policy_versions=versions,
        pulls=pulls,
        seconds=seconds(),
    )
    with _writing(out):
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        (out / "bias.json").write_text(json.dumps(bias.result(), indent=2) + "\n")
        report.plot(
            lines, staleness_bound=run.staleness_bound, title=f"{run.run_id}: reward and staleness", path=out / "reward.png"
        )
    return summary, bias.result()


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Files are written inside. Raises DemoError if one can't be."""
    try:
        yield
    except OSError as error:
        raise DemoError(
            f"{error.filename or out} can't be written: {error.strerror}: free space there, or choose another --out"
        ) from None


def _start(name: str, *arguments: str, children: list[Child], logs: Path, env: Mapping[str, str]) -> Child:
    child = Child(name, [sys.executable, *arguments], log_path=logs / f"{name}.log", env=env)
    children.append(child)
    return child


def _wait(child: Child, stop: StopSignal) -> bool:
    """Wait for a child to end well; False where a stop was asked for first."""
    watch = Watch(f"{child.name} to end", lambda: f"the end of {child.log_path}: {child.log_tail(1)}")
    while child.wait(_TICK_S) is None:
        if stop.is_set():
            return False
        watch.check()
    _check([child])
    return not stop.is_set()


def _check(children: Sequence[Child]) -> None:
    for child in children:
        status = child.poll()
        if status:
            raise DemoError(f"{child.name} ended with status {status}; the end of {child.log_path}:\n{child.log_tail()}")


@contextmanager
def _view(run: RunConfig, ports: Sequence[int]) -> Iterator[View]:
    host = local_host(run.metrics.host)
    view = View(
        journal_path=run.checkpoint.dir / journal.FILE_NAME,
        steps=run.learner.steps,
        staleness_bound=run.staleness_bound,
        urls=[f"{http_url(host, port)}/metrics" for port in (run.metrics.train_port, *ports)],
    )
    try:
        yield view
    finally:
        view.close()
