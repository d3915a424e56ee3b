"""What both sides ask of the cluster before they start: an answer, and topics that fit the run file.

Refuses to create or change a topic: that is `echo-topics apply`.
"""

import time
from collections.abc import Callable

import structlog

from echo.config import RunConfig
from echo.errors import BrokerError, ConfigError, StoppedError
from echo.kafka import KafkaLogAdmin
from echo.topics import Actual, Spec, of_run, read_actual, require
from echo.waiting import Watch

log = structlog.get_logger("preflight")

# One question's time, and the least that is worth asking for.
_ASK_S = 5.0
_LEAST_S = 0.1


def check_cluster(run: RunConfig, *, client_id: str, stopping: Callable[[], bool]) -> tuple[Spec, Actual]:
    """Wait for the broker, `broker.timeout_s` at most, and hold its topics to topics.yaml and the run's limits.

    Raises ConfigError, BrokerError, TopicError; StoppedError if a stop is asked for meanwhile.
    """
    spec = of_run(run)
    if not run.broker.settings.get("bootstrap.servers"):
        raise ConfigError(
            "broker.settings.bootstrap.servers is not set: name your Kafka there, or start `echo-broker` and take its address"
        )
    actual = _ask(KafkaLogAdmin(run.broker.settings, client_id=client_id), spec, run, stopping)
    require(spec, actual, run.limits)
    log.info("broker ready", cluster=actual.cluster_id, brokers=actual.brokers, trajectories=spec.names.trajectories)
    return spec, actual


def _ask(admin: KafkaLogAdmin, spec: Spec, run: RunConfig, stopping: Callable[[], bool]) -> Actual:
    said, longest_s = "", 0.0
    watch = Watch("the broker", lambda: said, limit_s=run.limits.waiting_s)
    deadline = time.monotonic() + run.broker.timeout_s
    while True:
        asked_s = min(_ASK_S, max(_LEAST_S, deadline - time.monotonic()))
        try:
            return read_actual(admin, spec.names, asked_s)
        except BrokerError as error:
            if stopping():
                raise StoppedError(f"stopped while waiting for the broker: {error}") from None
            if not error.retriable:
                raise
            # Each tells how long it waited itself: the last may have been cut short, and would tell of a moment.
            if asked_s >= longest_s:
                said, longest_s = str(error), asked_s
            if deadline - time.monotonic() < _LEAST_S:
                whole = f"{said}; asked for broker.timeout_s = {run.broker.timeout_s:g} s in all"
                raise BrokerError(whole, retriable=True) from None
        watch.check()
