"""Each of Echo's listening ports in a process of its own: `python -m tests.fakes.ports KIND DESCRIPTORS FOLDER`.

KIND is metrics, weights or peers; DESCRIPTORS is how many the process may have. It prints the port and serves until its input
ends. The metrics need files of the process's own, as a trainer's checkpoint does.
"""

import resource
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge
from pydantic import SecretStr

from echo.metrics import WeightsMetrics
from echo.metrics_server import MetricsServer
from echo.weights.manifest import HostTensor
from echo.weights.peers import PeerNode
from echo.weights.server import WeightServer, create_app
from echo.weights.store import WeightStore
from echo.weights.transport import Access

TOKEN = "s3cret-token"
NEEDED_FILES = 32
DATA = bytes(range(256)) * 256


def files() -> float:
    """As many as a save of a checkpoint may hold at once. Raises OSError where the process has no descriptors left."""
    with ExitStack() as opened:
        return float(len([opened.enter_context(open("/proc/self/stat", "rb")) for _ in range(NEEDED_FILES)]))


def start(kind: str, folder: Path) -> tuple[int, Callable[[], None]]:
    if kind == "metrics":
        registry = CollectorRegistry()
        Gauge("files", "Files that could be opened", registry=registry).set_function(files)
        metrics = MetricsServer(registry, host="127.0.0.1", port=0, key="test")
        return metrics.port, metrics.close
    if kind == "weights":
        store = WeightStore(folder)
        tensor = HostTensor("a", "U8", (len(DATA),), memoryview(DATA))
        store.publish("run", 0, 0, [tensor], chunk_bytes=2**20, keep=2, created=1.5)
        app = create_app(store, token=SecretStr(TOKEN), metrics=WeightsMetrics(CollectorRegistry()))
        server = WeightServer(app, host="127.0.0.1", port=0).start()
        return server.port, server.stop
    node = PeerNode(Access(SecretStr(TOKEN), 5.0, 5.0)).start()
    node.holdings.add("0" * 64, memoryview(DATA))
    return int(node.url.rpartition(":")[2]), node.close


def main() -> None:
    kind, descriptors, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    port, stop = start(kind, folder)
    print(port, flush=True)
    sys.stdin.read()
    stop()


if __name__ == "__main__":
    main()
