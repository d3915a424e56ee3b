"""Every metric of Echo, once: names, labels, units. Built on an injected registry, so that tests hold their own.

Refuses sentinel values: a series that is not known yet does not exist. Names end in their unit; `_total` counts.
Every series carries `run`. Staleness counts versions, lag counts records; they are never mixed.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

STALENESS_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 32, 64)
SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKEN_BUCKETS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class TrainerMetrics:
    """What echo-train exposes."""

    def __init__(self, run_id: str, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, text, ("run", *labels), registry=registry)

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(name, text, ("run", *labels), registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
            return Histogram(name, text, ("run", *labels), buckets=buckets, registry=registry)

        self.registry = registry
        self.run_id = run_id
        self.records_read = counter("echo_train_records_read", "Trajectory records read").labels(run_id)
        self.records_resolved = counter(
            "echo_train_records_resolved", "Records resolved: trained, dropped or dead_lettered", ("outcome", "reason")
        )
        self.abandoned_version_records = counter(
            "echo_train_abandoned_version_records", "Records trained that a version sampled which a restart had abandoned"
        ).labels(run_id)
        self.records_pending = gauge("echo_train_records_pending", "Records read and not resolved").labels(run_id)
        self.lag_records = gauge(
            "echo_train_lag_records", "Offsets between the log end and the resolved frontier", ("topic", "partition")
        )
        self.groups_ready = gauge("echo_train_groups_ready", "Complete groups in the buffer").labels(run_id)
        self.groups_incomplete = gauge("echo_train_groups_incomplete", "Groups that miss members").labels(run_id)
        self.groups_outstanding = gauge(
            "echo_train_groups_outstanding", "Groups begun by live producers and not resolved"
        ).labels(run_id)
        self.buffer_bytes = gauge("echo_train_buffer_bytes", "Bytes of groups held").labels(run_id)
        self.buffer_limit_bytes = gauge("echo_train_buffer_limit_bytes", "Bound of the buffer").labels(run_id)
        self.paused = gauge("echo_train_reader_paused", "1 while the full buffer pauses the partitions").labels(run_id)
        self.staleness = histogram(
            "echo_train_staleness_versions", "Staleness of trained trajectories", STALENESS_BUCKETS
        ).labels(run_id)
        self.staleness_bound = gauge("echo_train_staleness_bound_versions", "S, the largest staleness trained").labels(run_id)
        self.staleness_max = gauge("echo_train_staleness_max_versions", "Largest staleness in the last batch").labels(run_id)
        self.tokens_masked = counter(
            "echo_train_stale_tokens_masked", "Tokens of batches that were left out as too old (on_stale: mask)"
        ).labels(run_id)
        self.reward_mean = gauge("echo_train_reward_mean", "Mean reward of the last batch").labels(run_id)
        self.reward_std = gauge("echo_train_reward_std", "Standard deviation of the rewards of the last batch").labels(run_id)
        self.step = gauge("echo_train_step", "Optimiser steps done").labels(run_id)
        self.policy_version = gauge("echo_train_policy_version", "Newest announced policy version").labels(run_id)
        self.loss = gauge("echo_train_loss", "Loss of the last step").labels(run_id)
        self.grad_norm = gauge("echo_train_grad_norm", "Gradient norm before clipping").labels(run_id)
        self.entropy = gauge("echo_train_entropy_nats", "Mean token entropy").labels(run_id)
        self.clipped_ratio = gauge("echo_train_clipped_ratio", "Share of tokens that the clip stopped").labels(run_id)
        self.truncated_ratio = gauge(
            "echo_train_truncated_ratio", "Share of tokens whose importance weight met its cap"
        ).labels(run_id)
        self.ess_ratio = gauge(
            "echo_train_ess_ratio", "Effective sample size of the importance weights, as a share of the batch's tokens"
        ).labels(run_id)
        self.reference_kl = gauge("echo_train_reference_kl_nats", "KL estimate from the reference policy")
        self.learning_rate = gauge("echo_train_learning_rate", "Learning rate of the last step").labels(run_id)
        self.steps_skipped = counter("echo_train_steps_skipped", "Steps left out, their gradient not finite").labels(run_id)
        self.ranks = gauge("echo_train_ranks", "Processes that train together").labels(run_id)
        self.mismatch_kl = gauge(
            "echo_train_mismatch_kl_nats",
            "KL estimate between behaviour and learner logprobs, before the first update of a batch",
            ("staleness",),
        )
        self.tokens = counter("echo_train_tokens", "Prompt and completion tokens trained").labels(run_id)
        self.tokens_per_second = gauge(
            "echo_train_tokens_per_second", "Tokens of the last batch over the time that its step took, waiting left out"
        ).labels(run_id)
        self.completion_tokens = histogram("echo_train_completion_tokens", "Completion length", TOKEN_BUCKETS, ("outcome",))
        self.outcome_reward_mean = gauge(
            "echo_train_outcome_reward_mean",
            "Mean reward of the trajectories resolved since the start, of those that were decoded",
            ("outcome", "task"),
        )
        self.phase_seconds = counter(
            "echo_train_phase_seconds", "Time spent: wait, unpack, forward, backward, publish, checkpoint", ("phase",)
        )
        self.checkpoints = counter("echo_train_checkpoints", "Checkpoints written").labels(run_id)
        self.announcements = counter("echo_train_announcements", "Policies announced").labels(run_id)
        self.producer_serving = gauge(
            "echo_train_producer_serving_version", "Version served, as heartbeats tell", ("producer",)
        )
        self.producer_window = gauge("echo_train_producer_window_groups", "Admission window granted", ("producer",))
        self.producers_alive = gauge("echo_train_producers_alive", "Producers with a recent heartbeat").labels(run_id)


class ProducerMetrics:
    """What echo-produce exposes."""

    def __init__(self, run_id: str, producer_id: str, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, text, ("run", "producer", *labels), registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ("run", "producer"), registry=registry).labels(run_id, producer_id)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, ("run", "producer"), buckets=buckets, registry=registry).labels(run_id, producer_id)

        me = (run_id, producer_id)
        self.registry = registry
        self.run_id, self.producer_id = me
        self.trajectories = counter("echo_produce_trajectories", "Trajectories sampled").labels(*me)
        self.acknowledged = counter("echo_produce_records_acknowledged", "Records the broker acknowledged").labels(*me)
        self.failed = counter("echo_produce_records_failed", "Records not published: too large, unsound or refused").labels(*me)
        self.groups = counter("echo_produce_groups", "Groups begun").labels(*me)
        self.tokens = counter("echo_produce_tokens", "Completion tokens sampled").labels(*me)
        self.bytes = counter("echo_produce_bytes", "Record bytes handed to the client, before compression").labels(*me)
        self.queued_bytes = gauge("echo_produce_queue_bytes", "Bytes not acknowledged yet")
        self.queue_limit_bytes = gauge("echo_produce_queue_limit_bytes", "Bound of the queue")
        self.oldest_unacknowledged = gauge(
            "echo_produce_oldest_unacknowledged_seconds", "Age of the oldest record without acknowledgement"
        )
        self.serving_version = gauge("echo_produce_serving_version", "Policy version the engine samples from")
        self.announced_version = gauge("echo_produce_announced_version", "Newest policy version heard of")
        self.window = gauge("echo_produce_window_groups", "Admission window granted")
        self.outstanding = gauge("echo_produce_groups_outstanding", "Groups begun and not resolved")
        self.reward_mean = gauge("echo_produce_reward_mean", "Mean reward of the last batch sampled")
        self.completion_tokens = histogram("echo_produce_completion_tokens", "Completion length", TOKEN_BUCKETS)
        self.prompts_left_out = counter(
            "echo_produce_prompts_left_out",
            "Prompts that can't be used: task, reference, tokenizer, empty, unknown_token, too_long",
            ("reason",),
        )
        self.scorings = counter("echo_produce_scorings", "Completions scored: ok, timeout, error", ("outcome",))
        self.pulls = counter("echo_produce_pulls", "Weight pulls: ok, failed, superseded", ("outcome",))
        self.pull_seconds = histogram("echo_produce_pull_seconds", "Pull time, ok only", SECONDS_BUCKETS)
        self.pull_bytes = counter("echo_produce_pull_bytes", "Weight bytes received, from the origin or a peer", ("source",))
        self.pull_retries = counter(
            "echo_produce_pull_retries", "Chunk and manifest requests that failed and were repeated"
        ).labels(*me)
        self.peer_sent_bytes = counter("echo_produce_peer_sent_bytes", "Chunk bytes sent to other producers").labels(*me)
        self.swap_seconds = histogram("echo_produce_swap_seconds", "Engine time to take new weights", SECONDS_BUCKETS)
        self.announce_to_serving_seconds = histogram(
            "echo_produce_announce_to_serving_seconds",
            "From the announcement's creation to serving, by this producer's clock",
            SECONDS_BUCKETS,
        )
        # Known after the first pull.
        self.clock_difference = Gauge(
            "echo_produce_clock_difference_seconds",
            "The weight server's clock less this producer's",
            ("run", "producer"),
            registry=registry,
        )
        self.phase_seconds = counter("echo_produce_phase_seconds", "Time spent: wait, sample, score, publish, swap", ("phase",))


class WeightsMetrics:
    """What the weight server exposes on its own port, at /metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter("echo_weights_requests", "HTTP requests", ("route", "status"), registry=registry)
        self.sent_bytes = Counter("echo_weights_sent_bytes", "Chunk bytes sent", registry=registry)
        self.request_seconds = Histogram(
            "echo_weights_request_seconds", "Request time", ("route",), buckets=SECONDS_BUCKETS, registry=registry
        )
        self.newest_version = Gauge("echo_weights_newest_version", "Newest version in the store", ("run",), registry=registry)
        self.stored_bytes = Gauge("echo_weights_stored_bytes", "Bytes of chunks in the store", registry=registry)
