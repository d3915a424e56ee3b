"""A producer's part of the broadcast benchmark, as a process of its own: pulls one version at a given moment, then serves on.

    python -m tests.benchmarks.weights_node URL RUN --start AT [--peers HOST] [--uplink BYTES_PER_S]

Prints one JSON line when the pull is done, and ends when its standard input does. AT: seconds since the epoch.
"""

import argparse
import json
import sys
import time

from pydantic import SecretStr

from echo.process import configure_logging
from echo.weights.client import WeightClient
from echo.weights.peers import PeerNode

TOKEN = SecretStr("benchmark-token")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("run")
    parser.add_argument("--peers", metavar="HOST", help="serve what is held, from this address")
    parser.add_argument("--uplink", type=float, help="bytes per second that are sent at most")
    options = parser.parse_args()
    configure_logging(level="warning")
    client = WeightClient(
        token=TOKEN,
        make_node=(
            (lambda access: PeerNode(access, host=options.peers, max_egress_bytes_per_s=options.uplink))
            if options.peers
            else None
        ),
    )
    latest = client.latest(options.url, options.run)
    print("ready", flush=True)
    time.sleep(max(0.0, float(sys.stdin.readline()) - time.time()))
    begun, used = time.time(), time.process_time()
    pulled = client.pull(
        [latest.url], run_id=options.run, version=latest.version, manifest_digest=latest.digest, deadline_s=600
    )
    print(
        json.dumps(
            {
                "begun": begun,
                "ended": time.time(),
                "cpu_s": time.process_time() - used,
                "received_bytes": pulled.received_bytes,
                "peer_bytes": pulled.peer_bytes,
                "retries": pulled.retries,
            }
        ),
        flush=True,
    )
    sys.stdin.read()
    client.close()


if __name__ == "__main__":
    main()
