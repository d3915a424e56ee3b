"""The board's rows on what moves between the processes: who waits for whom, at what rate, and how full the buffers are.

Refuses a query that reads more than the chosen run, and a metric that echo/metrics.py does not have; a test holds both.
"""

from grafana_foundation_sdk.models import units
from panels import HOLDS_RUN, Panel, Query, graph, producer, quantiles, rate, shares, trainer


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
            "Clock difference",
            "The weight server's clock less each producer's. Announce to serving is corrected by it; log lines are not.",
            units.Seconds,
            [Query(producer("echo_produce_clock_difference_seconds"), "{{producer}}")],
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
