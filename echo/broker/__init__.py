"""The broker of a run: choose one (`plan_broker`), start it if it is ours to start (`start_broker`). A launcher, not a broker.

    with start_broker(plan_broker(run.broker), data_dir=Path("runs/broker")) as broker:
        print(broker.describe())
        ...  # clients use broker.bootstrap_servers

Whatever was started here ends when this process ends, in any way. Refuses anything but the loopback interface.
"""

from collections.abc import Mapping
from pathlib import Path

from echo.broker.apache import ApacheBroker, start_apache
from echo.broker.plan import BrokerPlan, plan_broker
from echo.broker.running import RunningBroker, connect_external
from echo.broker.tansu import TansuBroker, start_tansu
from echo.errors import BrokerError

__all__ = ["ApacheBroker", "BrokerPlan", "RunningBroker", "TansuBroker", "plan_broker", "start_broker"]


def start_broker(
    plan: BrokerPlan,
    *,
    data_dir: Path,
    nodes: int = 1,
    port: int = 0,
    heap_mib: int = 768,
    ready_s: float = 90.0,
    overrides: Mapping[str, str] | None = None,
) -> RunningBroker:
    """Start what was planned and wait until it answers with its own cluster id.

    data_dir: records (Apache) and log files; nothing is written there for an external broker. nodes: 1, or 3 with Apache.
    port: 0 takes free ones, Apache those of its last start. heap_mib: per Java process. overrides: of server.properties.
    An `ApacheBroker` also has `kill_node` and `restart_node`. Raises BrokerError.
    """
    if plan.kind == "external":
        return connect_external(plan)
    if plan.kind == "apache":
        return start_apache(
            plan, data_dir=data_dir, nodes=nodes, port=port, ready_s=ready_s, heap_mib=heap_mib, overrides=overrides
        )
    if nodes != 1:
        raise BrokerError(f"{nodes} nodes need Apache Kafka: name a home with --apache HOME, broker.apache_home or KAFKA_HOME")
    return start_tansu(plan, data_dir=data_dir, port=port, ready_s=ready_s)
