"""A topic read from its beginning and for ever, in a thread of its own: what the listeners of the producer's side share.

Refuses to know what the records are. Errors that pass by themselves are logged and tried again; any other ends the thread, and
the loop learns of it from `check`.
"""

import threading
from collections.abc import Callable

import structlog

from echo.background import Background
from echo.errors import BrokerError
from echo.log import BEGINNING, LogReader, LogRecord

log = structlog.get_logger("topic")

_READ_S = 0.2


class TopicFollower:
    """partitions: how many the topic has now; new ones are read from their beginning as soon as they are known.

    take: called after every read with what it gave, maybe nothing, and whether the end of the log was reached.

    changed: notified, with its lock held, when the thread is to end and when it died.
    """

    def __init__(
        self,
        open_reader: Callable[[], LogReader],
        topic: str,
        partitions: Callable[[], int],
        take: Callable[[list[LogRecord], bool], None],
        *,
        changed: threading.Condition,
        name: str,
    ) -> None:
        self._open_reader = open_reader
        self._topic = topic
        self._partitions = partitions
        self._read = 0
        self._reader: LogReader | None = None
        self._take = take
        self._changed = changed
        self._following = Background(name, self._run, wake=self._notify)

    def start(self) -> None:
        self._following.start()

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        self._following.check()

    @property
    def last_error(self) -> str:
        """What keeps the topic from being read at the moment, as the client reports it; "" when all is well."""
        reader = self._reader
        return "" if reader is None else reader.last_error

    def close(self) -> None:
        self._following.stop()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        reader = self._open_reader()
        try:
            self._reader = reader
            self._read = self._partitions()
            reader.assign({(self._topic, number): BEGINNING for number in range(self._read)})
            while not self._following.stopping.is_set():
                self._turn(reader)
        finally:
            self._reader = None
            reader.close()

    def _turn(self, reader: LogReader) -> None:
        try:
            if (now := self._partitions()) > self._read:
                reader.add({(self._topic, number): BEGINNING for number in range(self._read, now)})
                self._read = now
                log.info(
                    "the topic has more partitions, the new ones are read from their beginning", topic=self._topic, now=now
                )
            records = reader.read(100, _READ_S)
        except BrokerError as error:
            if not error.retriable:
                raise
            log.warning("reading failed, trying again", topic=self._topic, error=str(error))
            self._following.stopping.wait(_READ_S)
            return
        self._take(records, reader.at_end())
