"""What is on Echo's board: its rows and their panels.

Refuses a query that reads more than the chosen run (`up` aside, which knows no run), and a metric that echo/metrics.py
does not have; a test holds both.
"""

from grafana_foundation_sdk.models import units
from panels import (
    BLUE,
    HOLDS_RUN,
    RED,
    Panel,
    Query,
    cells,
    graph,
    number,
    producer,
    quantiles,
    rate,
    shares,
    steps,
    trainer,
)


def overview() -> list[Panel]:
    alive, up = trainer("echo_train_producers_alive"), 'up{job=~"$job"}'
    newest = trainer("echo_train_policy_version")
    step = trainer("echo_train_step")
    resolved = trainer("echo_train_records_resolved_total")
    trained = trainer("echo_train_records_resolved_total", 'outcome="trained"')
    return [
        number(
            "Reward",
            "Mean reward of the last batch trained.",
            units.Short,
            Query(trainer("echo_train_reward_mean"), "reward"),
            decimals=3,
        ),
        number("Step", "Optimiser steps done.", units.NoUnit, Query(step, "step")),
        number("Newest version", "Newest policy version announced.", units.NoUnit, Query(newest, "version")),
        number(
            "Producers alive",
            "Producers with a recent heartbeat; red when there is none.",
            units.NoUnit,
            Query(alive, "producers"),
            thresholds=steps((None, RED), (1, BLUE)),
        ),
        number(
            "Targets down",
            "Processes that Prometheus cannot scrape, of the jobs chosen above (not of one run: who is down tells no run).",
            units.NoUnit,
            # Without any target this has no value: nothing watched is not the same as nothing down.
            Query(f"count({up} == 0) or 0 * count({up})", "down"),
            thresholds=steps((None, BLUE), (1, RED)),
        ),
        number(
            "Trained of resolved",
            "Share of the records resolved in the time shown that were trained; the rest was dropped or dead-lettered.",
            units.PercentUnit,
            Query(
                # A run that drops everything has no series of trained ones: that is 0, not no traffic.
                f"(sum(increase({trained}[$__range])) or vector(0)) / sum(increase({resolved}[$__range]))",
                "trained",
            ),
        ),
        graph(
            "Reward, trained and sampled",
            "Mean reward of the last batch: what the trainer learns from, and what each producer samples now.",
            units.Short,
            [
                Query(trainer("echo_train_reward_mean"), "trained"),
                Query(producer("echo_produce_reward_mean"), "{{producer}}"),
            ],
        ),
        graph(
            "Steps per minute",
            "Optimiser steps, from their change over time; below zero where the trainer went back to a checkpoint.",
            units.Short,
            [Query(f"60 * deriv({step}[$__rate_interval])", "steps per minute")],
        ),
    ]


def staleness() -> list[Panel]:
    bucket = trainer("echo_train_staleness_versions_bucket")
    bound = Query(trainer("echo_train_staleness_bound_versions"), "bound S")
    return [
        graph(
            "Staleness against the bound",
            "Staleness of trained trajectories, in versions; interpolated inside a bucket, so up to one too low.",
            "suffix: versions",
            [*quantiles(bucket), bound],
            bound="bound S",
        ),
        graph(
            "Largest staleness",
            "Largest staleness in the last batch, exact. Above the bound S nothing is trained.",
            "suffix: versions",
            [Query(trainer("echo_train_staleness_max_versions"), "max"), bound],
            bound="bound S",
        ),
        cells("Staleness histogram", "Trained trajectories by staleness, in versions (upper bound of the bucket).", bucket),
    ]


def lag() -> list[Panel]:
    lag = trainer("echo_train_lag_records")
    return [
        graph(
            "Lag",
            "Offsets between the log end and the resolved frontier, over all partitions. Lag is records, never versions.",
            "suffix: records",
            [Query(f"sum({lag})", "lag"), Query(trainer("echo_train_records_pending"), "read and pending")],
        ),
        graph(
            "Lag by partition",
            "Offsets between the log end and the resolved frontier.",
            "suffix: records",
            [Query(f"sum by (topic, partition) ({lag})", "{{topic}} {{partition}}")],
        ),
        graph(
            "Groups",
            "Groups in the buffer: complete, and missing members; outstanding: begun by live producers and not resolved.",
            "suffix: groups",
            [
                Query(trainer(f"echo_train_groups_{state}"), legend)
                for state, legend in (("ready", "ready"), ("incomplete", "incomplete"), ("outstanding", "outstanding"))
            ],
        ),
        graph(
            "Admission window",
            "Groups a producer may have outstanding, as granted, and those it has.",
            "suffix: groups",
            [
                Query(producer("echo_train_producer_window_groups"), "{{producer}} granted"),
                Query(producer("echo_produce_window_groups"), "{{producer}} heard"),
                Query(producer("echo_produce_groups_outstanding"), "{{producer}} outstanding"),
            ],
        ),
    ]


def versions() -> list[Panel]:
    newest = Query(trainer("echo_train_policy_version"), "announced")
    serving = producer("echo_produce_serving_version")
    return [
        graph(
            "Version served by each producer",
            "The version each engine samples from, as producers say, against the newest announced.",
            units.NoUnit,
            [newest, Query(serving, "{{producer}}")],
        ),
        graph(
            "Version served, as heartbeats tell",
            "The same as the trainer hears it: it needs no scrape of the producers, and stands still with their heartbeats.",
            units.NoUnit,
            [newest, Query(producer("echo_train_producer_serving_version"), "{{producer}}")],
        ),
        graph(
            "Skew",
            "Versions that the one served, and the newest one heard of, are behind the newest announced.",
            "suffix: versions",
            [
                Query(f"scalar(max({newest.expr})) - {serving}", "{{producer}} served"),
                Query(
                    f"scalar(max({newest.expr})) - {producer('echo_produce_announced_version')}",
                    "{{producer}} heard",
                ),
            ],
        ),
        graph(
            "Announcements per minute",
            "Policies announced, and checkpoints written.",
            units.Short,
            [
                Query(f"60 * sum({rate(trainer('echo_train_announcements_total'))})", "announcements"),
                Query(f"60 * sum({rate(trainer('echo_train_checkpoints_total'))})", "checkpoints"),
            ],
        ),
    ]


def throughput() -> list[Panel]:
    def each(metric: str) -> list[Query]:
        return [Query(f"sum by (producer) ({rate(producer(metric))})", "{{producer}}")]

    return [
        graph(
            "Tokens per second",
            "Completion tokens sampled by all chosen producers; prompt and completion tokens trained.",
            "suffix: tokens/s",
            [
                Query(f"sum({rate(producer('echo_produce_tokens_total'))})", "sampled"),
                Query(f"sum({rate(trainer('echo_train_tokens_total'))})", "trained"),
            ],
        ),
        graph("Trajectories per second", "Trajectories sampled.", "suffix: /s", each("echo_produce_trajectories_total")),
        graph("Groups per second", "Groups begun.", "suffix: groups/s", each("echo_produce_groups_total")),
        graph(
            "Records per second",
            "Records acknowledged by the broker, refused by it, and read by the trainer.",
            units.RecordsPerSecond,
            [
                Query(f"sum({rate(producer('echo_produce_records_acknowledged_total'))})", "acknowledged"),
                Query(f"sum({rate(producer('echo_produce_records_failed_total'))})", "refused"),
                Query(f"sum({rate(trainer('echo_train_records_read_total'))})", "read"),
            ],
        ),
        graph(
            "Record bytes per second",
            "Record bytes handed to the Kafka client, before compression.",
            units.BytesPerSecondIEC,
            each("echo_produce_bytes_total"),
        ),
        graph(
            "Producer time",
            "Where producers spend their time: waiting for a window or the broker, sampling, scoring, publishing, swapping.",
            units.PercentUnit,
            [shares(producer("echo_produce_phase_seconds_total"))],
            stacked=True,
            largest=1,
        ),
    ]


def resolution() -> list[Panel]:
    resolved = trainer("echo_train_records_resolved_total")
    lost = trainer("echo_train_records_resolved_total", 'outcome!="trained"')
    return [
        graph(
            "Resolved per second",
            "Every record read is resolved exactly once: trained, dropped, or dead-lettered.",
            units.RecordsPerSecond,
            [Query(f"sum by (outcome) ({rate(resolved)})", "{{outcome}}")],
        ),
        graph(
            "Not trained, by reason",
            "Records dropped or dead-lettered, by reason.",
            units.RecordsPerSecond,
            [
                Query(
                    f"sum by (outcome, reason) ({rate(lost)})",
                    "{{outcome}}: {{reason}}",
                )
            ],
        ),
        graph(
            "Completion length, sampled and resolved",
            "Half of the completions are shorter. Dropped ones longer than trained ones: staleness drops long answers.",
            "suffix: tokens",
            [
                *quantiles(trainer("echo_train_completion_tokens_bucket"), "outcome", ("p50",)),
                *(
                    q._replace(legend="sampled p50")
                    for q in quantiles(producer("echo_produce_completion_tokens_bucket"), names=("p50",))
                ),
            ],
        ),
        graph(
            "Reward, trained and dropped",
            "Mean reward since the trainer's start, by outcome and task. Apart from each other: the drop is biased.",
            units.Short,
            [Query(trainer("echo_train_outcome_reward_mean"), "{{outcome}} {{task}}")],
        ),
        graph(
            "Trained from abandoned versions",
            "Records trained that were sampled, in part at least, from a version that a restart of the trainer had abandoned.",
            units.RecordsPerSecond,
            [Query(f"sum({rate(trainer('echo_train_abandoned_version_records_total'))})", "records")],
        ),
        graph(
            "Scorings",
            "Completions scored: ok, out of time, or in error (the last two earn reward 0).",
            "suffix: /s",
            [Query(f"sum by (outcome) ({rate(producer('echo_produce_scorings_total'))})", "{{outcome}}")],
        ),
    ]


def weights() -> list[Panel]:
    def served(metric: str, by: str = "") -> str:
        return f"sum{f' by ({by})' if by else ''}({rate(metric)} {HOLDS_RUN})"

    return [
        graph(
            "Pull time",
            "Time of a successful weight pull.",
            units.Seconds,
            quantiles(producer("echo_produce_pull_seconds_bucket"), names=("p50", "p95")),
        ),
        graph(
            "Announce to serving",
            "From the creation of an announcement until an engine samples from its version.",
            units.Seconds,
            quantiles(producer("echo_produce_announce_to_serving_seconds_bucket")),
        ),
        graph(
            "Swap time",
            "Time an engine takes to put verified weights in place.",
            units.Seconds,
            quantiles(producer("echo_produce_swap_seconds_bucket"), names=("p50", "p95")),
        ),
        graph(
            "Pulls per minute",
            "Weight pulls: ok, failed (the old version goes on serving), or superseded by a newer announcement; and "
            "the requests of pulls that were repeated.",
            units.Short,
            [
                Query(f"60 * sum by (outcome) ({rate(producer('echo_produce_pulls_total'))})", "{{outcome}}"),
                Query(f"60 * sum({rate(producer('echo_produce_pull_retries_total'))})", "requests repeated"),
            ],
        ),
        graph(
            "Weight bytes per second",
            "Weight bytes that producers received from the origin and from peers, and chunk bytes that the servers of this "
            "run's store and the producers among themselves sent.",
            units.BytesPerSecondIEC,
            [
                Query(f"sum by (source) ({rate(producer('echo_produce_pull_bytes_total'))})", "received from {{source}}"),
                Query(served("echo_weights_sent_bytes_total"), "sent by servers"),
                Query(f"sum({rate(producer('echo_produce_peer_sent_bytes_total'))})", "sent by producers"),
            ],
        ),
        graph(
            "Weight server requests",
            "Requests by route and status, to the servers of this run's store.",
            units.RequestsPerSecond,
            [Query(served("echo_weights_requests_total", "route, status"), "{{route}} {{status}}")],
        ),
        graph(
            "Weight server request time",
            "Time of a request by route, 95 of 100 are faster.",
            units.Seconds,
            [
                Query(
                    f"histogram_quantile(0.95, {served('echo_weights_request_seconds_bucket', 'le, route')})",
                    "{{route}} p95",
                )
            ],
        ),
        graph(
            "Weight store",
            "Bytes of chunks held by the servers of this run's store.",
            units.BytesIEC,
            [Query(f"echo_weights_stored_bytes {HOLDS_RUN}", "{{instance}}")],
        ),
    ]


def memory() -> list[Panel]:
    limit = Query(trainer("echo_train_buffer_limit_bytes"), "limit")
    return [
        graph(
            "Trainer buffer",
            "Bytes of groups held, against the bound; at the bound the partitions are paused.",
            units.BytesIEC,
            [Query(trainer("echo_train_buffer_bytes"), "held"), limit],
            bound="limit",
        ),
        graph(
            "Time paused",
            "Share of the time in which the full buffer paused the partitions.",
            units.PercentUnit,
            [Query(f"avg_over_time({trainer('echo_train_reader_paused')}[$__rate_interval])", "paused")],
            largest=1,
        ),
        graph(
            "Producer queues",
            "Bytes not acknowledged yet, against the bound of the smallest queue; at its bound a producer's sampling waits.",
            units.BytesIEC,
            [
                Query(producer("echo_produce_queue_bytes"), "{{producer}}"),
                Query(f"min({producer('echo_produce_queue_limit_bytes')})", "limit"),
            ],
            bound="limit",
        ),
        graph(
            "Oldest unacknowledged record",
            "Age of the oldest record without acknowledgement. Kafka's client gives up on it after delivery.timeout.ms.",
            units.Seconds,
            [Query(producer("echo_produce_oldest_unacknowledged_seconds"), "{{producer}}")],
        ),
    ]


def learner() -> list[Panel]:
    return [
        graph("Loss", "Loss of the last step.", units.Short, [Query(trainer("echo_train_loss"), "loss")]),
        graph(
            "Gradient norm",
            "Norm of the gradient before clipping.",
            units.Short,
            [Query(trainer("echo_train_grad_norm"), "gradient norm")],
        ),
        graph(
            "Entropy",
            "Mean token entropy; a policy that collapses goes to zero.",
            "suffix: nats",
            [Query(trainer("echo_train_entropy_nats"), "entropy")],
        ),
        graph(
            "Clipped and truncated",
            "Share of tokens that the clip stopped, and whose importance weight met its cap.",
            units.PercentUnit,
            [
                Query(trainer("echo_train_clipped_ratio"), "clipped"),
                Query(trainer("echo_train_truncated_ratio"), "truncated"),
            ],
        ),
        graph(
            "Effective sample size",
            "Of the importance weights, as a share of the batch's tokens: near 1 the batch is as good as the learner's own.",
            units.PercentUnit,
            [Query(trainer("echo_train_ess_ratio"), "effective")],
            largest=1,
        ),
        graph(
            "KL from the reference",
            "KL estimate from the reference policy, where the objective has one.",
            "suffix: nats",
            [Query(trainer("echo_train_reference_kl_nats"), "KL")],
        ),
        graph(
            "Reward spread",
            "Standard deviation of the last batch's rewards; where all are equal there is nothing to learn.",
            units.Short,
            [Query(trainer("echo_train_reward_std"), "standard deviation")],
        ),
        graph(
            "Learning rate",
            "Of the last step.",
            units.Short,
            [Query(trainer("echo_train_learning_rate"), "learning rate")],
        ),
        graph(
            "Steps left out",
            "Steps whose gradient was not finite; learner.max_skipped of them in a row end the run.",
            units.Short,
            [Query(f"increase({trainer('echo_train_steps_skipped_total')}[$__rate_interval])", "left out")],
        ),
        graph(
            "Training speed",
            "Tokens of the last batch over the time that its step took, waiting left out, and the processes that shared it.",
            "suffix: tokens/s",
            [
                Query(trainer("echo_train_tokens_per_second"), "tokens per second"),
                Query(trainer("echo_train_ranks"), "ranks"),
            ],
        ),
        graph(
            "Mismatch by staleness",
            "KL estimate between behaviour and learner logprobs. At staleness 0 it is the engines' difference alone.",
            "suffix: nats",
            [Query(trainer("echo_train_mismatch_kl_nats"), "staleness {{staleness}}")],
        ),
        graph(
            "Trainer time",
            "Where the trainer spends its time: waiting for groups, unpacking, computing, publishing, writing checkpoints.",
            units.PercentUnit,
            [shares(trainer("echo_train_phase_seconds_total"))],
            stacked=True,
            largest=1,
        ),
    ]


# Title, panels, and the widths that its panels take in turn (24 make a line).
ROWS = (
    ("Overview", overview, (4, 4, 4, 4, 4, 4, 12, 12)),
    ("Staleness", staleness, (9, 6, 9)),
    ("Lag", lag, (6, 6, 6, 6)),
    ("Versions", versions, (7, 7, 5, 5)),
    ("Throughput", throughput, (8,) * 6),
    ("Resolution", resolution, (8,) * 6),
    ("Weights", weights, (6,) * 8),
    ("Memory and back-pressure", memory, (6, 6, 6, 6)),
    ("Learner", learner, (6,) * 12),
)
