"""echo-tail: shows the records of one of Echo's topics, readably, and goes on as they come.

    echo-tail trajectories run.yaml
    echo-tail control -b 127.0.0.1:9092 --from-beginning --no-follow --json

TOPIC is trajectories, control, requests, heartbeats or dead_letter (the prefix goes before it), or a full topic name that
ends in one of them. Starts with the last 10 records (-n), or from --from-beginning, or from --offset PARTITION:OFFSET.

Reads beside every trainer and commits nothing. Never asks a broker for "latest", which some answer wrongly: it reads from
the beginning until it knows where the ends are. A record that can't be read is shown as such and stops nothing.
`--json`: one object per line, as `echo.cli.show.to_json` says.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from echo.cli import base
from echo.errors import BrokerError, ConfigError, TopicError

if TYPE_CHECKING:
    import threading

    from echo.log import LogReader, LogRecord, Partition

app = typer.Typer(add_completion=False)

_BATCH = 500
_POLL_S = 0.2


class Scan:
    """Reads partitions from the given offsets to the ends that they have when first asked; newer records come along.

    firsts: the offset of the first record of each partition that gave one.
    """

    def __init__(
        self, reader: "LogReader", starts: "Mapping[Partition, int]", *, timeout_s: float, stop: "threading.Event"
    ) -> None:
        self._reader = reader
        self._timeout_s = timeout_s
        self._stop = stop
        self._partitions = set(starts)
        self._positions = {partition: offset for partition, offset in starts.items() if offset >= 0}
        self._ended: set[Partition] = set()
        self.firsts: dict[Partition, int] = {}
        self.ends: dict[Partition, int] = {}
        reader.assign(starts)

    def __iter__(self) -> "Iterator[LogRecord]":
        """Raises BrokerError when the broker gives neither records nor ends for `timeout_s`."""
        moved = time.monotonic()
        while not self._stop.is_set():
            records = self._reader.read(_BATCH, _POLL_S)
            for record in records:
                partition = (record.topic, record.partition)
                self.firsts.setdefault(partition, record.offset)
                self._positions[partition] = record.end
            for partition, lag in self._reader.lag().items():
                position = self._positions.get(partition)
                if lag is not None and position is not None:
                    self.ends.setdefault(partition, position + lag)
                if lag == 0 or (position is not None and position >= self.ends.get(partition, position + 1)):
                    self._ended.add(partition)
            yield from records
            if self._reader.at_end() or self._ended == self._partitions:
                return
            if records:
                moved = time.monotonic()
            elif time.monotonic() - moved > self._timeout_s:
                missing = ", ".join(f"{topic}[{number}]" for topic, number in sorted(self._partitions - self._ended))
                raise BrokerError(f"no answer for {missing} within {self._timeout_s:g} s: is the broker up?", retriable=True)

    def surveyed(self) -> bool:
        """Whether the first record and the end of every partition are known."""
        return all(p in self._ended or (p in self.firsts and p in self.ends) for p in self._partitions)

    def ahead(self) -> int:
        """The longest way to an end, in offsets; only after `surveyed`."""
        return max((self.ends[p] - self._positions[p] for p in self._partitions - self._ended), default=0)


def last_records(
    reader: "LogReader",
    partitions: "Sequence[Partition]",
    count: int,
    wanted: "Callable[[LogRecord], bool]",
    *,
    timeout_s: float,
    stop: "threading.Event",
) -> "list[LogRecord]":
    """The last `count` wanted records of all partitions together, oldest first. The reader stays where they end.

    Offsets have gaps and records may be unwanted, so it looks back in growing steps until there are enough, or all were seen.
    """
    from echo.log import BEGINNING

    window = 16 * count
    starts: dict[Partition, int] = dict.fromkeys(partitions, BEGINNING)
    survey = scan = Scan(reader, starts, timeout_s=timeout_s, stop=stop)
    while True:
        kept: dict[Partition, deque[LogRecord]] = {partition: deque(maxlen=count) for partition in partitions}
        skip = False
        for record in scan:
            if wanted(record):
                kept[record.topic, record.partition].append(record)
            skip = scan is survey and survey.surveyed() and survey.ahead() > window
            if skip:
                break
        whole = all(starts[p] <= survey.firsts.get(p, starts[p]) or len(kept[p]) >= count for p in partitions)
        if stop.is_set() or (whole and not skip):
            found = sorted((r for records in kept.values() for r in records), key=lambda r: (r.timestamp_ms, r[:3]))
            return found[len(found) - count :] if count < len(found) else found
        if not skip:
            window *= 8
        firsts, ends = survey.firsts, survey.ends
        starts = {p: max(firsts[p], ends[p] - window) if p in firsts else BEGINNING for p in partitions}
        scan = Scan(reader, starts, timeout_s=timeout_s, stop=stop)


def role_and_name(topic: str, prefix: str) -> tuple[str, str]:
    """Which of Echo's topics is meant, and its name in the cluster. Raises ConfigError for any other name."""
    from echo.topic_spec import TopicNames

    if topic in TopicNames._fields:
        return topic, getattr(TopicNames.with_prefix(prefix), topic)
    role = next((role for role in TopicNames._fields if topic.endswith(role)), None)
    if role is None:
        raise ConfigError(f"topic {topic!r} is none of {', '.join(TopicNames._fields)}, nor a full name that ends in one")
    return role, topic


def parse_offsets(offsets: Sequence[str], partitions: int) -> dict[int, int]:
    """--offset PARTITION:OFFSET. Raises ConfigError for anything else, or a partition that does not exist."""
    starts: dict[int, int] = {}
    for item in offsets:
        partition, _, offset = item.partition(":")
        if not (partition.isdigit() and offset.isdigit()):
            raise ConfigError(f"--offset {item!r} is not PARTITION:OFFSET, like 0:1200")
        if int(partition) >= partitions:
            raise ConfigError(f"--offset {item!r}: the topic has partitions 0 to {partitions - 1}")
        starts[int(partition)] = int(offset)
    return starts


@app.command()
def tail(
    topic: Annotated[str, typer.Argument(help="trajectories, control, requests, heartbeats or dead_letter; or a full name.")],
    run_file: base.RunFile = None,
    bootstrap: base.Bootstrap = None,
    prefix: base.Prefix = None,
    settings: base.Set = None,
    timeout: base.Timeout = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Only this run's records, and those that do not say whose they are.")
    ] = None,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="From the first record that is still there.")
    ] = False,
    offset: Annotated[
        list[str] | None, typer.Option("--offset", metavar="P:O", help="Only partition P, from offset O; may be repeated.")
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("-n", min=0, help="The last N records (10); with a start: end after N records.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Go on at the end, or stop there.")] = True,
    full: Annotated[bool, typer.Option("--full", help="Also arrays and whole values.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> int:
    """Show the records of one of Echo's topics."""
    from echo.cli import show
    from echo.dead_letter import OVERHEAD_BYTES
    from echo.kafka import KafkaLogAdmin, KafkaLogReader
    from echo.log import BEGINNING
    from echo.process import StopSignal, configure_logging

    configure_logging()
    if from_beginning and offset:
        raise ConfigError("--from-beginning and --offset exclude each other")
    target = base.target(run_file, bootstrap, settings, prefix, timeout)
    role, name = role_and_name(topic, target.prefix)
    partitions = KafkaLogAdmin(target.settings, client_id="echo-tail").partitions(name, target.timeout_s)
    if partitions == 0:
        raise TopicError(f"topic {name} does not exist: is the prefix right? `echo-topics plan` shows what is missing")
    starts = {(name, p): o for p, o in parse_offsets(offset or (), partitions).items()}
    if from_beginning:
        starts = dict.fromkeys(((name, p) for p in range(partitions)), BEGINNING)

    def wanted(record: "LogRecord") -> bool:
        return run is None or show.run_of(role, record) in (run, None)

    stop = StopSignal().install()
    reader = KafkaLogReader(
        target.settings,
        client_id="echo-tail",
        max_record_bytes=target.limits.record_bytes + OVERHEAD_BYTES,
        committed=role in ("control", "requests"),
    )

    def records() -> "Iterator[LogRecord]":
        if starts:
            yield from filter(wanted, Scan(reader, starts, timeout_s=target.timeout_s, stop=stop.event))
        else:
            yield from last_records(
                reader,
                [(name, p) for p in range(partitions)],
                10 if count is None else count,
                wanted,
                timeout_s=target.timeout_s,
                stop=stop.event,
            )
        if follow:
            yield from filter(wanted, _follow(reader, name, stop.event, target.limits.waiting_s))

    left = count if starts else None
    try:
        if left == 0:
            return 0
        for record in records():
            seen = show.to_json(role, record, full=full)
            typer.echo(json.dumps(seen) if as_json else show.to_text(seen))
            left = None if left is None else left - 1
            if left == 0:
                break
    finally:
        reader.close()
    return 0


def _follow(reader: "LogReader", name: str, stop: "threading.Event", waiting_s: float) -> "Iterator[LogRecord]":
    from echo.waiting import Watch

    def where() -> str:
        behind = sum(lag or 0 for lag in reader.lag().values())
        return f"{behind} records behind its end" if behind else "at its end"

    watch = Watch(f"records of {name}", where, limit_s=waiting_s)
    while not stop.is_set():
        records = reader.read(_BATCH, _POLL_S)
        if records:
            watch.progress()
        watch.check()
        yield from records


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `echo-tail`."""
    base.finish(app, arguments)


if __name__ == "__main__":
    main()
