"""Kafka -> intake: a polling thread of its own, manual assignment, partitions paused while the buffer is full.

Refuses consumer groups and auto-commit: positions come from the checkpoint. The thread polls whatever happens, also while
paused, and hands every failure to the trainer, who asks `check`.
"""

import threading
from collections.abc import Mapping

import structlog

from consumers.intake import DeadLetter, Intake
from echo import dead_letter
from echo.errors import EchoError
from echo.log import BEGINNING, LogProducer, LogReader

log = structlog.get_logger("reader")

# Larger batches do not read faster from 8 KiB records up, and hold the intake's lock longer.
_RECORDS_PER_READ = 100
_POLL_S = 0.2


class TrajectoryReader:
    """Feeds the intake from the trajectories topic until closed.

    frontiers: per partition, the offset to begin at; partitions that it does not name are read from their beginning.
    """

    def __init__(
        self,
        *,
        intake: Intake,
        reader: LogReader,
        producer: LogProducer,
        topic: str,
        partitions: int,
        frontiers: Mapping[int, int],
        dead_letter_topic: str,
    ) -> None:
        self._intake = intake
        self._reader = reader
        self._producer = producer
        self.topic = topic
        self._all = [(topic, number) for number in range(partitions)]
        self._start = {(topic, number): frontiers.get(number, BEGINNING) for number in range(partitions)}
        self._dead_letter_topic = dead_letter_topic
        self._unsent: list[DeadLetter] = []
        self._failed_letters: list[DeadLetter] = []
        self._stop = threading.Event()
        self._error: EchoError | None = None
        self.paused = False
        self._lag: dict[int, int | None] = {}
        self._thread = threading.Thread(target=self._run, name="trajectory-reader", daemon=True)

    def start(self) -> None:
        self._reader.assign(self._start)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the polling thread, if anything did."""
        if self._error is not None:
            raise self._error

    def lag(self) -> dict[int, int | None]:
        """Per partition, records between the reader's position and the log end, as the polling thread last saw them."""
        return self._lag

    def close(self) -> None:
        """Stop polling and wait for outstanding dead letters."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=30)
        self._producer.flush(10.0)
        self._reader.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
        except EchoError as error:
            self._error = error
            self._intake.wake()

    def _turn(self) -> None:
        self._set_paused(self._intake.full())
        self._unsent.extend(self._intake.offer(self._reader.read(_RECORDS_PER_READ, _POLL_S)))
        self._intake.expire()
        self._send_dead_letters()
        # The client lets one thread in at a time, and is not fair: another thread that asks it would wait for very long.
        self._lag = {number: behind for (_, number), behind in self._reader.lag().items()}

    def _set_paused(self, full: bool) -> None:
        if full == self.paused:
            return
        if full:
            self._reader.pause(self._all)
        else:
            self._reader.resume(self._all)
        self.paused = full

    def _send_dead_letters(self) -> None:
        # Served by this thread only, so the reports below run here too. What the broker refused is tried again: until a
        # letter is safe its record stays unresolved, and a restart reads it again.
        self._unsent.extend(self._failed_letters)
        self._failed_letters.clear()
        while self._unsent:
            letter = self._unsent[0]
            key, headers, value = dead_letter.wrap(letter.record, letter.reason.value, letter.detail)
            sent = self._producer.send(
                self._dead_letter_topic,
                key=key,
                value=value,
                headers=headers,
                on_delivery=lambda delivery, letter=letter: self._report(letter, delivery.error),  # type: ignore[misc]
            )
            if not sent:
                break
            self._unsent.pop(0)
            log.warning("dead letter", where=letter.record.where, reason=letter.reason.value, detail=letter.detail)
        self._producer.poll(0)

    def _report(self, letter: DeadLetter, error: str | None) -> None:
        if error is None:
            self._intake.dead_lettered(letter)
        else:
            log.error("dead letter not written, trying again", where=letter.record.where, error=error)
            self._failed_letters.append(letter)
