"""`echo-produce`: one inference host of a run.

    echo-produce run.yaml
    echo-produce run.yaml producer.groups_per_call=16 --id host-7
    echo-produce run.yaml --dry-run

Refuses anything heavy before the command runs: `--help` answers at once. Exit status: 0 when the run ended or a stop was asked
for (SIGINT or SIGTERM; a second one ends at once with 130 or 143), 2 where the run file or an argument is wrong, 1 for every
other failure, with one line that says what.
"""

from echo.stopping import catch_early

if __name__ == "__main__":
    # What is imported below takes a good part of a second.
    catch_early()

import os
import re
import socket
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def default_id() -> str:
    """This process's name among the run's producers: host and process number."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().partition(".")[0]).strip("-") or "host"
    # Its end: pods of one deployment differ only there, and have the same process number.
    return f"{host[-40:].lstrip('-')}-{os.getpid()}"


@app.command()
def produce(
    run_file: Annotated[Path, typer.Argument(metavar="RUN_FILE", help="The run file, the same as the trainer's.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values over the run file's, by dotted key.")
    ] = None,
    producer_id: Annotated[
        str | None, typer.Option("--id", metavar="NAME", help="This producer's name, unique in the run. Default: host-pid.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved run file and exit.")] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines as JSON.")] = False,
) -> None:
    """Sample trajectories for a run and publish them to Kafka, pulling each newly announced policy."""
    from echo.errors import ConfigError, EchoError, StoppedError
    from echo.run_file import dump, load

    name = producer_id if producer_id is not None else default_id()
    if not _ID.fullmatch(name):
        _fail(f"--id {name!r}: letters, digits, '.', '_' and '-', 64 at most, a letter or digit first", status=2)
    try:
        run = load(run_file, overrides or ())
        if dry_run:
            typer.echo(dump(run), nl=False)
            return
        _produce(run, name, log_json=log_json)
    except StoppedError as error:
        typer.echo(f"echo-produce: {error}", err=True)
    except ConfigError as error:
        _fail(str(error), status=2)
    except EchoError as error:
        _fail(str(error), status=1)


def _produce(run, name: str, *, log_json: bool) -> None:  # type: ignore[no-untyped-def]
    import structlog
    from prometheus_client import CollectorRegistry

    from echo.errors import StoppedError
    from echo.metrics import ProducerMetrics
    from echo.metrics_server import MetricsServer
    from echo.process import StopSignal, configure_logging, end_with_asking_parent
    from echo.tested import warn_of_newer

    end_with_asking_parent()
    configure_logging(json=log_json)
    # Before the heavy imports: a stop that is asked for during start-up is a planned one, too.
    stop = StopSignal().install()
    if stop.is_set():
        raise StoppedError("stopped before it began")
    warn_of_newer(structlog.get_logger("produce"))
    metrics = ProducerMetrics(run.run_id, name, CollectorRegistry())
    server = MetricsServer(metrics.registry, host=run.metrics.host, port=run.metrics.produce_port, key="metrics.produce_port")
    try:
        structlog.get_logger("produce").info("metrics are served", url=server.url, producer=name)
        from producers.wiring import produce as run_producer

        if stop.is_set():
            raise StoppedError("stopped before it began")
        run_producer(run, name, metrics=metrics, stop=stop, metrics_url=server.url)
    finally:
        server.close()


def _fail(message: str, *, status: int) -> NoReturn:
    typer.echo(f"echo-produce: error: {message}", err=True)
    raise typer.Exit(status)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
