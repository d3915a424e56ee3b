"""A topic read from its beginning and for ever, in a thread of its own: what the listeners of the producer's side share.

Refuses to know what the records are. Errors that pass by themselves are logged and tried again; any other ends the thread, and
`check` says so to the loop.
"""

import threading
from collections.abc import Callable

import structlog

from echo.errors import BrokerError
from echo.log import BEGINNING, LogReader, LogRecord

log = structlog.get_logger("topic")

_READ_S = 0.2


class TopicFollower:
    """take: called after every read with what it gave, maybe nothing, and whether the end of the log was reached.

    changed: notified, with its lock held, when the thread ends by an error.
    """

    def __init__(
        self,
        open_reader: Callable[[], LogReader],
        topic: str,
        partitions: int,
        take: Callable[[list[LogRecord], bool], None],
        *,
        changed: threading.Condition,
        name: str,
    ) -> None:
        self._open_reader = open_reader
        self._topic = topic
        self._partitions = partitions
        self._take = take
        self._changed = changed
        self._error: BrokerError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raise BrokerError where the thread has ended."""
        with self._changed:
            if self._error is not None:
                raise self._error
        if self._thread.ident is not None and not self._thread.is_alive() and not self._closed.is_set():
            raise BrokerError(f"topic {self._topic}: nobody listens any more, the thread ended (see the traceback before)")

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        reader: LogReader | None = None
        try:
            reader = self._open_reader()
            reader.assign({(self._topic, number): BEGINNING for number in range(self._partitions)})
            while not self._closed.is_set():
                self._turn(reader)
        except BrokerError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            if reader is not None:
                reader.close()

    def _turn(self, reader: LogReader) -> None:
        try:
            records = reader.read(100, _READ_S)
        except BrokerError as error:
            if not error.retriable:
                raise
            log.warning("reading failed, trying again", topic=self._topic, error=str(error))
            self._closed.wait(_READ_S)
            return
        self._take(records, reader.at_end())
