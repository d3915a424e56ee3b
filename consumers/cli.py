"""`echo-train`: the trainer of a run.

    echo-train run.yaml
    echo-train run.yaml learner.lr=1e-5 checkpoint.resume=never
    echo-train run.yaml --resume checkpoints/step-0000010
    echo-train run.yaml --accept-lost
    echo-train run.yaml --replay 12
    echo-train run.yaml --dry-run
    accelerate launch --multi_gpu --num_processes 4 -m consumers.cli run.yaml

`--replay` trains nothing: it fetches a past step's records from the log, rebuilds its batch, and says whether it is the one
that was trained, byte for byte. It may run beside the trainer.

Refuses anything heavy before the command runs: `--help` answers at once. Exit status: 0 when the run ended or a stop was asked
for (SIGINT or SIGTERM; a second one ends at once with 130 or 143), 2 where the run file or an argument is wrong, 1 for every
other failure, with one line that says what; a replayed batch that differs is one.
"""

from echo.stopping import catch_early

if __name__ == "__main__":
    # What is imported below takes a good part of a second.
    catch_early()

import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def train(
    run_file: Annotated[Path, typer.Argument(metavar="RUN_FILE", help="The run file, the same as the producers'.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values over the run file's, by dotted key.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|never|PATH", help="Over checkpoint.resume: newest checkpoint, none, or this folder."),
    ] = None,
    accept_lost: Annotated[
        bool,
        typer.Option(
            "--accept-lost",
            help="Resume although records were deleted before they were read: they are counted as lost.",
        ),
    ] = False,
    replay: Annotated[
        int | None, typer.Option(metavar="STEP", min=1, help="Rebuild this step's batch from the log, compare, and exit.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --replay: the report as JSON.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved run file and exit.")] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines as JSON.")] = False,
) -> None:
    """Consume trajectories, update the policy, publish and announce each new version."""
    from echo.errors import ConfigError, EchoError, StoppedError
    from echo.run_file import dump, load
    from echo.stopping import let_go

    try:
        run = load(run_file, overrides or ())
        if resume is not None:
            run = _resuming(run, resume)
        if accept_lost:
            run = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"accept_lost": True})})
        if dry_run:
            typer.echo(dump(run), nl=False)
            return
        if replay is not None:
            let_go()
            _replay(run, replay, as_json=as_json)
            return
        _train(run, log_json=log_json)
    except StoppedError as error:
        typer.echo(f"echo-train: {error}", err=True)
    except ConfigError as error:
        _fail(str(error), status=2)
    except EchoError as error:
        _fail(str(error), status=1)


def _train(run, *, log_json: bool) -> None:  # type: ignore[no-untyped-def]
    import structlog
    from prometheus_client import CollectorRegistry

    from consumers.launched import place
    from echo.errors import StoppedError
    from echo.metrics import TrainerMetrics
    from echo.metrics_server import MetricsServer
    from echo.process import StopSignal, configure_logging, die_with_parent, end_with_asking_parent
    from echo.tested import warn_of_newer

    end_with_asking_parent()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A launcher that is killed ends none of its ranks.
        die_with_parent(os.getppid())
    configure_logging(json=log_json)
    # Before the heavy imports: a stop that is asked for during start-up is a planned one, too.
    stop = StopSignal().install()
    # Of several ranks none may leave before the others know.
    alone = place(os.environ).ranks == 1
    if alone and stop.is_set():
        raise StoppedError("stopped before it began")
    if place(os.environ).rank > 0:
        # Asked to stop, it goes on until rank 0, which was asked, too, has come to its end.
        from consumers.learner import follow

        follow(run)
        return
    warn_of_newer(structlog.get_logger("train"))
    metrics = TrainerMetrics(run.run_id, CollectorRegistry())
    server = MetricsServer(metrics.registry, host=run.metrics.host, port=run.metrics.train_port, key="metrics.train_port")
    try:
        structlog.get_logger("train").info("metrics are served", url=server.url)
        from consumers.learner import team_of
        from consumers.wiring import kafka_clients, trainer_of

        if alone and stop.is_set():
            raise StoppedError("stopped before it began")
        with (
            team_of(run) as team,
            trainer_of(run, kafka_clients(run, stop=stop), metrics=metrics, stop=stop, team=team) as trainer,
        ):
            trainer.run()
    finally:
        server.close()


def _resuming(run, resume: str):  # type: ignore[no-untyped-def]
    """The run with `--resume` in place of checkpoint.resume; a folder is relative to where the command runs."""
    where = resume if resume in ("auto", "never") else Path(resume).expanduser().absolute()
    return run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"resume": where})})


def _replay(run, step: int, *, as_json: bool) -> None:  # type: ignore[no-untyped-def]
    import json
    from contextlib import closing

    from rich.console import Console

    from consumers.replay import find_step, replay, table
    from consumers.wiring import kafka_clients
    from echo.errors import CheckpointError
    from echo.journal import FILE_NAME
    from echo.process import StopSignal, configure_logging

    configure_logging(level="warning")
    line = find_step(run.checkpoint.dir / FILE_NAME, step)
    clients = kafka_clients(run, stop=StopSignal())
    with closing(clients.open_reader()) as reader:
        found = replay(
            line,
            reader,
            topic=clients.topics.trajectories,
            cluster_id=clients.cluster_id,
            silent_s=run.broker.timeout_s,
            waiting_s=run.limits.waiting_s,
        )
    report = found.report()
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console(highlight=False).print(table(report))
    if not found.matches:
        raise CheckpointError(
            f"step {step}: the batch in the log is not the one that was trained: its digest is {found.digest}, the journal has "
            f"{line.digest}; the topic was written over, or another version of Echo reads its records differently"
        )


def _fail(message: str, *, status: int) -> NoReturn:
    typer.echo(f"echo-train: error: {message}", err=True)
    raise typer.Exit(status)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
