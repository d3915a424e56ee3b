"""What both sides ask of the cluster before they start: an answer, and topics that fit the run file.

Refuses to create or change a topic: that is `echo-topics apply`.
"""

import time
from collections.abc import Callable

import structlog

from echo.config import RunConfig
from echo.errors import BrokerError, ConfigError
from echo.kafka import KafkaLogAdmin
from echo.topics import Actual, Spec, of_run, read_actual, require
from echo.waiting import Watch

log = structlog.get_logger("preflight")

_ASK_S = 5.0


def check_cluster(run: RunConfig, *, client_id: str, stopping: Callable[[], bool]) -> tuple[Spec, Actual]:
    """Wait for the broker, `broker.timeout_s` at most, and hold its topics to topics.yaml and the run's limits.

    Raises ConfigError, BrokerError, TopicError.
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
    said = ""
    watch = Watch("the broker", lambda: said, limit_s=run.limits.waiting_s)
    deadline = time.monotonic() + run.broker.timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            return read_actual(admin, spec.names, min(_ASK_S, max(0.1, left)))
        except BrokerError as error:
            if not error.retriable or stopping():
                raise
            if time.monotonic() >= deadline:
                # Each question waits for a part of the time alone, and would tell that part.
                whole = f"{error}; asked again and again for broker.timeout_s = {run.broker.timeout_s:g} s"
                raise BrokerError(whole, retriable=True) from None
            said = str(error)
        watch.check()
