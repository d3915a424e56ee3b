"""The producer's heartbeat: its status, sent regularly and at changes, from a thread of its own.

Refuses to keep totals: it asks for a snapshot each time. Refuses to queue: a heartbeat that can't be sent now is not sent.
"""

import threading
import time
from collections.abc import Callable

import structlog

from echo import control
from echo.control import Heartbeat
from echo.errors import BrokerError
from echo.log import LogProducer

log = structlog.get_logger("heartbeat")

# The loop changes its state several times a second where batches are small; the trainer needs no more than this.
_BETWEEN_CHANGES_S = 0.5


class HeartbeatSender:
    """Sends `snapshot(sequence, leaving)` every `every_s` seconds, soon after `changed`, and at once at `now=True`.

    The snapshot is taken in the sending thread. `close` sends the last one, with `leaving`, and does not flush.
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
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> "HeartbeatSender":
        self._thread.start()
        return self

    def changed(self, *, now: bool = False) -> None:
        """The status is another one: send it within half a second of the last heartbeat, or at once."""
        with self._wake:
            soonest = 0.0 if now else self._last + self._spacing_s
            if soonest < self._due:
                self._due = soonest
                self._wake.notify_all()

    def close(self) -> None:
        """End the thread and send the leaving heartbeat."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._send(leaving=True)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._closed and (left := self._due - time.monotonic()) > 0:
                    self._wake.wait(left)
                if self._closed:
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
