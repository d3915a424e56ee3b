"""Sequential mode: which producer is asked for which call of a step, and what is asked of another in its stead. Pure.

Refuses I/O: it is told who lives and what has come, and gives the requests that are to be sent. What a call samples is fixed by
`echo.sequential`; whom it is asked of changes nothing but the time it takes.

Each call goes to the producer that would be done with it first, by its measured throughput and what it holds already, so that
groups are shared in proportion to throughput. What a dead producer holds is asked of another at once. A living one that
delivers nothing for `deadline_s` is slow: its calls are asked of others, too, and it gets new ones only where nobody else is
left, until it says that it has nothing in hand and its last pull was well. Both may answer: ids are the same, the second
answer is dropped as a duplicate. The deadline doubles with every issue of a call, so that one that is too short costs
a few calls and not the run.

A producer that can't answer (a record too large to send, a task that fails) says so in its heartbeats: its call is asked of
another at once, and after `MAX_ATTEMPTS` such words about one call the run ends. To be slow, dead or absent is no such word.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from consumers.fleet import GivenUp, ProducerStatus
from consumers.groups import Group
from consumers.ledger import Reason
from echo.control import Request
from echo.errors import EchoError
from echo.sequential import Call, calls_of_step, mix_seed, requested_group

# A group that was dropped, or given up, so often is not so by chance.
MAX_ATTEMPTS = 8
# A call's deadline doubles so often: its holders may die for days.
_MAX_DOUBLINGS = 16
# Of those that are missing, in a line for people.
_SHOWN_CALLS = 5


class UndeliverableGroupError(EchoError):
    """A requested group was dropped, or given up, again and again: the step can't be completed."""


class _Open:
    """A call of the present step and what is still missing of it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.attempts: Counter[int] = Counter()
        self.missing = set(call.prompts)
        self.holder: str | None = None
        self.former: str | None = None
        self.issues = 0
        self.since = 0.0
        self.request_id = ""
        self.given_up: list[GivenUp] = []


class Dispatcher:
    """One run's requests, step by step. Not thread safe.

    clock: seconds, for deadlines. wall_clock: seconds since the epoch, for what is sent.
    """

    def __init__(
        self,
        *,
        run_id: str,
        groups_per_step: int,
        groups_per_call: int,
        seed: int,
        deadline_s: float,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._run_id = run_id
        self._groups_per_step = groups_per_step
        self._groups_per_call = groups_per_call
        self._seed = seed
        self._deadline_s = deadline_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._step = self._version = -1
        self._calls: list[_Open] = []
        self._prompts: dict[str, int] = {}
        # Requests of this step that nobody has given up, by their ids.
        self._asked: dict[str, _Open] = {}
        # Slow producers: the heartbeat before which they were found to be.
        self._slow: dict[str, int] = {}

    def begin(self, step: int, version: int) -> None:
        """Ask for the groups of a step from now on. step: learner steps done before it. version: the newest announced."""
        self._step, self._version = step, version
        calls = calls_of_step(
            step, groups_per_step=self._groups_per_step, groups_per_call=self._groups_per_call, seed=self._seed
        )
        self._calls = [_Open(call) for call in calls]
        self._asked = {}
        self._prompts = {self._name(one, prompt): prompt for one in self._calls for prompt in one.call.prompts}

    def wanted(self) -> frozenset[str]:
        """Ids of the step's groups, delivered or not: what may be trained in it."""
        return frozenset(self._prompts)

    def missing(self) -> frozenset[str]:
        """Ids of the step's groups that were not delivered yet."""
        return frozenset(self._name(one, prompt) for one in self._calls for prompt in one.missing)

    def turn(
        self,
        producers: Sequence[ProducerStatus],
        *,
        ready: Collection[str],
        dropped: Mapping[str, Reason],
        given_up: Mapping[str, GivenUp] = MappingProxyType({}),
    ) -> list[Request]:
        """Requests to send now. producers: those alive. ready, dropped: what has become of `missing`.

        given_up: what was heard since the last turn, by request, also of those that are not alive any more.

        Raises UndeliverableGroupError.
        """
        now = self._clock()
        for one in self._calls:
            self._deliver(one, ready, now)
            self._replace(one, dropped)
        for request_id, word in given_up.items():
            self._give_back(request_id, word)
        alive = {producer.incarnation: producer for producer in producers}
        for one in self._calls:
            self._withdraw(one, alive, now)
        self._forgive(alive)
        waiting = [one for one in self._calls if one.missing and one.holder is None]
        return [self._issue(one, alive, now) for one in waiting] if alive else []

    def complete(self, batch: Sequence[Group]) -> list[Group]:
        """The step's batch was cut: nothing is missing any more. Its groups in the order of their prompts, for training."""
        for one in self._calls:
            one.missing.clear()
        return sorted(batch, key=lambda group: self._prompts[group.group_id])

    def held(self) -> dict[str, int]:
        """Groups that each producer was asked for and that are missing, by incarnation."""
        found: Counter[str] = Counter()
        for one in self._calls:
            if one.holder is not None:
                found[one.holder] += len(one.missing)
        return {name: groups for name, groups in found.items() if groups}

    def describe(self) -> str:
        """Which groups are missing, who was asked for them, for how long."""
        now = self._clock()
        open_calls = [one for one in self._calls if one.missing]
        missing = sum(len(one.missing) for one in open_calls)
        parts = []
        for one in open_calls[:_SHOWN_CALLS]:
            groups = f"{len(one.missing)} groups from prompt {min(one.missing)} on"
            times = f", asked for {one.issues} times" if one.issues > 1 else ""
            asked = f"at {one.holder} for {now - one.since:.0f} s{times}" if one.holder else "asked of nobody"
            last = f", given up {len(one.given_up)} times ({one.given_up[-1].why})" if one.given_up else ""
            parts.append(f"{groups} {asked}{last}")
        if len(open_calls) > _SHOWN_CALLS:
            parts.append(f"and {len(open_calls) - _SHOWN_CALLS} calls more")
        return f"step {self._step} lacks {missing} groups of version {self._version}: {'; '.join(parts)}"

    def _name(self, one: _Open, prompt: int) -> str:
        return requested_group(self._run_id, self._version, prompt, one.attempts[prompt])

    def _deliver(self, one: _Open, ready: Collection[str], now: float) -> None:
        came = {prompt for prompt in one.missing if self._name(one, prompt) in ready}
        if not came:
            return
        one.missing -= came
        # Who delivers a part is at work on the rest of what it holds.
        for other in self._calls:
            if other.holder == one.holder:
                other.since = now

    def _replace(self, one: _Open, dropped: Mapping[str, Reason]) -> None:
        """A dropped group's id is spent: ask for the same prompt anew, sampled otherwise."""
        for prompt in one.missing:
            name = self._name(one, prompt)
            if name not in dropped:
                continue
            one.attempts[prompt] += 1
            if one.attempts[prompt] >= MAX_ATTEMPTS:
                raise UndeliverableGroupError(
                    f"step {self._step} can't be completed: the group of prompt {prompt} was dropped {MAX_ATTEMPTS} times, the "
                    f"last time as {dropped[name].value}. too_large: lower sampling.max_tokens or raise batch.max_tokens; "
                    "incomplete_group: its records can't be read, see the dead letters; deadline: raise batch.group_deadline_s"
                )
            del self._prompts[name]
            self._prompts[self._name(one, prompt)] = prompt
            one.holder = None

    def _give_back(self, request_id: str, word: GivenUp) -> None:
        """Take a call back from who can't answer it. A word counts once, however often it is heard."""
        one = self._asked.pop(request_id, None)
        if one is None or not one.missing:
            return
        one.given_up.append(word)
        if len(one.given_up) >= MAX_ATTEMPTS:
            by = ", ".join(dict.fromkeys(word.producer for word in one.given_up))
            prompts = one.call.prompts
            raise UndeliverableGroupError(
                f"step {self._step} can't be completed: the call of prompts {prompts.start} to {prompts.stop - 1} was asked "
                f"for {one.issues} times and given up {MAX_ATTEMPTS} times, by {by}; the last time: {word.why}. Any producer "
                "samples the same for it: change what is named there, and look at the logs of these producers"
            )
        if one.request_id == request_id:
            one.former, one.holder = one.holder, None

    def _withdraw(self, one: _Open, alive: Mapping[str, ProducerStatus], now: float) -> None:
        """Take a call back from who is dead or slow."""
        holder = one.holder
        if holder is None or not one.missing:
            return
        if holder in alive:
            if now - one.since < self._deadline_s * 2 ** min(one.issues - 1, _MAX_DOUBLINGS):
                return
            self._slow[holder] = alive[holder].heartbeat
        one.former, one.holder = holder, None

    def _forgive(self, alive: Mapping[str, ProducerStatus]) -> None:
        for name, heartbeat in list(self._slow.items()):
            status = alive.get(name)
            if status is None or (status.heartbeat > heartbeat and not status.requests_held and not status.last_pull_error):
                del self._slow[name]

    def _issue(self, one: _Open, alive: Mapping[str, ProducerStatus], now: float) -> Request:
        held = self.held()
        known = [p.throughput for p in alive.values() if p.throughput > 0 and math.isfinite(p.throughput)]
        usual = sum(known) / len(known) if known else 1.0

        # It may be something about them: whoever did not try yet goes before.
        tried = {word.producer for word in one.given_up}

        def rank(name: str) -> tuple[bool, bool, bool, float, str]:
            rate = alive[name].throughput
            rate = rate if rate > 0 and math.isfinite(rate) else usual
            done_at = (held.get(name, 0) + len(one.call.prompts)) / rate
            return name in tried, name == one.former, name in self._slow, done_at, name

        holder = min(alive, key=rank)
        issue, one.issues = one.issues, one.issues + 1
        one.holder, one.since = holder, now
        attempt = max(one.attempts.values(), default=0)
        one.request_id = f"{self._run_id}/v{self._version}/s{self._step}/c{one.call.number}/{issue}"
        self._asked[one.request_id] = one
        return Request(
            run_id=self._run_id,
            request_id=one.request_id,
            producer=holder,
            version=self._version,
            step=self._step,
            first_prompt=one.call.prompts.start,
            group_ids=tuple(self._name(one, prompt) for prompt in one.call.prompts),
            seed=mix_seed(one.call.seed, attempt) if attempt else one.call.seed,
            issue=issue,
            created=self._wall_clock(),
        )
