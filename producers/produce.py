"""The loop of `echo-produce`: prompts in, scored trajectories with version spans out, while the window allows it.

    echo-produce run.yaml          sample for the run until it ends, or until SIGTERM

Refuses to sample what would be dropped: no group begins above the granted window, or under a policy that would be stale at
birth. Refuses to know brokers, HTTP, engines or tasks by name: it is handed its collaborators (`wiring` makes the real
ones). It ends in order: the running batch is finished and published, acknowledged, and the leaving heartbeat sent.
"""

import hashlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import structlog

from echo import trajectory
from echo.config import RunConfig
from echo.control import Heartbeat
from echo.errors import BrokerError, EchoError, EngineError, TaskError
from echo.metrics import ProducerMetrics
from echo.trajectory import Sampling, Trajectory
from echo.waiting import Watch
from producers.collaborators import Collaborators, Stop
from producers.engines.base import Completion, Policy
from producers.heartbeat import HeartbeatSender
from producers.policy import ControlState, PolicyListener, PolicyPuller
from producers.publisher import Publisher
from producers.tasks.base import Prompt, Score
from producers.window import Window

log = structlog.get_logger("produce")

# Between looks at the stop signal; what the control topic and the puller report ends a wait at once.
_SLICE_S = 0.2
_LEAVE_S = 5.0


def new_incarnation(producer_id: str) -> str:
    """One life of a producer: its id with a random suffix, so that ids never repeat across restarts."""
    return f"{producer_id}-{secrets.token_hex(4)}"


def mix_seed(*parts: object) -> int:
    """A 63-bit seed from any parts, the same on every host."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
        self._prompts = iter(collaborators.task.prompts(mix_seed(run.task.seed, self.incarnation)))
        self.state = "starting"
        self._serving = -1
        self._taken: Policy | None = None
        self._began = 0.0
        self._calls = self._groups = self._sequence = self._tokens = 0
        self._busy_seconds = 0.0
        changed = threading.Condition()
        limits = run.limits
        self._listener = PolicyListener(
            collaborators.open_reader,
            collaborators.topics.control,
            run_id=run.run_id,
            incarnation=self.incarnation,
            changed=changed,
            waiting_s=limits.waiting_s,
        )
        self._puller = PolicyPuller(
            self._listener,
            collaborators.weights,
            metrics=metrics,
            max_staleness=run.max_staleness,
            deadline_s=run.weights.pull_deadline_s,
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
        )
        self._heartbeat = HeartbeatSender(
            collaborators.producer, collaborators.topics.heartbeats, self._status, every_s=run.producer.heartbeat_s
        )

    def run(self) -> str:
        """Sample until the run ends or a stop is asked for; says which.

        What was sampled is then acknowledged by the broker. Raises EchoError where that, or anything before, failed.
        """
        self._began = self._clock()
        self._listener.start()
        self._puller.start()
        self._heartbeat.start()
        log.info("producer started", run=self._run.run_id, incarnation=self.incarnation, engine=self._engine.identity)
        try:
            reason = self._sample_until_told()
            self._say("draining")
            self._publisher.flush(self._run.producer.flush_timeout_s)
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
        while True:
            groups = self._wait_for_room()
            reason = self._told_to_end(self._listener.state)
            if reason is not None:
                return reason
            self._say("sampling")
            self._batch(min(groups, self._run.producer.groups_per_call))

    def _told_to_end(self, state: ControlState) -> str | None:
        if self._stop.is_set():
            return "a stop was asked for"
        if state.end is not None:
            return f"the run ended: {state.end.reason}"
        return None

    def _wait_for_room(self) -> int:
        """Groups that may begin now, at least 1; or 0 when told to end."""
        watch = Watch("room to sample", self._explain, limit_s=self._run.limits.waiting_s)
        with self._phase("wait"):
            while True:
                self._listener.check()
                self._puller.check()
                self._publisher.check()
                self._swap()
                state = self._listener.state
                if self._told_to_end(state) is not None:
                    return 0
                room = self._room(state)
                if room > 0:
                    return room
                self._say("waiting for a policy" if self._serving < 0 else "waiting for the window or a newer policy")
                with self._listener.changed:
                    if self._listener.state is state and not self._puller.has_policy:
                        self._listener.changed.wait(_SLICE_S)
                watch.check()

    def _room(self, state: ControlState) -> int:
        self._window.granted(state.grant, state.sequence)
        self._metrics.window.set(self._window.grant.window)
        self._metrics.outstanding.set(self._window.outstanding)
        if state.announcement is None:
            return 0
        self._metrics.announced_version.set(state.announcement.version)
        return self._window.room(state.announcement.version, self._engine.policy_version)

    def _explain(self) -> str:
        state = self._listener.state
        if state.announcement is None:
            return f"no policy of run {self._run.run_id} is announced on {self._with.topics.control}: is its trainer running?"
        text = (
            f"newest announced {state.announcement.version}, serving {self._serving}, S = {self._run.max_staleness}; "
            f"window {self._window.grant.window}, {self._window.started} groups begun, {self._window.grant.resolved} resolved"
        )
        return f"{text}; {self._puller.last_error}" if self._puller.last_error else text

    def _swap(self) -> None:
        """Between batches: load the policy that waits, if one does."""
        policy = self._puller.take_policy()
        if policy is None:
            return
        started = time.perf_counter()
        try:
            with self._phase("swap"):
                self._engine.load(policy)
        except EngineError as error:
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
            # What was announced before we lived says nothing about our own speed.
            if announced is not None and announced.version == version and announced.created >= self._began:
                self._metrics.announce_to_serving_seconds.observe(max(0.0, self._clock() - announced.created))
        self._heartbeat.changed(now=True)

    def _batch(self, groups: int) -> None:
        """Sample, score and publish this many groups."""
        prompts = list(itertools.islice(self._prompts, groups))
        if len(prompts) < groups:
            raise TaskError(f"task {self._with.task.name}: its prompts ended, a task's stream has no end")
        size = self._run.sampling.group_size
        token_ids = [self._tokenise(prompt) for prompt in prompts]
        sampling = self._sampling()
        self._window.begin(groups)
        self._metrics.groups.inc(groups)
        started_at = self._clock()
        self._taken = None
        try:
            with self._phase("sample"):
                repeated = [ids for ids in token_ids for _ in range(size)]
                completions = self._engine.generate(repeated, sampling, take_policy=self._take_policy)
        except EngineError as error:
            self._note_serving()
            if self._taken is None or self._engine.policy_version == self._taken.version:
                raise
            # It could not load what it took; the groups begin anew under the policy that serves.
            self._window.give_up(groups)
            self._refuse(self._taken, error)
            return
        self._note_serving()
        finished_at = self._clock()
        with self._phase("score"):
            scores = self._score(prompts, completions)
        with self._phase("publish"):
            for index, prompt in enumerate(prompts):
                members = slice(index * size, (index + 1) * size)
                group = self._group(
                    prompt, token_ids[index], completions[members], scores[members], sampling, started_at, finished_at
                )
                if self._publisher.publish(group):
                    self._sequence += size
                else:
                    self._window.give_up(1)

    def _tokenise(self, prompt: Prompt) -> list[int]:
        token_ids = self._with.tokenizer.encode(prompt.text)
        if not token_ids:
            raise TaskError(f"task {self._with.task.name}: prompt {prompt.prompt_id} has no tokens")
        return token_ids

    def _sampling(self) -> Sampling:
        config, seed = self._run.sampling, self._run.producer.seed
        self._calls += 1
        return Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=config.max_tokens,
            seed=secrets.randbits(63) if seed is None else mix_seed(seed, self._producer_id, self._calls),
        )

    def _score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        size = self._run.sampling.group_size
        texts = [self._with.tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in completions]
        scores = self._with.scorer.score([(text, prompts[number // size].reference) for number, text in enumerate(texts)])
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

    def _group(
        self,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        completions: Sequence[Completion],
        scores: Sequence[Score],
        sampling: Sampling,
        started_at: float,
        finished_at: float,
    ) -> list[Trajectory]:
        run_id = self._run.run_id
        group_id = trajectory.group_id(run_id, self.incarnation, self._groups)
        self._groups += 1
        ids = np.asarray(prompt_ids, dtype=np.int32)
        members = []
        for index, (completion, score) in enumerate(zip(completions, scores, strict=True)):
            # Counted on only when the group is published: a gap in the sequence means a lost record.
            number = self._sequence + index
            members.append(
                Trajectory(
                    run_id=run_id,
                    trajectory_id=trajectory.trajectory_id(run_id, self.incarnation, number),
                    group_id=group_id,
                    group_size=len(completions),
                    group_index=index,
                    task=self._with.task.name,
                    prompt_id=prompt.prompt_id,
                    prompt_ids=ids,
                    completion_ids=np.asarray(completion.token_ids, dtype=np.int32),
                    logprobs=np.asarray(completion.logprobs, dtype=self._run.producer.logprob_dtype),
                    loss_mask=np.ones(len(completion.token_ids), dtype=np.bool_),
                    spans=completion.spans,
                    reward=score.reward,
                    reward_components=score.components,
                    finish_reason=completion.finish_reason,
                    sampling=sampling,
                    engine=self._engine.identity,
                    model=self._model,
                    producer_id=self._producer_id,
                    sequence_number=number,
                    started_at=started_at,
                    finished_at=finished_at,
                )
            )
        return members

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
            leaving=leaving,
            metrics_url=self._metrics_url,
            created=self._clock(),
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
        except BrokerError as error:
            log.error("not all that was sampled is acknowledged", error=str(error))

    def _close(self) -> None:
        self._puller.close()
        self._listener.close()
        self._heartbeat.close()
        left = self._with.producer.flush(_LEAVE_S)
        if left:
            log.warning("stopped with unsent messages", records=left)
        self._publisher.close()
