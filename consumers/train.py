"""echo-train's loop: cut a batch, step, publish, announce, checkpoint; until the run's steps are done.

    echo-train run.yaml [KEY=VALUE ...]

Refuses to wait in silence or to go on after another trainer took over the run. What it trains, and when a record counts as
done, is decided by `intake` and `ledger`; this file only puts the parts in order.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from consumers.checkpoint import CheckpointStore
from consumers.digest import batch_digest
from consumers.fleet_listener import FleetListener
from consumers.groups import Group
from consumers.intake import Intake
from consumers.learner import Learner
from consumers.ledger import OUTCOME_OF, Reason, Resolved
from consumers.lineage import touches
from consumers.outcomes import Outcomes
from consumers.policy import AdapterBase, PolicyPublisher
from consumers.reader import TrajectoryReader
from consumers.requester import Requester
from consumers.step import StepStats
from echo.config import RunConfig
from echo.control import Grant
from echo.errors import BrokerError, TrainingError
from echo.journal import Interval, Journal
from echo.log import LogGroupOffsets
from echo.metrics import TrainerMetrics
from echo.process import StopSignal
from echo.staleness import staleness
from echo.topic_watch import TopicWatch
from echo.trajectory import incarnation_of
from echo.waiting import Watch

log = structlog.get_logger("train")

# How long one look at the buffer lasts: between looks, failures of the other threads and stop signals are noticed.
_LOOK_S = 0.2


class Trainer:
    """One trainer process of a run. `step` is the optimiser steps done, from a checkpoint where the run is resumed."""

    def __init__(
        self,
        run: RunConfig,
        *,
        learner: Learner,
        intake: Intake,
        reader: TrajectoryReader,
        fleet: FleetListener,
        publisher: PolicyPublisher,
        checkpoints: CheckpointStore,
        journal: Journal,
        metrics: TrainerMetrics,
        stop: StopSignal,
        check_children: Callable[[], None] = lambda: None,
        cluster_id: str,
        shown: LogGroupOffsets,
        abandoned: Callable[..., list[Interval]],
        topics: TopicWatch,
        requester: Requester | None = None,
        step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._learner = learner
        self._intake = intake
        self._reader = reader
        self._fleet = fleet
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._journal = journal
        self._metrics = metrics
        self._stop = stop
        self._check_children = check_children
        self._cluster_id = cluster_id
        self._shown = shown
        self._topics = topics
        self._find_abandoned = abandoned
        self._abandoned: list[Interval] = []
        # Sequential mode: groups are asked for, step by step. In async mode they come.
        self._requester = requester
        self._clock = clock
        self.step = step
        self._unjournaled = Resolved()
        self._checkpointed_step: int | None = None
        self._skipped_in_row = 0
        # Counters of this process; the ledger's numbers are the lineage's.
        self._seen = intake.stats()
        self._outcomes = Outcomes(metrics)
        self._shown_producers: set[str] = set()
        metrics.staleness_bound.set(run.staleness_bound)
        metrics.buffer_limit_bytes.set(run.batch.buffer_bytes)
        metrics.ranks.set(learner.ranks)

    def run(self) -> None:
        """Train until the steps are done or a stop is asked for. Raises EchoError."""
        try:
            self._run_steps()
        except BrokerError as error:
            self._topics.blame(error)

    def _run_steps(self) -> None:
        # Also after a restart: the restored policy gets a version of its own, above all that was announced.
        self._publish({})
        self._abandoned = self._find_abandoned(republished=self._publisher.newest)
        self._reader.start()
        self._fleet.start()
        while self.step < self._run.learner.steps:
            batch = self._next_batch()
            if batch is None:
                break
            self._train(batch)
            if self.step % self._run.checkpoint.every == 0:
                self._checkpoint()
        finished = self.step >= self._run.learner.steps
        self._reader.stop()
        if self._checkpointed_step != self.step:
            self._checkpoint()
        # Last: a trainer that is killed before its last checkpoint has steps to do again, and needs its producers for them.
        if finished:
            self._publisher.end(step=self.step, reason=f"all {self.step} steps done")
        self._show_intake()
        log.info("run finished" if finished else "stopped as asked", step=self.step, version=self._publisher.newest)

    def _next_batch(self) -> list[Group] | None:
        """Wait for a batch; None when a stop was asked for."""
        watch = Watch("a batch", self._describe_wait, limit_s=self._run.limits.waiting_s, clock=self._clock)
        if self._requester is not None:
            self._requester.begin(self.step, self._publisher.newest)
        with self._phase("wait"):
            while not self._stop.is_set():
                if self._requester is not None:
                    self._requester.turn()
                batch = self._intake.cut(_LOOK_S)
                self._topics.check()
                self._reader.check()
                self._fleet.check()
                self._check_children()
                self._learner.check_ranks()
                self._settle()
                if self._reader.idle_s > 0:
                    self._fleet.write_off(self._intake.held_groups(), self._reader.idle_s)
                self._show_intake()
                if batch is not None:
                    return batch if self._requester is None else self._requester.complete(batch)
                # Records that come in are no progress by themselves: a reader that drops all it reads must say so.
                watch.check()
        return None

    def _train(self, batch: list[Group]) -> None:
        newest = self._publisher.newest
        began = self._clock()
        stats = self._learner.step(batch, newest)
        for phase, seconds in stats.seconds.items():
            self._metrics.phase_seconds.labels(self._run.run_id, phase).inc(seconds)
        self.step += 1
        self._intake.trained(batch, Reason.NONFINITE if stats.skipped else Reason.TRAINED)
        resolved = dict(Counter(incarnation_of(group.group_id) for group in batch))
        due = self.step % self._run.learner.publish_every == 0 or self.step == self._run.learner.steps
        if due:
            self._publish(resolved)
        else:
            self._fleet.groups_resolved(resolved)
        self._settle()
        self._show_intake()
        self._write_journal(batch, stats, newest, self._clock() - began)
        self._show_step(stats, batch, newest)
        self._skipped_in_row = self._skipped_in_row + 1 if stats.skipped else 0
        if self._skipped_in_row >= self._run.learner.max_skipped:
            raise TrainingError(
                f"{self._skipped_in_row} steps in a row, up to step {self.step}, were left out: loss {stats.loss:g}, "
                f"gradient norm {stats.grad_norm:g}, {stats.loss_tokens} tokens to train. Weights are as before the first of "
                "them, and the last checkpoint stands. Look at the rewards and masks of these records (echo-tail), lower "
                "learner.lr, or raise learner.max_skipped"
            )

    def _publish(self, resolved: dict[str, int]) -> None:
        """Publish the learner's policy and announce it. `resolved` groups are told with it, never before: a producer that
        had room before it heard of the new version would sample from the old one."""

        def grants(sequence: int) -> dict[str, Grant]:
            self._fleet.groups_resolved(resolved)
            return self._fleet.take_grants(sequence)

        with self._phase("publish"):
            lora = self._run.learner.lora
            if lora is not None and lora.publish == "adapter":
                stored = self._publisher.store(
                    step=self.step,
                    tensors=self._learner.adapter_tensors(),
                    adapts=AdapterBase(self._learner.adapter_config, self._learner.base_tensors),
                    canary=self._learner.canary(),
                )
            else:
                stored = self._publisher.store(
                    step=self.step, tensors=self._learner.host_tensors(), canary=self._learner.canary()
                )
            # Producers may sample from it, and their records be read, before the broker's answer is here.
            self._intake.announcing(stored.version)
            announcement = self._publisher.announce(stored, grants=grants)
        self._intake.announced(announcement.version)
        self._metrics.announcements.inc()
        self._metrics.policy_version.set(announcement.version)
        log.info("announced", version=announcement.version, step=self.step, bytes=announcement.nbytes)

    def _checkpoint(self) -> None:
        with self._phase("checkpoint"):
            state = self._settle(with_state=True)
            if self._unjournaled:
                self._journal.append({"step": self.step, "resolved": self._unjournaled.by_reason()})
                self._unjournaled = Resolved()
            self._journal.sync()
            tensors, meta = self._learner.state()
            reader: dict[str, Any] = {
                "cluster_id": self._cluster_id,
                "topic_id": self._topics.topic_id(self._reader.topic),
                "journal_lines": self._journal.lines,
                "ledger": state,
                "groups_resolved": self._fleet.resolved(),
                "abandoned": [list(interval) for interval in self._abandoned],
            }
            self._checkpoints.save(self.step, tensors, meta, policy_version=self._publisher.newest, reader=reader)
        assert state is not None
        topic, frontier = self._reader.topic, state["frontier"]
        self._shown.show({(topic, int(number)): offset for number, offset in frontier.items()})
        self._checkpointed_step = self.step
        self._metrics.checkpoints.inc()
        log.info("checkpoint", step=self.step)

    def _settle(self, *, with_state: bool = False) -> dict[str, Any] | None:
        """Take over what was resolved: counted, journaled later, and told to the producers whose groups were dropped."""
        settled = self._intake.settle(with_state=with_state)
        self._outcomes.add(settled.judged)
        self._unjournaled.update(settled.resolved)
        if settled.dropped_groups:
            self._fleet.groups_resolved(settled.dropped_groups)
        return settled.state

    def _write_journal(self, batch: list[Group], stats: StepStats, newest: int, seconds: float) -> None:
        ages = Counter(staleness(newest, m.trajectory.oldest_trained_version) for group in batch for m in group.members)
        self._journal.append(
            {
                "step": self.step,
                "version": newest,
                # These seven and the version are what `--replay` needs.
                "batch": [[group.group_id, *[[m.partition, m.offset] for m in group.members]] for group in batch],
                "digest": batch_digest(batch),
                "cluster": self._cluster_id,
                "tokens_per_microbatch": self._run.learner.tokens_per_microbatch,
                "ranks": self._learner.ranks,
                "judgement": self._run.learner.judgement,
                "masked_below": newest - self._run.staleness_bound if self._run.on_stale == "mask" else None,
                "resolved": self._unjournaled.by_reason(),
                "skipped": stats.skipped,
                "reward_mean": stats.reward_mean,
                "loss": stats.loss,
                "grad_norm": stats.grad_norm,
                "entropy": stats.entropy,
                "tokens": stats.tokens,
                "staleness": {str(age): count for age, count in sorted(ages.items())},
                "seconds": seconds,
                "time": time.time(),
            }
        )
        self._unjournaled = Resolved()

    def _describe_wait(self) -> str:
        stats = self._intake.stats()
        dropped = {reason: n for reason, n in stats.resolved.items() if reason is not Reason.TRAINED}
        parts = [f"{n} {reason.value}" for reason, n in sorted(dropped.items()) if n]
        parts.append(f"{stats.members_incomplete} in {stats.groups_incomplete} incomplete groups")
        producers = self._fleet.alive()
        serving = ", ".join(f"{p.producer_id} serves {p.serving} ({p.state})" for p in producers) or "no producer is alive"
        errors = "".join(f"; {p.producer_id} could not pull: {p.last_pull_error}" for p in producers if p.last_pull_error)
        return (
            f"{stats.groups_ready} of {self._run.batch.groups_per_step} groups are ready; of {stats.read} records read: "
            f"{', '.join(parts)} (worst staleness {stats.worst_staleness}, bound {self._run.staleness_bound}); "
            f"newest announced {stats.newest_version}; {serving}{errors}"
            + (f"; {self._requester.describe()}" if self._requester is not None else "")
            + "".join(f"; {trouble}" for trouble in self._troubles())
        )

    def _troubles(self) -> list[str]:
        """What may be why nothing comes: topics that are gone, and what the readers' clients report."""
        found = [self._topics.describe()]
        for listening in (self._reader, self._fleet):
            error = listening.last_error
            found.append(f"the last error of reading {listening.topic}: {error}" if error else "")
        return [trouble for trouble in found if trouble]

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self._metrics.phase_seconds.labels(self._run.run_id, name).inc(self._clock() - began)

    def _show_intake(self) -> None:
        m, run_id, stats = self._metrics, self._run.run_id, self._intake.stats()
        # One snapshot feeds all three, so that what is exposed keeps the identity, too.
        assert stats.read == sum(stats.resolved.values()) + stats.pending, f"the ledger does not add up: {stats}"
        m.records_read.inc(stats.read - self._seen.read)
        for reason, number in stats.resolved.items():
            fresh = number - self._seen.resolved.get(reason, 0)
            m.records_resolved.labels(run_id, OUTCOME_OF[reason].value, reason.value).inc(fresh)
        m.records_pending.set(stats.pending)
        m.tokens_masked.inc(stats.masked_tokens - self._seen.masked_tokens)
        self._seen = stats
        m.groups_ready.set(stats.groups_ready)
        m.groups_incomplete.set(stats.groups_incomplete)
        m.buffer_bytes.set(stats.nbytes)
        m.paused.set(self._reader.paused)
        span = self._intake.unresolved_span()
        for number, behind in self._reader.lag().items():
            if behind is not None:
                m.lag_records.labels(run_id, self._reader.topic, str(number)).set(behind + span[number])
        producers = self._fleet.alive()
        m.producers_alive.set(len(producers))
        windows = self._fleet.windows() if self._requester is None else self._requester.held()
        outstanding = [producer.outstanding for producer in producers] if self._requester is None else windows.values()
        m.groups_outstanding.set(sum(outstanding))
        alive = {producer.producer_id for producer in producers}
        for gone in self._shown_producers - alive:
            m.producer_serving.remove(run_id, gone)
            m.producer_window.remove(run_id, gone)
        self._shown_producers = alive
        for producer in producers:
            m.producer_serving.labels(run_id, producer.producer_id).set(producer.serving)
            m.producer_window.labels(run_id, producer.producer_id).set(windows.get(producer.incarnation, 0))

    def _show_step(self, stats: StepStats, batch: list[Group], newest: int) -> None:
        m, run_id = self._metrics, self._run.run_id
        m.step.set(self.step)
        m.reward_mean.set(stats.reward_mean)
        m.reward_std.set(stats.reward_std)
        m.tokens.inc(stats.tokens)
        m.tokens_per_second.set(stats.tokens / sum(stats.seconds.values()))
        m.learning_rate.set(stats.learning_rate)
        m.steps_skipped.inc(stats.skipped)
        if not stats.skipped:
            m.ess_ratio.set(stats.ess_ratio)
            if self._run.learner.needs_reference:
                m.reference_kl.labels(run_id).set(stats.reference_kl)
            m.loss.set(stats.loss)
            m.grad_norm.set(stats.grad_norm)
            m.entropy.set(stats.entropy)
            m.clipped_ratio.set(stats.clipped_ratio)
            m.truncated_ratio.set(stats.truncated_ratio)
            for staleness_class, value in stats.mismatch_kl.items():
                m.mismatch_kl.labels(run_id, staleness_class).set(value)
        trajectories = [member.trajectory for group in batch for member in group.members]
        ages = [staleness(newest, trajectory.oldest_trained_version) for trajectory in trajectories]
        for age in ages:
            m.staleness.observe(age)
        if not stats.skipped:
            m.abandoned_version_records.inc(sum(touches(t.spans, self._abandoned) for t in trajectories))
        m.staleness_max.set(max(ages))
        log.info(
            "step",
            step=self.step,
            reward=round(stats.reward_mean, 4),
            staleness_max=max(ages),
            tokens=stats.tokens,
            skipped=stats.skipped,
        )
