"""The run's topics while it runs: grown, gone, or made anew. A thread beside the loop of either side looks every few seconds.

Never creates or changes a topic. Clients of the log notice none of this by themselves: the reader of a deleted topic reads
nothing, in silence, and nobody reads a new partition. What the look finds:

    more partitions          `partitions` gives the new number, and readers begin to read the new ones
    trajectories, control,   deleted or made anew: `check` raises a TopicError with the remedy, on both sides alike
    requests
    heartbeats, dead_letter  deleted: nothing that a run rests on is in them, so it waits aloud until `echo-topics apply` has
                             made them again; `topic_id` shows to a reader that it must begin anew
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import structlog

from echo.asking import ask_again
from echo.background import Background
from echo.errors import BrokerError, FencedError, OtherClusterError, TopicError
from echo.log import TopicState
from echo.topic_spec import TopicNames
from echo.waiting import Watch

log = structlog.get_logger("topics")

LOOK_EVERY_S = 5.0
# A broker that has just started may not know a topic yet.
GONE_AFTER_S = 10.0
_ASK_S = 5.0
# So long a topic that was just made may be unknown to the broker that is asked.
_START_S = 3.0

_REMEDIES = {
    "trajectories": (
        "the records that it held are gone. `echo-topics apply` makes the topic if it is missing; then start the trainer with "
        "`--accept-lost`, which keeps what was learned, and the producers again"
    ),
    "control": (
        "announcements and grants are gone. `echo-topics apply` makes the topic if it is missing; then start the trainer, "
        "which resumes from its last checkpoint, and the producers again"
    ),
    "requests": (
        "requests are gone. `echo-topics apply` makes the topic if it is missing; then start the trainer, which resumes from "
        "its last checkpoint, and the producers again"
    ),
}

Ask = Callable[[Iterable[str], float], Mapping[str, TopicState]]


def _all_of(ask: Ask, names: Iterable[str]) -> dict[str, TopicState]:
    deadline = time.monotonic() + _START_S
    while missing := sorted(set(names) - (found := ask(names, _ASK_S)).keys()):
        if time.monotonic() >= deadline:
            raise TopicError(f"topic {missing[0]} does not exist: `echo-topics apply` makes it")
        time.sleep(0.1)
    return dict(found)


class TopicWatch:
    """See the module. Thread safe.

    ask: those of the named topics that exist (`LogAdmin.topics`). roles: which topics to look at, by the field of `names`.
    waiting_s: how often a topic that the run waits for is named. patience_s: how long the broker may take for the first answer.
    Making one looks at the topics as they are now. Raises BrokerError without an answer, TopicError if one is missing.
    """

    def __init__(
        self,
        ask: Ask,
        names: TopicNames,
        roles: Iterable[str],
        *,
        waiting_s: float = 30.0,
        patience_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._roles = {getattr(names, role): role for role in roles}
        self._clock = clock
        self._known = ask_again(
            lambda: _all_of(ask, self._roles), "the run's topics", patience_s=patience_s, waiting_s=waiting_s
        )
        # Replaced, never changed: other threads read it.
        self._absent_since: Mapping[str, float] = {}
        self._looking = threading.Lock()
        self._lost: dict[str, TopicError] = {}
        self._watch = Watch("topics", self.describe, limit_s=waiting_s, clock=clock)
        self._looks = Background("topic-watch", self._run)

    def start(self) -> "TopicWatch":
        self._looks.start()
        return self

    def close(self) -> None:
        self._looks.stop(2 * _ASK_S)

    def partitions(self, topic: str) -> int:
        """How many it has, as the last look showed; never fewer than before."""
        return self._known[topic].partitions

    def state(self, topic: str) -> TopicState:
        """The topic as the last look showed it."""
        return self._known[topic]

    def topic_id(self, topic: str) -> str:
        """Another one than before: the topic was made anew, and is read from its beginning."""
        return self._known[topic].id

    def check(self, topic: str | None = None) -> None:
        """Raise TopicError if a topic that the run rests on is lost (this one, or any): neither side can go on."""
        for name, error in list(self._lost.items()):
            if topic in (None, name):
                raise error
        self._looks.check()

    def blame(self, error: BrokerError) -> NoReturn:
        """Raise the TopicError that explains a client's error, if a look at the topics shows one; else the error itself."""
        if not isinstance(error, FencedError | OtherClusterError):
            try:
                self._look(gone_after_s=0.0)
            except BrokerError:
                raise error from None
            for verdict in self._lost.values():
                raise TopicError(f"{verdict} [{error}]") from None
        raise error

    def describe(self) -> str:
        """Which topics are waited for, and what to do; "" if there is none."""
        absent = sorted(self._absent_since)
        if not absent:
            return ""
        return "; ".join(f"topic {name} does not exist any more: `echo-topics apply` makes it again" for name in absent)

    def _run(self) -> None:
        while not self._looks.stopping.wait(LOOK_EVERY_S):
            self.turn()

    def turn(self) -> None:
        """One look, as the thread does it."""
        try:
            self._look(gone_after_s=GONE_AFTER_S)
        except BrokerError as error:
            # Readers and writers notice a broker that is away, and report it.
            log.debug("no look at the topics", error=str(error))
            return
        if self._absent_since:
            self._watch.check()
        else:
            self._watch.progress()

    def _look(self, *, gone_after_s: float) -> None:
        with self._looking:
            found = self._ask(self._roles, _ASK_S)
            now = self._clock()
            self._absent_since = {name: self._absent_since.get(name, now) for name in self._roles if name not in found}
            for name, since in self._absent_since.items():
                role = self._roles[name]
                if role in _REMEDIES and now - since >= gone_after_s:
                    self._lose(name, f"was deleted in mid-run: {_REMEDIES[role]}")
            for name, state in found.items():
                self._compare(name, self._roles[name], state)

    def _compare(self, name: str, role: str, state: TopicState) -> None:
        known = self._known[name]
        if state.id != known.id:
            if role in _REMEDIES:
                self._lose(name, f"was deleted and made anew in mid-run: {_REMEDIES[role]}")
                return
            log.warning("topic was made anew, it is used from its beginning", topic=name)
        elif state.partitions <= known.partitions:
            return
        elif role == "control":
            self._lose(
                name,
                f"has {state.partitions} partitions instead of 1, and readers would see no one order; partitions "
                "can't be taken away: end the run's processes, delete this topic, `echo-topics apply` makes it again",
            )
            return
        else:
            log.info("topic has more partitions", topic=name, before=known.partitions, now=state.partitions)
        self._known[name] = state

    def _lose(self, name: str, what: str) -> None:
        self._lost.setdefault(name, TopicError(f"topic {name} {what}"))
