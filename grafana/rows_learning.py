"""The board's rows on learning: is it learning, how stale is what it learns from, and what became of every record.

Refuses a query that reads more than the chosen run (`up` aside, which knows no run), and a metric that echo/metrics.py
does not have; a test holds both.
"""

from grafana_foundation_sdk.models import units
from panels import BLUE, RED, Panel, Query, cells, graph, number, producer, quantiles, rate, shares, steps, trainer


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
        graph(
            "Masked as too old",
            "Tokens of batches that were left out because their version was too old: on_stale: mask.",
            "suffix: tokens/s",
            [Query(f"sum({rate(trainer('echo_train_stale_tokens_masked_total'))})", "tokens")],
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
        graph(
            "Prompts left out",
            "Prompts per minute that can't be used, by reason: the task gives none, its reference can't cross to the scorer, "
            "they can't be tokenised, are empty, hold unknown tokens, or are too long. Producers' logs name each.",
            "suffix: /min",
            [Query(f"60 * sum by (reason) ({rate(producer('echo_produce_prompts_left_out_total'))})", "{{reason}}")],
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
