"""Which policy to sample from: hears announcements on the control topic, pulls the newest one's weights, offers them.

Refuses to touch the engine: verified weights wait in a slot until the engine takes them, and what is served is what the
engine says. Never pulls a backlog of versions one by one, and never acts on a message of another run.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import structlog

from echo import control
from echo.agreement import differences
from echo.background import Background
from echo.control import Announcement, EndOfRun, Grant
from echo.errors import ControlError, PullCancelled, WeightsError
from echo.log import LogReader, LogRecord
from echo.metrics import ProducerMetrics
from echo.staleness import is_stale
from echo.waiting import Watch
from producers.engines.base import Policy
from producers.fetch import Fetcher, PullClient
from producers.topic_follower import TopicFollower

log = structlog.get_logger("policy")

_CLOSE_S = 5.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 15.0


@dataclass(frozen=True)
class ControlState:
    """What the control topic says about our run up to here.

    announcement: the newest policy. sequence: number of the last message that carries grants, -1 before the first.
    grant: what it granted our incarnation, None where it does not name us.
    end: the end of the run, unless it was resumed after it.
    disagreement: what the trainer of the last such message has otherwise than we, and where the message stands; "" if nothing.
    is_live: whether it stands in a message that came in our life, so from a trainer that lives.
    """

    announcement: Announcement | None = None
    sequence: int = -1
    grant: Grant | None = None
    end: EndOfRun | None = None
    disagreement: str = ""
    is_live: bool = False


class PolicyListener:
    """Reads the control topic from its beginning and for ever, in a thread of its own.

    Nothing is told before the first end of the log was reached, so that a late joiner never acts on an old announcement or
    on the end of a run that was resumed since. `changed` is notified at every change, and is there to be waited on.
    agreement: what the trainer must have alike (`echo.agreement`).
    """

    def __init__(
        self,
        open_reader: Callable[[], LogReader],
        topic: str,
        *,
        run_id: str,
        incarnation: str,
        changed: threading.Condition | None = None,
        waiting_s: float = 30.0,
        agreement: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._agreement = agreement
        self.changed = changed or threading.Condition()
        self._follower = TopicFollower(
            open_reader, topic, lambda: 1, self._take_all, changed=self.changed, name="policy-listener"
        )
        self._run_id = run_id
        self._incarnation = incarnation
        self._read = ControlState()
        self._told = ControlState()
        self._records = 0
        self._caught_up = False
        self._watch = Watch(f"the end of topic {topic}", self._explain, limit_s=waiting_s)

    def start(self) -> "PolicyListener":
        self._follower.start()
        return self

    @property
    def state(self) -> ControlState:
        with self.changed:
            return self._told

    @property
    def last_error(self) -> str:
        """See `TopicFollower.last_error`."""
        return self._follower.last_error

    def check(self) -> None:
        """Raise what ended the listening, if anything did."""
        self._follower.check()

    def close(self) -> None:
        self._follower.close()

    def _explain(self) -> str:
        text = f"{self._records} records read"
        return f"{text}; the client's last error: {self.last_error}" if self.last_error else text

    def _take_all(self, records: list[LogRecord], at_end: bool) -> None:
        for record in records:
            self._records += 1
            self._take(record)
        self._caught_up = self._caught_up or at_end
        if not self._caught_up:
            self._watch.check()
            return
        self._watch.progress()
        # The end of a run counts only where nothing comes after it in the log.
        told = self._read if at_end else replace(self._read, end=self._told.end if self._read.end is not None else None)
        with self.changed:
            if told != self._told:
                self._told = told
                self.changed.notify_all()

    def _take(self, record: LogRecord) -> None:
        try:
            message = control.decode_control(record.value, record.where)
        except ControlError as error:
            log.warning("control message skipped", error=str(error))
            return
        if message.run_id != self._run_id:
            return
        state = self._read
        if isinstance(message, EndOfRun):
            self._read = replace(state, end=message)
            return
        # One partition and one fenced writer: the log's order is the order. Each message names every grant in force.
        grant = message.grants.get(self._incarnation)
        found = "; ".join(differences(message.agreement, self._agreement))
        disagreement = f"{record.where}: {found}" if found else ""
        state = replace(
            state, sequence=message.sequence, grant=grant, disagreement=disagreement, is_live=bool(found) and self._caught_up
        )
        if isinstance(message, Announcement):
            newest = state.announcement
            higher = newest is None or message.version > newest.version
            state = replace(state, announcement=message if higher else newest, end=None)
        self._read = state


class PolicyPuller:
    """Pulls the newest announced policy in a thread of its own and keeps it until the engine takes it.

    A newer announcement cancels a running pull, unless that would starve the engine: after one cancelled pull the
    next is finished, as long as what it pulls could still be sampled from (`max_staleness`). A failed pull is counted,
    told by `last_error`, and tried again after a growing, jittered wait that a newer announcement ends.

    on_request: pull nothing before `refresh` asks for it (sequential mode).
    """

    def __init__(
        self,
        listener: PolicyListener,
        client: PullClient,
        *,
        metrics: ProducerMetrics,
        max_staleness: int,
        deadline_s: float,
        first_retry_s: float = _FIRST_RETRY_S,
        on_request: bool = False,
    ) -> None:
        self._listener = listener
        self._changed = listener.changed
        self._fetcher = Fetcher(client, metrics=metrics, deadline_s=deadline_s)
        self._metrics = metrics
        self._max_staleness = max_staleness
        self._first_retry_s = first_retry_s
        self._slot: Policy | None = None
        # The newest version that was pulled: also where the engine refuses it, it is not pulled again.
        self._settled = -1
        self._finish_next = False
        self._on_request = on_request
        self._held_back = on_request
        self._refreshes = 0
        self._failures_in_row = 0
        self.pulls = 0
        self.failed_pulls = 0
        self.last_error = ""
        self._pulling = Background("policy-puller", self._run, wake=self._notify)

    def start(self) -> "PolicyPuller":
        self._pulling.start()
        return self

    def take_policy(self) -> Policy | None:
        """The verified policy that waits, if one does: an engine's `TakePolicy`. Each is given once."""
        # Asked at every token: no lock, the slot is one reference.
        if self._slot is None:
            return None
        with self._changed:
            policy, self._slot = self._slot, None
            return policy

    @property
    def has_policy(self) -> bool:
        return self._slot is not None

    def refresh(self) -> None:
        """Pull the newest announced policy now, also where it was pulled before: `take_policy` gives it, once it is there."""
        with self._changed:
            self._slot = None
            self._settled = -1
            self._held_back = False
            self._refreshes += 1
            self._changed.notify_all()

    def refused(self, policy: Policy, error: str) -> None:
        """The engine could not load it: the old version serves on, and this one is not pulled again."""
        log.error("the engine refused a policy", version=policy.version, error=error)
        with self._changed:
            self._fail(f"the engine refused version {policy.version}: {error}")

    def check(self) -> None:
        """Raise what ended the pulling, if anything did. A pull that fails does not end it."""
        self._pulling.check()

    def close(self) -> None:
        """Cancel a running pull and end the thread."""
        # A server that has gone silent in mid-read is not waited for: nothing of a pull outlives the process.
        self._pulling.stop(_CLOSE_S)

    @property
    def _closed(self) -> bool:
        return self._pulling.stopping.is_set()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and self._wanted() is None:
                    self._changed.wait()
                announcement, refreshes = self._wanted(), self._refreshes
                if self._closed or announcement is None:
                    return
            self._pull(announcement, refreshes)

    def _wanted(self) -> Announcement | None:
        if self._held_back:
            return None
        announcement = self._listener.state.announcement
        return announcement if announcement is not None and announcement.version > self._settled else None

    def _pull(self, announcement: Announcement, refreshes: int) -> None:
        version = announcement.version
        try:
            policy = self._fetcher.fetch(announcement, lambda: self._is_cancelled(version))
        except PullCancelled:
            with self._changed:
                self._finish_next = True
            self._count("superseded")
            return
        except WeightsError as error:
            with self._changed:
                self._fail(f"version {version} could not be pulled: {error}")
                self._wait_to_retry(version)
            return
        self._count("ok")
        with self._changed:
            self._slot = policy
            # Else it was asked anew meanwhile: what is newest now is still to be pulled.
            if refreshes == self._refreshes:
                self._settled = version
                self._held_back = self._on_request
            self._finish_next = False
            self._failures_in_row = 0
            self.pulls += 1
            self.last_error = ""
            self._changed.notify_all()

    def _is_cancelled(self, version: int) -> bool:
        """Whether pulling `version` has lost its point."""
        if self._closed:
            return True
        newest = self._listener.state.announcement
        if newest is None or newest.version <= version:
            return False
        return not self._finish_next or is_stale(newest.version, version, self._max_staleness)

    def _fail(self, error: str) -> None:
        self._failures_in_row += 1
        self.failed_pulls += 1
        self.last_error = error
        self._count("failed")
        log.warning("no new policy, the old one serves on", error=error)
        self._changed.notify_all()

    def _count(self, outcome: str) -> None:
        self._metrics.pulls.labels(self._metrics.run_id, self._metrics.producer_id, outcome).inc()

    def _wait_to_retry(self, version: int) -> None:
        """Wait with the lock held by the caller. A library's retry can't be ended by an announcement, this one is."""
        longest = min(_LAST_RETRY_S, self._first_retry_s * 2 ** min(self._failures_in_row - 1, 10))
        until = time.monotonic() + longest * random.uniform(0.5, 1.0)
        while not self._closed and (left := until - time.monotonic()) > 0:
            wanted = self._wanted()
            if wanted is not None and wanted.version > version:
                return
            self._changed.wait(left)
