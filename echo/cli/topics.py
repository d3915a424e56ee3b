"""echo-topics: what topics.yaml promises against what the cluster has.

    echo-topics plan run.yaml
    echo-topics apply --bootstrap-servers 127.0.0.1:9092 --yes

Never deletes a topic, never shrinks one, never moves replicas, and changes nothing that it did not show before. Exit status:
plan 0 nothing to do, 2 changes pending; check 0 all promises kept; apply 0 done; always 1 for an error, or for a difference
that can't be removed.

JSON (`--json`; fields may be added, none is renamed or removed):

    plan      {"changes": n, "creates": [{"topic", "partitions", "replication_factor", "config": {key: value}}],
               "partition_increases": [{"topic", "before", "after"}],
               "setting_changes": [{"topic", "key", "before", "after"}],
               "not_done": [{"topic", "subject", "actual", "wanted", "because"}],
               "left": [{"topic", "key", "value"}], "unknown": [{"topic", "keys": [key], "because"}]}
    apply     the same, of the plan that was applied, and "applied": true or false (there was nothing to do)
    check     {"ok": true, "findings": [{"topic", "check", "level": "ok" | "warning" | "error", "message"}]}
    describe  {"cluster_id", "brokers", "topics": [{"role", "topic", "exists", "partitions", "replication_factor",
               "settings": {key: {"value", "own"}}}]}, own: set on the topic, not a default of the broker

Setting values are text, as in Kafka. Errors are one line on standard error.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from echo.cli import base
from echo.errors import ConfigError

if TYPE_CHECKING:
    from echo.kafka import KafkaLogAdmin
    from echo.topics import Actual, Plan, Spec

app = typer.Typer(add_completion=False, help="Create, check and change the topics of topics.yaml.")

File = Annotated[
    Path | None, typer.Option("--file", "-f", help="topics.yaml; else the run file's, else the one that ships with Echo.")
]

_COLOURS = {"+": "green", "~": "yellow", "!": "red", "?": "cyan"}
_LEVEL_MARKS = {"ok": "  ", "warning": "? ", "error": "! "}


def _look(target: base.Target, file: Path | None) -> "tuple[KafkaLogAdmin, Spec, Actual]":
    from echo.kafka import KafkaLogAdmin
    from echo.topics import load, read_actual

    spec = load(file or target.topics_file, target.prefix)
    admin = KafkaLogAdmin(target.settings, client_id="echo-topics")
    return admin, spec, read_actual(admin, spec.names, target.timeout_s)


def _show(text: str) -> None:
    for line in text.splitlines():
        typer.secho(line, fg=_COLOURS.get(line[:1]))


def _show_json(data: dict[str, Any]) -> None:
    typer.echo(json.dumps(data, indent=2))


def _show_plan(spec: "Spec", actual: "Actual", difference: "Plan") -> None:
    from echo.topics import format_plan

    typer.echo(f"{spec.source} -> cluster {actual.cluster_id} (brokers: {actual.brokers})")
    _show(format_plan(difference))


@app.command("plan")
def plan_command(
    run_file: base.RunFile = None,
    bootstrap: base.Bootstrap = None,
    file: File = None,
    prefix: base.Prefix = None,
    settings: base.Set = None,
    timeout: base.Timeout = None,
    as_json: base.Json = False,
) -> int:
    """Show what apply would do. Status 0: nothing, 2: something, 1: an error or a difference that can't be removed."""
    from echo.topics import plan, plan_json

    _, spec, actual = _look(base.target(run_file, bootstrap, settings, prefix, timeout), file)
    difference = plan(spec, actual)
    if as_json:
        _show_json(plan_json(difference))
    else:
        _show_plan(spec, actual, difference)
    if difference.not_done:
        return 1
    return 2 if difference.changes else 0


@app.command("apply")
def apply_command(
    run_file: base.RunFile = None,
    bootstrap: base.Bootstrap = None,
    file: File = None,
    prefix: base.Prefix = None,
    settings: base.Set = None,
    timeout: base.Timeout = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: base.Json = False,
) -> int:
    """Show the plan, ask, and do it. Status 1 also where a difference is left that can't be removed."""
    from echo.topics import apply, plan, plan_json

    target = base.target(run_file, bootstrap, settings, prefix, timeout)
    admin, spec, actual = _look(target, file)
    difference = plan(spec, actual)
    if not as_json:
        _show_plan(spec, actual, difference)
    if difference.changes:
        if not yes:
            if as_json or not sys.stdin.isatty():
                raise ConfigError("nobody is there to answer whether to apply this: pass --yes")
            typer.confirm(f"Apply {difference.changes} to {target.settings['bootstrap.servers']}?", abort=True)
        apply(difference, admin, target.timeout_s)
    if as_json:
        _show_json({"applied": difference.changes > 0, **plan_json(difference)})
    elif difference.changes:
        typer.echo(f"Applied: {difference.changes} changed.")
    return 1 if difference.not_done else 0


@app.command("check")
def check_command(
    run_file: base.RunFile = None,
    bootstrap: base.Bootstrap = None,
    file: File = None,
    prefix: base.Prefix = None,
    settings: base.Set = None,
    timeout: base.Timeout = None,
    as_json: base.Json = False,
) -> int:
    """Check every promise of topics.yaml, and what a run needs. Status 0: all kept (or unknown), 1: not."""
    from echo.topics import check, mended, plan, preflight

    target = base.target(run_file, bootstrap, settings, prefix, timeout)
    _, spec, actual = _look(target, file)
    findings = check(spec, actual)
    said = {(item.topic, item.check) for item in findings if item.level == "error"}
    findings += [item for item in preflight(spec, actual, target.limits) if (item.topic, item.check) not in said]
    errors = sum(item.level == "error" for item in findings)
    if as_json:
        _show_json({"ok": errors == 0, "findings": [item._asdict() for item in findings]})
    else:
        _show("\n".join(f"{_LEVEL_MARKS[item.level]}{item.topic}: {item.check}: {item.message}" for item in findings))
        mends = mended(plan(spec, actual), findings)
        remedy = f" `echo-topics apply` mends {'them' if mends == errors else mends}." if mends else ""
        typer.echo(f"{len(findings)} checks, {errors} failed.{remedy}")
    return 1 if errors else 0


@app.command("describe")
def describe_command(
    run_file: base.RunFile = None,
    bootstrap: base.Bootstrap = None,
    file: File = None,
    prefix: base.Prefix = None,
    settings: base.Set = None,
    timeout: base.Timeout = None,
    everything: Annotated[bool, typer.Option("--all", help="Also the broker's defaults.")] = False,
    as_json: base.Json = False,
) -> int:
    """Show Echo's topics as they are."""
    _, spec, actual = _look(base.target(run_file, bootstrap, settings, prefix, timeout), file)
    if as_json:
        _show_json(_description(spec, actual))
        return 0
    typer.echo(f"cluster {actual.cluster_id} (brokers: {actual.brokers})")
    for _, name, topic in spec.topics():
        found = actual.topics.get(name)
        if found is None:
            typer.echo(f"{name}: does not exist")
            continue
        typer.echo(f"{name}: partitions {found.partitions}, replication {found.replication}")
        for key, reported in sorted(found.settings.items()):
            if everything or reported.own or key in topic.config:
                origin = "" if key in topic.config else "   (not in the topics file)" if reported.own else "   (default)"
                typer.echo(f"    {key} = {'(not shown)' if reported.value is None else reported.value}{origin}")
        if not found.settings:
            typer.echo(f"    settings unknown: {found.silence}")
    return 0


def _description(spec: "Spec", actual: "Actual") -> dict[str, Any]:
    topics = []
    for role, name, _ in spec.topics():
        found = actual.topics.get(name)
        topics.append(
            {
                "role": role,
                "topic": name,
                "exists": found is not None,
                "partitions": 0 if found is None else found.partitions,
                "replication_factor": 0 if found is None else found.replication,
                "settings": {}
                if found is None
                else {key: reported._asdict() for key, reported in sorted(found.settings.items())},
            }
        )
    return {"cluster_id": actual.cluster_id, "brokers": actual.brokers, "topics": topics}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `echo-topics`."""
    base.finish(app, arguments)


if __name__ == "__main__":
    main()
