"""echo-broker: run a broker on this machine until Ctrl-C.

    echo-broker                                   Tansu, in memory
    echo-broker --apache HOME --data DIR          Apache Kafka, one node, records in DIR
    echo-broker --apache HOME --nodes 3           three nodes: replication 3, min.insync 2

Exit status: 0 after Ctrl-C or SIGTERM, 1 where the broker can't be started or has died, 2 for a wrong command line.
Refuses to listen anywhere but on the loopback interface: it is for development and tests.
"""

from echo.stopping import catch_early

if __name__ == "__main__":
    # What is imported below takes a good part of a second.
    catch_early()

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


@app.command()
def run(
    apache: Annotated[
        Path | None, typer.Option(metavar="HOME", help="An Apache Kafka home (its libs folder); else KAFKA_HOME, else Tansu.")
    ] = None,
    data: Annotated[Path, typer.Option(metavar="DIR", help="Records (Apache Kafka) and log files.")] = Path("runs/broker"),
    nodes: Annotated[int, typer.Option(help="1, or 3 with Apache Kafka.")] = 1,
    port: Annotated[
        int, typer.Option(min=0, max=65533, help="Of the first node; 0: the ones of the last start, else free ones.")
    ] = 0,
    heap: Annotated[int, typer.Option(metavar="MIB", min=256, help="Heap of each Apache Kafka node.")] = 768,
) -> None:
    """Run a broker on this machine until Ctrl-C."""
    from echo.broker import plan_broker, start_broker
    from echo.errors import BrokerError
    from echo.process import StopSignal, configure_logging

    if nodes not in (1, 3):
        raise typer.BadParameter("1 or 3", param_hint="--nodes")
    configure_logging()
    stop = StopSignal().install()
    try:
        plan = plan_broker(apache_home=apache)
        if nodes != 1 and plan.kind != "apache":
            raise typer.BadParameter("three nodes need Apache Kafka: --apache HOME, or KAFKA_HOME", param_hint="--nodes")
        typer.echo(plan.describe())
        if stop.is_set():
            typer.echo("stopped before the broker was started")
            return
        with start_broker(plan, data_dir=data, nodes=nodes, port=port, heap_mib=heap) as broker:
            typer.echo(f"bootstrap.servers={broker.bootstrap_servers} (cluster {broker.cluster_id})")
            typer.echo(f"In the run file:\n\nbroker:\n  settings:\n    bootstrap.servers: {broker.bootstrap_servers}\n")
            typer.echo("Ctrl-C stops it.")
            while not stop.event.wait(0.5):
                broker.check()
            typer.echo("stopping the broker")
    except BrokerError as error:
        typer.echo(f"echo-broker: {error}", err=True)
        raise typer.Exit(1) from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()
