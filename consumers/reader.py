"""Kafka -> intake: a polling thread of its own, manual assignment, partitions paused while the buffer is full.

They are paused too while too many dead letters wait for the broker (consumers/dead_letters.py), so that memory stays bounded.
New partitions of the topic are read from their beginning as soon as they are known.

Refuses consumer groups and auto-commit: positions come from the checkpoint. The thread polls whatever happens, also while
paused; the trainer learns of its death from `check`.
"""

import time
from collections.abc import Callable, Mapping

import structlog

from consumers.dead_letters import DeadLetters
from consumers.intake import Intake
from echo.background import Background
from echo.errors import BrokerError
from echo.log import LogProducer, LogReader

log = structlog.get_logger("reader")

# Larger batches do not read faster from 8 KiB records up, and hold the intake's lock longer.
_RECORDS_PER_READ = 100
_POLL_S = 0.2
# So much of a turn counts as reading: one that took longer was held up, by whatever stopped this process.
_LONGEST_TURN_S = 1.0
# It is a gauge for people, and to ask for it costs as much as to drop ten records.
_LAG_EVERY_S = 0.2


class TrajectoryReader:
    """Feeds the intake from the trajectories topic until closed.

    frontiers: per partition, the offset to begin at. partitions: how many the topic has now, asked again and again: those
    that `frontiers` does not name are new, and read from offset 0.
    max_letter_bytes: see `DeadLetters`.
    """

    def __init__(
        self,
        *,
        intake: Intake,
        reader: LogReader,
        producer: LogProducer,
        topic: str,
        partitions: Callable[[], int],
        frontiers: Mapping[int, int],
        dead_letter_topic: str,
        max_letter_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._intake = intake
        self._reader = reader
        self.topic = topic
        self._partitions = partitions
        self._start = {(topic, number): offset for number, offset in frontiers.items()}
        self._all = list(self._start)
        self._letters = DeadLetters(producer, dead_letter_topic, acknowledged=intake.dead_lettered, max_bytes=max_letter_bytes)
        self._clock = clock
        self.paused = False
        self._lag: dict[int, int | None] = {}
        self._lag_due = 0.0
        self._idle_s = 0.0
        self._polling = Background("trajectory-reader", self._run, wake=intake.wake)

    def start(self) -> None:
        self._reader.assign(self._start)
        self._polling.start()

    def check(self) -> None:
        """Raise what ended the polling thread, if anything did."""
        self._polling.check()

    @property
    def last_error(self) -> str:
        """What the client reported lately; "" when all is well."""
        return self._reader.last_error

    @property
    def idle_s(self) -> float:
        """For how long all partitions were read to the end of the log, without a pause, and nothing was there."""
        return self._idle_s

    def lag(self) -> dict[int, int | None]:
        """Per partition, records between the reader's position and the log end, as the polling thread last saw them."""
        return self._lag

    def stop(self) -> None:
        """Stop polling and wait for outstanding dead letters, so that a last checkpoint knows them as resolved."""
        if self._polling.stopping.is_set():
            return
        self._polling.stop(30)
        self._letters.flush(10.0)

    def close(self) -> None:
        self.stop()
        self._reader.close()

    def _run(self) -> None:
        while not self._polling.stopping.is_set():
            self._turn()

    def _turn(self) -> None:
        self._take_new_partitions()
        self._set_paused(self._intake.full() or self._letters.full)
        began = self._clock()
        records = self._reader.read(_RECORDS_PER_READ, _POLL_S)
        self._letters.add(self._intake.offer(records))
        read_s = 0.0 if self.paused else min(self._clock() - began, _LONGEST_TURN_S)
        self._intake.expire(read_s)
        idle = not records and not self.paused and self._reader.at_end() and self._nothing_behind()
        self._idle_s = self._idle_s + read_s if idle else 0.0
        self._letters.send()
        # Here, because the client lets one thread in at a time, and is not fair: another thread would wait for very long.
        if (now := self._clock()) >= self._lag_due:
            self._lag = {number: behind for (_, number), behind in self._reader.lag().items()}
            self._lag_due = now + _LAG_EVERY_S

    def _nothing_behind(self) -> bool:
        """Also no record that can't be read yet, behind a transaction that somebody left open."""
        return bool(self._lag) and not any(behind is None or behind > 0 for behind in self._lag.values())

    def _take_new_partitions(self) -> None:
        known, now = len(self._all), self._partitions()
        if now <= known:
            return
        added = {(self.topic, number): 0 for number in range(known, now)}
        self._intake.grow(now)
        try:
            self._reader.add(added)
        except BrokerError as error:
            if not error.retriable:
                raise
            log.info("new partitions can't be read yet, trying again", topic=self.topic, error=str(error))
            return
        if self.paused:
            self._reader.pause(added)
        self._all.extend(added)
        log.warning("the topic has more partitions, the new ones are read from their beginning", topic=self.topic, now=now)

    def _set_paused(self, full: bool) -> None:
        if full == self.paused:
            return
        if full:
            self._reader.pause(self._all)
        else:
            self._reader.resume(self._all)
        self.paused = full
