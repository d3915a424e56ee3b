"""`echo-demo`: watch a tiny policy learn over a real message log, on this machine.

    echo-demo
    echo-demo --seed 1 --out demo-1
    echo-demo --apache /opt/kafka
    echo-demo --mode sequential
    echo-demo model.path=my-model
    echo-demo broker.settings.bootstrap.servers=kafka-1:9092 learner.steps=50

Starts a broker (unless the run has one), makes a tiny policy (unless model.path names one) and a reasoning-gym task, runs two
producers and a trainer, and ends by itself. Refuses to leave a process behind. Exit status: 0 when the run ended, 130 after
Ctrl-C, 2 where an argument is wrong, 1 for every other failure.
"""

from echo.stopping import catch_early

if __name__ == "__main__":
    # What is imported below takes a good part of a second.
    catch_early()

from pathlib import Path
from typing import Annotated, Literal

import typer

Mode = Literal["async", "sequential"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_LINE_EVERY_S = 5.0


@app.command()
def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values over the demo's run file, by dotted key.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds the policy, the task and the sampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where everything is kept. Default: echo-demo-out/<date and time>.")] = None,
    apache: Annotated[
        Path | None, typer.Option(metavar="HOME", help="Run on Apache Kafka from this home (needs Java 17 or newer).")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=3, help="Brokers to start, 1 or 3 (Apache Kafka only).")] = 1,
    producers: Annotated[int, typer.Option(min=1, max=64, help="Producer processes.")] = 2,
    mode: Annotated[
        Mode,
        typer.Option(
            help="async: producers sample all the time. sequential: the trainer asks for each step's groups, staleness is 0."
        ),
    ] = "async",
) -> None:
    """Train a tiny policy with sampling and training in separate processes, over a Kafka-protocol broker."""
    import json
    import time
    from contextlib import nullcontext

    from rich.console import Console
    from rich.live import Live

    from echo.demo import run_demo
    from echo.demo_view import View, bias_table
    from echo.errors import ConfigError, EchoError
    from echo.process import StopSignal, configure_logging

    configure_logging(level="warning")
    stop = StopSignal().install()
    if stop.is_set():
        typer.echo("stopped before anything was started")
        raise typer.Exit(130)
    console = Console(highlight=False)
    folder = (out or Path("echo-demo-out") / time.strftime("%Y%m%d-%H%M%S")).resolve()
    said_at = float("-inf")

    def draw(view: View) -> None:
        nonlocal said_at
        if live is not None:
            live.update(view.table(), refresh=True)
        elif time.monotonic() - said_at >= _LINE_EVERY_S:
            said_at = time.monotonic()
            console.print(view.line(), soft_wrap=True)

    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    try:
        with live or nullcontext():
            outcome = run_demo(
                out=folder,
                seed=seed,
                overrides=[f"mode={mode}", *(overrides or ())],
                apache_home=apache,
                nodes=nodes,
                producers=producers,
                stop=stop,
                say=lambda line: console.print(line, soft_wrap=True),
                draw=draw,
            )
    except ConfigError as error:
        typer.echo(f"echo-demo: error: {error}", err=True)
        raise typer.Exit(2) from None
    except EchoError as error:
        typer.echo(f"echo-demo: error: {error}", err=True)
        raise typer.Exit(1) from None
    if outcome.summary is None or outcome.bias is None:
        console.print(f"stopped as asked; what there is lies in {outcome.out}")
        raise typer.Exit(130)
    console.print_json(json.dumps(outcome.summary))
    console.print(bias_table(outcome.bias))
    console.print(
        f"report: {outcome.out / 'summary.json'}, drop bias: {outcome.out / 'bias.json'}, plot: {outcome.out / 'reward.png'}",
        soft_wrap=True,
    )


def main() -> None:
    app()


if __name__ == "__main__":
    main()
