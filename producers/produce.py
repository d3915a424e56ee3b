"""The loop of `echo-produce`: prompts in, scored trajectories with version spans out, while the window allows it.

    echo-produce run.yaml          sample for the run until it ends, or until SIGTERM

Refuses to sample what would be dropped: no group begins above the granted window, or under a policy that would be stale at
birth. Refuses to know brokers, HTTP, engines or tasks by name: it is handed its collaborators (`wiring` makes the real
ones). It ends in order: the running batch is finished and published, acknowledged, and the leaving heartbeat sent.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from echo import trajectory
from echo.agreement import agreement
from echo.config import RunConfig
from echo.control import Heartbeat, Request
from echo.errors import AgreementError, BrokerError, EchoError, EngineError, TaskError
from echo.metrics import ProducerMetrics
from echo.sequential import mix_seed
from echo.topic_watch import TopicWatch
from echo.waiting import Watch
from echo.weights.clock import Difference
from producers import rollout
from producers.collaborators import Collaborators, Stop
from producers.engines.base import Completion, Policy
from producers.heartbeat import HeartbeatSender
from producers.policy import ControlState, PolicyListener, PolicyPuller
from producers.prompts import LeftOut, Made, PromptMaker, PromptSource, SharedTokenizer
from producers.publisher import Publisher
from producers.requests import Refresher, RequestListener
from producers.rollout import Stamp, Timed, Work
from producers.tasks.base import Score
from producers.window import Window

log = structlog.get_logger("produce")

# Between looks at the stop signal; what the control topic and the puller report ends a wait at once.
_SLICE_S = 0.2
_LEAVE_S = 5.0
# Clocks of hosts with a time service differ by milliseconds.
_CLOCKS_DIFFER_S = 1.0

T = TypeVar("T")


def new_incarnation(producer_id: str) -> str:
    """One life of a producer: its id with a random suffix, so that ids never repeat across restarts."""
    return f"{producer_id}-{secrets.token_hex(4)}"


class ProduceLoop:
    """One incarnation of a producer.

    stop: asks for a planned stop. metrics_url: told in heartbeats. clock: seconds since the epoch.
    """

    def __init__(
        self,
        run: RunConfig,
        producer_id: str,
        collaborators: Collaborators,
        *,
        metrics: ProducerMetrics,
        stop: Stop,
        metrics_url: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run = run
        self._producer_id = producer_id
        self.incarnation = new_incarnation(producer_id)
        self._with = collaborators
        self._engine = collaborators.engine
        self._metrics = metrics
        self._stop = stop
        self._metrics_url = metrics_url
        # A folder's place differs from host to host, and is nobody's business.
        self._model = Path(run.model.path).name if Path(run.model.path).is_dir() else run.model.path
        self._clock = clock
        self._window = Window(run.max_staleness, run.learner.publish_every)
        self._tokenizer = SharedTokenizer(collaborators.tokenizer)
        self._maker = PromptMaker(
            collaborators.task,
            self._tokenizer,
            limits=self._engine.limits,
            max_tokens=run.sampling.max_tokens,
            left_out=self._count_left_out,
        )
        self.state = "starting"
        self._serving = -1
        self._taken: Policy | None = None
        self._began = 0.0
        self._calls = self._groups = self._sequence = self._tokens = 0
        self._busy_seconds = 0.0
        self._clocks_differ = False
        changed = threading.Condition()
        limits = run.limits
        self._agreement = agreement(run, collaborators.model)
        asked = ("requests",) if run.mode == "sequential" else ()
        self._topics = TopicWatch(
            collaborators.topic_states,
            collaborators.topics,
            ("trajectories", "control", "heartbeats", *asked),
            waiting_s=limits.waiting_s,
            patience_s=run.broker.timeout_s,
        )
        self._listener = PolicyListener(
            collaborators.open_reader,
            collaborators.topics.control,
            run_id=run.run_id,
            incarnation=self.incarnation,
            changed=changed,
            waiting_s=limits.waiting_s,
            agreement=self._agreement,
        )
        self._puller = PolicyPuller(
            self._listener,
            collaborators.weights,
            metrics=metrics,
            max_staleness=run.staleness_bound,
            deadline_s=run.weights.pull_deadline_s,
            on_request=run.mode == "sequential",
        )
        self._prompts = PromptSource(collaborators.task.name, changed=changed)
        # The request that prompts are made for.
        self._asked: Request | None = None
        self._refresher = Refresher(self._puller, self._engine, self._swap, always=run.refresh == "always")
        self._requests = None
        if run.mode == "sequential":
            self._requests = RequestListener(
                collaborators.open_reader,
                collaborators.topics.requests,
                lambda: self._topics.partitions(collaborators.topics.requests),
                run_id=run.run_id,
                incarnation=self.incarnation,
                changed=changed,
            )
        self._publisher = Publisher(
            collaborators.producer,
            collaborators.topics.trajectories,
            metrics=metrics,
            queue_bytes=run.producer.queue_bytes,
            record_bytes=limits.record_bytes,
            flush_timeout_s=run.producer.flush_timeout_s,
            waiting_s=limits.waiting_s,
            stopping=stop.is_set,
            check_topic=partial(self._topics.check, collaborators.topics.trajectories),
        )
        self._heartbeat = HeartbeatSender(
            collaborators.producer, collaborators.topics.heartbeats, self._status, every_s=run.producer.heartbeat_s
        )

    def run(self) -> str:
        """Sample until the run ends or a stop is asked for; says which.

        What was sampled is then acknowledged by the broker. Raises EchoError where that, or anything before, failed.
        """
        self._began = self._clock()
        self._topics.start()
        self._listener.start()
        self._puller.start()
        self._prompts.start()
        if self._requests is not None:
            self._requests.start()
        else:
            seed = mix_seed(self._run.task.seed, self.incarnation)
            self._prompts.begin(self._maker.stream(seed), ahead=self._run.producer.groups_per_call)
        self._heartbeat.start()
        log.info("producer started", run=self._run.run_id, incarnation=self.incarnation, engine=self._engine.identity)
        try:
            reason = self._sample_until_told()
            self._say("draining")
            self._publisher.flush(self._run.producer.flush_timeout_s)
        except BrokerError as error:
            self._save_what_was_sent()
            self._topics.blame(error)
        except EchoError:
            self._save_what_was_sent()
            raise
        finally:
            self._close()
        log.info(
            "producer ended",
            reason=reason,
            groups=self._publisher.groups_acknowledged,
            records=self._publisher.acknowledged,
            failed=self._publisher.failed,
        )
        return reason

    def _sample_until_told(self) -> str:
        requests = self._requests
        while (reason := self._told_to_end(self._listener.state)) is None:
            if requests is not None:
                self._answer_one(requests)
            elif prompts := self._wait_for("room and prompts to sample", self._look_for_work, self._explain_room):
                self._say("sampling")
                self._sample(self._own_work(prompts))
        return reason

    def _answer_one(self, requests: RequestListener) -> None:
        """Wait for a request and answer it; or do nothing when told to end."""
        try:
            found = self._wait_for("a request", lambda: self._look_for_request(requests), self._explain_request)
            if found is None:
                return
            request, prompts = found
            self._say("sampling")
            # Nothing is taken in mid-generation: what was asked for is of one version.
            whole = self._sample(rollout.requested(request, self._run.sampling, prompts), in_flight=False)
        except (EngineError, TaskError) as error:
            # The trainer must know that it may be these groups that producers end of: our last heartbeat says so.
            if self._asked is not None:
                requests.give_up(self._asked, f"{type(error).__name__}: {error}")
            raise
        self._asked = None
        if whole:
            requests.answered(request)
        else:
            requests.give_up(request, self._publisher.last_given_up)
            self._heartbeat.changed(now=True)

    def _told_to_end(self, state: ControlState) -> str | None:
        if self._stop.is_set():
            return "a stop was asked for"
        if state.end is not None:
            return f"the run ended: {state.end.reason}"
        return None

    def _wait_for(self, what: str, look: Callable[[], T | None], explain: Callable[[], str]) -> T | None:
        """What `look` gives as soon as that is something; None when told to end."""
        watch = Watch(what, explain, limit_s=self._run.limits.waiting_s)
        with self._phase("wait"):
            while True:
                self._check()
                before = self._heard()
                if self._told_to_end(before[0]) is not None:
                    return None
                self._check_agreement(before[0])
                found = look()
                if found is not None:
                    return found
                with self._listener.changed:
                    if self._heard() == before:
                        self._listener.changed.wait(_SLICE_S)
                watch.check()

    def _check(self) -> None:
        """Raise what ended any part of this process that works in the background, or the loss of a topic."""
        self._topics.check()
        self._listener.check()
        self._puller.check()
        self._publisher.check()
        self._heartbeat.check()
        self._prompts.check()
        self._with.weights.check()
        if self._requests is not None:
            self._requests.check()

    def _check_agreement(self, state: ControlState) -> None:
        """Raise AgreementError if the living trainer has otherwise what must be alike.

        An older message may be of a trainer that was started again since, with another run file: its next one decides.
        """
        if state.disagreement and state.is_live:
            raise AgreementError(
                f"the trainer of run {self._run.run_id} and this producer don't agree ({state.disagreement}): give both the "
                "same run file and model, and start this producer again"
            )

    def _heard(self) -> tuple[ControlState, tuple[Request, ...], bool, int]:
        held = self._requests.held if self._requests is not None else ()
        # Whether a policy waits, and not that one does: in sequential mode it may wait for a request that never comes.
        return self._listener.state, held, self._puller.has_policy, self._prompts.ready

    def _look_for_work(self) -> list[Made] | None:
        """The prompts of groups that may begin now, at least one."""
        self._swap(self._puller.take_policy())
        room = self._room(self._listener.state)
        if room <= 0:
            self._say("waiting for a policy" if self._serving < 0 else "waiting for the window or a newer policy")
            return None
        prompts = self._prompts.take(min(room, self._run.producer.groups_per_call))
        if prompts is None:
            self._say("waiting for the task's prompts")
        return prompts

    def _look_for_request(self, requests: RequestListener) -> tuple[Request, list[Made]] | None:
        """The oldest request that may be sampled now, under exactly the version that it names, and its prompts."""
        announced = self._listener.state.announcement
        if announced is not None:
            self._metrics.announced_version.set(announced.version)
            # Their step is over, or their trainer: a newer one does not want them.
            requests.give_up_before(announced.version)
        held = requests.held
        groups = sum(len(one.group_ids) for one in held)
        self._metrics.window.set(groups)
        self._metrics.outstanding.set(groups)
        request = held[0] if held else None
        known = (
            not self._listener.state.disagreement
            and request is not None
            and announced is not None
            and request.version == announced.version
        )
        if request is not None and request is not self._asked:
            # They are made while the policy is pulled.
            self._asked = request
            places = range(request.first_prompt, request.first_prompt + len(request.group_ids))
            self._prompts.begin(self._maker.asked(self._run.task.seed, places), ahead=len(places))
        if request is None or not known or not self._refresher.is_fresh(request):
            self._say("waiting for a request" if request is None else "waiting for a policy")
            return None
        prompts = self._prompts.take(len(request.group_ids))
        if prompts is None:
            self._say("waiting for the task's prompts")
            return None
        return request, prompts

    def _room(self, state: ControlState) -> int:
        self._window.granted(state.grant, state.sequence)
        self._metrics.window.set(self._window.grant.window)
        self._metrics.outstanding.set(self._window.outstanding)
        if state.announcement is None or state.disagreement:
            return 0
        self._metrics.announced_version.set(state.announcement.version)
        return self._window.room(state.announcement.version, self._engine.policy_version)

    def _explain_room(self) -> str:
        state = self._listener.state
        if state.announcement is None:
            return self._explain_silence()
        if state.disagreement:
            return self._explain_disagreement(state)
        if self.state == "waiting for the task's prompts":
            return self._prompts.describe()
        text = (
            f"newest announced {state.announcement.version}, serving {self._serving}, S = {self._run.max_staleness}; "
            f"window {self._window.grant.window}, {self._window.started} groups begun, {self._window.grant.resolved} resolved"
        )
        return self._with_errors(text)

    def _explain_request(self) -> str:
        announced, held = self._listener.state.announcement, self._requests.held if self._requests is not None else ()
        if announced is None:
            return self._explain_silence()
        if self._listener.state.disagreement:
            return self._explain_disagreement(self._listener.state)
        text = f"newest announced {announced.version}, serving {self._serving}"
        if self.state == "waiting for the task's prompts":
            text = f"{self._prompts.describe()}; {text}"
        if held:
            groups = f"{len(held[0].group_ids)} groups of step {held[0].step}"
            text = f"{groups} are asked for of version {held[0].version}, {len(held)} requests in hand; {text}"
        else:
            text = f"{self.incarnation} is asked for nothing on {self._with.topics.requests}; {text}"
        return self._with_errors(text)

    def _explain_disagreement(self, state: ControlState) -> str:
        return (
            f"the last trainer of run {self._run.run_id} had other values ({state.disagreement}); "
            "nothing has come from it since this producer started: is it running, and with this run file?"
        )

    def _explain_silence(self) -> str:
        return self._with_errors(
            f"no policy of run {self._run.run_id} is announced on {self._with.topics.control}: is its trainer running?"
        )

    def _with_errors(self, text: str) -> str:
        """The line of a wait, with what may be why it lasts."""
        listening = self._listener.last_error or (self._requests.last_error if self._requests is not None else "")
        listening = f"the client's last error: {listening}" if listening else ""
        return "; ".join(part for part in (text, self._puller.last_error, self._topics.describe(), listening) if part)

    def _swap(self, policy: Policy | None) -> None:
        """Between batches: load a policy, if there is one."""
        if policy is None:
            return
        started = time.perf_counter()
        served = self._engine.policy_version
        try:
            with self._phase("swap"):
                self._engine.load(policy)
        except EngineError as error:
            if self._engine.policy_version < 0 <= served:
                # It serves nothing any more, and a newer policy need not come: the trainer may wait for our samples.
                raise
            self._refuse(policy, error)
        else:
            self._metrics.swap_seconds.observe(time.perf_counter() - started)
        self._note_serving()

    def _take_policy(self) -> Policy | None:
        """What the engine asks for at its safe points."""
        self._note_serving()
        policy = self._puller.take_policy()
        if policy is not None:
            self._taken = policy
        return policy

    def _refuse(self, policy: Policy, error: EngineError) -> None:
        self._puller.refused(policy, str(error))
        self._heartbeat.changed(now=True)

    def _note_serving(self) -> None:
        """Tell when the engine's version has changed. Called from the engine's thread only, at its safe points."""
        version = self._engine.policy_version
        if version == self._serving:
            return
        self._serving = version
        if version >= 0:
            log.info("policy serves", version=version)
            self._metrics.serving_version.set(version)
            announced = self._listener.state.announcement
            clocks = self._with.weights.clock_difference()
            if announced is not None and announced.version == version and clocks is not None:
                self._note_delay(announced.created, clocks)
        self._heartbeat.changed(now=True)

    def _note_delay(self, created: float, clocks: Difference) -> None:
        """How long an announcement took to serve. created: by the trainer's clock, for which the weight server's stands."""
        self._metrics.clock_difference.labels(self._run.run_id, self._producer_id).set(clocks.seconds)
        if not self._clocks_differ and abs(clocks.seconds) > _CLOCKS_DIFFER_S + clocks.within_s:
            self._clocks_differ = True
            log.warning(
                "the weight server's clock differs from this host's: times of both compare badly, run a time service",
                ahead_s=round(clocks.seconds, 3),
                within_s=round(clocks.within_s, 3),
            )
        # What was announced before we lived says nothing about our own speed.
        if (announced_at := created - clocks.seconds) >= self._began:
            self._metrics.announce_to_serving_seconds.observe(max(0.0, self._clock() - announced_at))

    def _own_work(self, prompts: Sequence[Made]) -> Work:
        """The next groups of this incarnation's own stream of prompts."""
        ids = [trajectory.group_id(self._run.run_id, self.incarnation, self._groups + index) for index in range(len(prompts))]
        self._groups += len(prompts)
        seed = self._run.producer.seed
        self._calls += 1
        drawn = secrets.randbits(63) if seed is None else mix_seed(seed, self._producer_id, self._calls)
        return Work(prompts, ids, rollout.sampling_of(self._run.sampling, drawn))

    def _sample(self, work: Work, *, in_flight: bool = True) -> bool:
        """Sample, score and publish a work's groups; whether all of them went out.

        in_flight: the engine may take a newer policy between two tokens.
        """
        groups = len(work.prompts)
        self._window.begin(groups)
        self._metrics.groups.inc(groups)
        started_at = self._clock()
        self._taken = None
        try:
            with self._phase("sample"):
                repeated = rollout.repeated(work.prompts, self._run.sampling.group_size)
                take_policy = self._take_policy if in_flight else None
                completions = self._engine.generate(repeated, work.sampling, take_policy=take_policy)
        except EngineError as error:
            self._note_serving()
            if self._taken is None or self._engine.policy_version in (self._taken.version, -1):
                raise
            # It could not load what it took; the groups begin anew under the policy that serves.
            self._window.give_up(groups)
            self._refuse(self._taken, error)
            return False
        self._note_serving()
        sampled = Timed(completions, started_at, self._clock())
        with self._phase("score"):
            scores = self._score(work.prompts, completions)
        with self._phase("publish"):
            sent = [self._publish(index, work, sampled, scores) for index in range(groups)]
        return all(sent)

    def _publish(self, index: int, work: Work, sampled: Timed, scores: Sequence[Score]) -> bool:
        stamp = Stamp(
            run_id=self._run.run_id,
            producer_id=self._producer_id,
            incarnation=self.incarnation,
            task=self._with.task.name,
            engine=self._engine.identity,
            model=self._model,
            logprob_dtype=self._run.producer.logprob_dtype,
        )
        group = rollout.group(index, work, sampled, scores, stamp, self._sequence)
        if not self._publisher.publish(group):
            self._window.give_up(1)
            return False
        # Counted on only when the group is published: a gap in the sequence means a lost record.
        self._sequence += len(group)
        return True

    def _score(self, prompts: Sequence[Made], completions: Sequence[Completion]) -> list[Score]:
        scores = self._with.scorer.score(rollout.to_score(self._tokenizer, prompts, completions))
        for score in scores:
            self._metrics.scorings.labels(self._metrics.run_id, self._metrics.producer_id, score.outcome).inc()
        self._metrics.reward_mean.set(sum(score.reward for score in scores) / len(scores))
        for one in completions:
            self._metrics.completion_tokens.observe(len(one.token_ids))
        tokens = sum(len(one.token_ids) for one in completions)
        self._metrics.trajectories.inc(len(completions))
        self._metrics.tokens.inc(tokens)
        self._tokens += tokens
        return scores

    def _count_left_out(self, prompt: LeftOut) -> None:
        self._metrics.prompts_left_out.labels(self._metrics.run_id, self._metrics.producer_id, prompt.reason).inc()

    def _status(self, sequence: int, leaving: bool) -> Heartbeat:
        announced = self._listener.state.announcement
        # Before `started` is read: groups that the loop begins in between are then counted, and never left out.
        control_sequence, granted_limit = self._window.sequence, self._window.limit
        return Heartbeat(
            run_id=self._run.run_id,
            producer_id=self._producer_id,
            incarnation=self.incarnation,
            sequence=sequence,
            state="leaving" if leaving else self.state,
            serving=self._engine.policy_version,
            announced=announced.version if announced is not None else -1,
            control_sequence=control_sequence,
            granted_limit=granted_limit,
            groups_started=self._window.started,
            groups_published=self._publisher.groups_acknowledged,
            trajectories=self._sequence,
            tokens=self._tokens,
            busy_seconds=self._busy_seconds,
            pulls=self._puller.pulls,
            failed_pulls=self._puller.failed_pulls,
            last_pull_error=self._puller.last_error,
            queued_bytes=self._publisher.queued_bytes,
            requests_held=len(self._requests.held) if self._requests is not None else 0,
            given_up=self._requests.given_up if self._requests is not None else {},
            leaving=leaving,
            metrics_url=self._metrics_url,
            created=self._clock(),
            agreement=self._agreement,
        )

    def _say(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._heartbeat.changed()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            if name != "wait":
                self._busy_seconds += seconds
            self._metrics.phase_seconds.labels(self._metrics.run_id, self._metrics.producer_id, name).inc(seconds)

    def _save_what_was_sent(self) -> None:
        """After a failure: what was handed over before it still counts, if the broker takes it."""
        self.state = "failed"
        try:
            self._publisher.flush(self._run.producer.flush_timeout_s)
        except EchoError as error:
            log.error("not all that was sampled is acknowledged", error=str(error))

    def _close(self) -> None:
        self._puller.close()
        self._listener.close()
        if self._requests is not None:
            self._requests.close()
        self._prompts.close()
        self._heartbeat.close()
        left = self._with.producer.flush(_LEAVE_S)
        if left:
            log.warning("stopped with unsent messages", records=left)
        self._publisher.close()
        self._topics.close()
