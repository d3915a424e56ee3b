"""Hears heartbeats and keeps producers' grants current between announcements: a thread beside the trainer.

Refuses to judge liveness from history: heartbeats that lay in the topic before this process read to its end say nothing
about who lives now.
"""

import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import structlog

from consumers.fleet import Fleet, GivenUp, ProducerStatus
from echo import control
from echo.agreement import differences
from echo.background import Background
from echo.control import Grant, Heartbeat
from echo.errors import ControlError
from echo.log import BEGINNING, LogReader

log = structlog.get_logger("fleet")

_POLL_S = 0.2
# Grants move a little with every heartbeat; at 100 producers one message a second carries them all.
_PROGRESS_EVERY_S = 1.0
# Kafka confirms a commit before it shows it, and a node that is killed in between shows it only once the next transaction has
# begun. So there is always a next one: else producers may wait for a policy that the trainer waits to see sampled.
_REPEAT_EVERY_S = 5.0


class FleetListener:
    """send_progress: sends a control message with the grants that it is given for its sequence number (`take_grants`); called
    by this thread only, when grants changed, and every few seconds where they did not. agreement: what producers must have
    alike (`echo.agreement`)."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        reader: LogReader,
        topic: str,
        send_progress: Callable[[Callable[[int], Mapping[str, Grant]]], None],
        agreement: Mapping[str, str] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._reader = reader
        self._topic = topic
        self._send_progress = send_progress
        self._agreement = agreement
        # Incarnations of which it was said that they don't agree.
        self._disagreeing: set[str] = set()
        self._clock = clock
        self._lock = threading.Lock()
        self._sent: Mapping[str, Grant] = {}
        self._sent_at = float("-inf")
        self._current = False
        self._listening = Background("fleet-listener", self._run)

    def start(self) -> None:
        self._reader.assign({(self._topic, 0): BEGINNING})
        self._listening.start()

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        self._listening.check()

    def close(self) -> None:
        self._listening.stop(30)
        self._reader.close()

    def alive(self) -> list[ProducerStatus]:
        with self._lock:
            return self._fleet.alive()

    def take_given_up(self) -> dict[str, GivenUp]:
        """See `Fleet.take_given_up`."""
        with self._lock:
            return self._fleet.take_given_up()

    def windows(self) -> dict[str, int]:
        """The window of every live producer, by incarnation."""
        with self._lock:
            return {incarnation: grant.window for incarnation, grant in self._fleet.grants().items()}

    def resolved(self) -> dict[str, int]:
        with self._lock:
            return self._fleet.resolved()

    def groups_resolved(self, groups: Mapping[str, int]) -> None:
        """Count resolved groups per producer incarnation: the next grants tell it."""
        with self._lock:
            for incarnation, count in groups.items():
                self._fleet.group_resolved(incarnation, count)

    def take_grants(self, sequence: int) -> dict[str, Grant]:
        """The grants of this moment, for the control message of this number, which must be sent now."""
        with self._lock:
            grants = self._fleet.grants()
            self._fleet.granted(sequence, grants)
            self._sent, self._sent_at = grants, self._clock()
            return grants

    def _run(self) -> None:
        while not self._listening.stopping.is_set():
            self._turn()

    def _turn(self) -> None:
        for record in self._reader.read(1000, _POLL_S):
            if not self._current:
                continue
            try:
                heartbeat = control.decode_heartbeat(record.value, record.where)
            except ControlError as error:
                log.warning("heartbeat skipped", error=str(error))
                continue
            self._compare(heartbeat)
            with self._lock:
                self._fleet.hear(heartbeat)
        if not self._current:
            self._current = self._reader.at_end()
        with self._lock:
            silent_s = self._clock() - self._sent_at
            changed = self._fleet.grants() != self._sent
            due = silent_s >= (_PROGRESS_EVERY_S if changed else _REPEAT_EVERY_S)
        if due:
            self._send_progress(self.take_grants)

    def _compare(self, heartbeat: Heartbeat) -> None:
        """Log, once in its life, that a producer does not agree with us. It ends by itself when it reads our next message."""
        if heartbeat.run_id != self._fleet.run_id or heartbeat.incarnation in self._disagreeing:
            return
        found = differences(heartbeat.agreement, self._agreement)
        if found:
            self._disagreeing.add(heartbeat.incarnation)
            log.error(
                "a producer does not agree with this trainer: give both the same run file and model",
                producer=heartbeat.producer_id,
                differences="; ".join(found),
            )
