"""Hears heartbeats and keeps producers' grants current between announcements: a thread beside the trainer.

Refuses to judge liveness from history: heartbeats that lay in the topic before this process read to its end say nothing
about who lives now. A heartbeats topic that is deleted ends nothing: the listener waits for it, aloud, and reads it from its
beginning once it is there again.
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
from echo.errors import ControlError, NoSuchOffsetError, UnknownTopicError
from echo.log import BEGINNING, LogReader, LogRecord
from echo.waiting import Watch

log = structlog.get_logger("fleet")

_POLL_S = 0.2
# Grants move a little with every heartbeat; at 100 producers one message a second carries them all.
_PROGRESS_EVERY_S = 1.0
# Kafka confirms a commit before it shows it, and a node that is killed in between shows it only once the next transaction has
# begun. So there is always a next one: else producers may wait for a policy that the trainer waits to see sampled.
_REPEAT_EVERY_S = 5.0


class FleetListener:
    """send_progress: sends a control message with the grants that it is given for its sequence number (`take_grants`); called
    by this thread only, when grants changed, and every few seconds where they did not.

    agreement: what producers must have alike (`echo.agreement`). partitions, topic_id: of the topic, as they are now; asked
    again and again. waiting_s: how often a wait for it speaks.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        reader: LogReader,
        topic: str,
        send_progress: Callable[[Callable[[int], Mapping[str, Grant]]], None],
        agreement: Mapping[str, str] = MappingProxyType({}),
        partitions: Callable[[], int] = lambda: 1,
        topic_id: Callable[[], str] = lambda: "",
        waiting_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._reader = reader
        self.topic = topic
        self._send_progress = send_progress
        self._agreement = agreement
        # Incarnations that were reported as disagreeing.
        self._disagreeing: set[str] = set()
        self._partitions = partitions
        self._topic_id = topic_id
        self._clock = clock
        self._assigned = 0
        self._read_id = ""
        self._lost = ""
        self._watch = Watch(f"topic {topic}", lambda: self._lost, limit_s=waiting_s, clock=clock)
        self._lock = threading.Lock()
        self._sent: Mapping[str, Grant] = {}
        self._sent_at = float("-inf")
        self._current = False
        self._listening = Background("fleet-listener", self._run)

    def start(self) -> None:
        self._begin()
        self._listening.start()

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        self._listening.check()

    def close(self) -> None:
        self._listening.stop(30)
        self._reader.close()

    @property
    def last_error(self) -> str:
        """Why heartbeats can't be read at the moment; "" when all is well."""
        return self._lost or self._reader.last_error

    def write_off(self, held: Mapping[str, int], idle_s: float) -> None:
        """See `Fleet.write_off`: what was found is logged, and the next grants carry it."""
        with self._lock:
            found = self._fleet.write_off(held, idle_s)
        for incarnation, groups in found.items():
            log.warning(
                "groups were published and are not in the log any more: they hold no room from now on",
                producer=incarnation,
                groups=groups,
            )

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

    def _begin(self) -> None:
        """Read the topic as it is now from its beginning."""
        self._read_id, self._assigned = self._topic_id(), self._partitions()
        self._current = False
        self._reader.assign({(self.topic, number): BEGINNING for number in range(self._assigned)})

    def _read(self) -> list[LogRecord]:
        if (self._topic_id(), self._partitions()) != (self._read_id, self._assigned):
            self._begin()
        try:
            records = self._reader.read(1000, _POLL_S)
        except (UnknownTopicError, NoSuchOffsetError) as error:
            self._lost = str(error)
            self._watch.check()
            self._listening.stopping.wait(_POLL_S)
            self._begin()
            return []
        if records or self._reader.at_end():
            self._lost = ""
            self._watch.progress()
        return records

    def _turn(self) -> None:
        for record in self._read():
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
