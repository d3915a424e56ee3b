"""The producer's heartbeat: its status, sent regularly and at changes, from a thread of its own.

Refuses to keep totals: it asks for a snapshot each time. Refuses to queue: a heartbeat that can't be sent now is not sent.
"""

import threading
import time
from collections.abc import Callable

import structlog

from echo import control
from echo.background import Background
from echo.control import Heartbeat
from echo.errors import BrokerError
from echo.log import LogProducer

log = structlog.get_logger("heartbeat")

# The loop changes its state several times a second where batches are small; the trainer needs no more than this.
_BETWEEN_CHANGES_S = 0.5


class HeartbeatSender:
    """Sends `snapshot(sequence, leaving)` every `every_s` seconds, soon after `changed`, and at once at `now=True`.

    The snapshot is taken in the sending thread. `close` sends the last one, with `leaving`, and does not flush. After a
    death of the thread it sends none: the last one would meet the same error.
    """

    def __init__(
        self, producer: LogProducer, topic: str, snapshot: Callable[[int, bool], Heartbeat], *, every_s: float
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._snapshot = snapshot
        self._every_s = every_s
        self._spacing_s = min(_BETWEEN_CHANGES_S, every_s)
        self._wake = threading.Condition()
        self._due = 0.0
        self._last = float("-inf")
        self._sequence = 0
        self._sending = Background("heartbeat", self._run, wake=self._notify)

    def start(self) -> "HeartbeatSender":
        self._sending.start()
        return self

    def changed(self, *, now: bool = False) -> None:
        """The status is another one: send it within half a second of the last heartbeat, or at once."""
        with self._wake:
            soonest = 0.0 if now else self._last + self._spacing_s
            if soonest < self._due:
                self._due = soonest
                self._wake.notify_all()

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        self._sending.check()

    def close(self) -> None:
        """End the thread and send the leaving heartbeat."""
        self._sending.stop()
        if not self._sending.failed:
            self._send(leaving=True)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._sending.stopping.is_set() and (left := self._due - time.monotonic()) > 0:
                    self._wake.wait(left)
                if self._sending.stopping.is_set():
                    return
                self._last = time.monotonic()
                self._due = self._last + self._every_s
            self._send(leaving=False)

    def _send(self, *, leaving: bool) -> None:
        message = self._snapshot(self._sequence, leaving)
        self._sequence += 1
        try:
            taken = self._producer.send(self._topic, key=control.key(message), value=control.encode(message))
        except BrokerError as error:
            # The publisher meets the same client's error and ends the producer with it.
            log.warning("heartbeat not sent", error=str(error))
            return
        if not taken:
            log.warning("heartbeat not sent: the queue to the broker is full")
