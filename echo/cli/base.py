"""What the commands that talk to a broker share: how they end, and which broker, topics and limits they mean.

Refuses to print a setting's value: those of `--set` and of the run file may be secret.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer
from typer.exceptions import TyperException

from echo.errors import ConfigError, EchoError

if TYPE_CHECKING:
    from echo.config import LimitsConfig

RunFile = Annotated[
    Path | None, typer.Argument(metavar="[RUN_FILE]", help="A run file: gives broker settings, prefix and topics file.")
]
Bootstrap = Annotated[
    str | None, typer.Option("--bootstrap-servers", "-b", metavar="HOST:PORT,...", help="The broker; wins over the run file.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A librdkafka setting; wins over the run file.")
]
Prefix = Annotated[str | None, typer.Option("--prefix", help="Goes before every topic name; wins over the run file.")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", min=0.1, help="Deadline for every question to the broker, seconds.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


class Target(NamedTuple):
    """What a command works on. settings: librdkafka's, secrets masked. topics_file: None for the one that ships with Echo."""

    settings: dict[str, Any]
    prefix: str
    topics_file: Path | None
    timeout_s: float
    limits: "LimitsConfig"


def target(
    run_file: Path | None, bootstrap: str | None, sets: Sequence[str] | None, prefix: str | None, timeout_s: float | None
) -> Target:
    """The run file, if there is one, with the options over it.

    Raises ConfigError where no broker is named, or an option can't be read.
    """
    from echo.config import BrokerConfig, LimitsConfig, TopicsConfig
    from echo.run_file import load

    run = None if run_file is None else load(run_file)
    broker = BrokerConfig() if run is None else run.broker
    topics = TopicsConfig() if run is None else run.topics
    given: dict[str, Any] = {}
    for item in sets or ():
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {key!r} is not KEY=VALUE, like security.protocol=SASL_SSL")
        given[key] = value
    if bootstrap is not None:
        given["bootstrap.servers"] = bootstrap
    settings = BrokerConfig(settings={**broker.settings, **given}).settings
    if not settings.get("bootstrap.servers"):
        raise ConfigError(
            "no broker is named: pass --bootstrap-servers HOST:PORT, or a run file whose broker.settings has "
            "bootstrap.servers (an embedded broker says its address when it starts)"
        )
    return Target(
        dict(settings),
        topics.prefix if prefix is None else prefix,
        topics.file,
        broker.timeout_s if timeout_s is None else timeout_s,
        LimitsConfig() if run is None else run.limits,
    )


def finish(app: typer.Typer, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with the number it returns. Any error is one line on standard error, and status 1.

    Wrong usage gives 1 as well: 2, its usual status, is an answer of `echo-topics plan`.
    """
    try:
        status = app(args=arguments, standalone_mode=False)
    except TyperException as error:
        # Its text alone does not name the option.
        typer.echo(f"error: {error.format_message()}", err=True)
        status = 1
    except typer.Abort:
        typer.echo("stopped, nothing was changed", err=True)
        status = 1
    except EchoError as error:
        typer.echo(f"error: {error}", err=True)
        status = 1
    sys.exit(status or 0)
