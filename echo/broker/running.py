"""A broker that can be used: what every kind has, and the external one, which is not ours to stop.

Refuses to hide a death: `check` raises as soon as a broker that was started here has ended on its own.
"""

from types import TracebackType
from typing import Self

from echo.broker.plan import BrokerPlan, Kind
from echo.kafka import KafkaLogAdmin


class RunningBroker:
    """A context manager; leaving it stops what was started. `bootstrap_servers` and `cluster_id` are those that answered."""

    def __init__(self, plan: BrokerPlan, bootstrap_servers: str, cluster_id: str) -> None:
        self.plan = plan
        self.bootstrap_servers = bootstrap_servers
        self.cluster_id = cluster_id

    @property
    def kind(self) -> Kind:
        return self.plan.kind

    @property
    def nodes(self) -> dict[int, int]:
        """Node id -> process id of those that run here."""
        return {}

    def describe(self) -> str:
        """The plan's line, with where the broker answers."""
        return self.plan.describe(f"; at {self.bootstrap_servers}, cluster {self.cluster_id}")

    def check(self) -> None:
        """Raise BrokerError if a process that was started here has ended on its own. Costs no request."""

    def stop(self) -> None:
        """Stop what was started here; again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def connect_external(plan: BrokerPlan) -> RunningBroker:
    """Ask the broker of the run file who it is. Raises BrokerError if it does not answer within the plan's timeout."""
    cluster_id = KafkaLogAdmin(plan.settings, client_id="echo-broker").cluster_id(plan.timeout_s)
    return RunningBroker(plan, plan.bootstrap_servers, cluster_id)
