"""How policies travel, beside what is possible: pulls, deltas, a broadcast over narrow links, and the time to serving.

    python tests/benchmarks/weights.py [--json out.json] [--only pull,delta,broadcast,announce] [--small]

    pull_ratio              time of `curl` from nginx / time of a verified pull into host memory, 1 GiB over loopback; at least
                            0.9. Without nginx: from uvicorn with the same piece size (`static_server` says which)
    pull_cpu_s_per_gib      CPU seconds of who asks and of who serves, for both
    health_p99_ms           /health while 8 pullers pull; at most 20
    delta_ratio             bytes of an update / bytes of the policy: a bf16 model of 61 million parameters trained by AdamW at
                            lr 1e-6, see weights_delta.py; at most 0.03
    delta_bit_identical     after 10 chained updates
    broadcast_seconds       by number of pullers, each machine with the same uplink; time(8) / time(1) at most 1.4
    origin_egress_models    what the origin sent / the model, the most of these broadcasts; at most 2
    announce_p50_s, _p95_s  from an announcement to an engine that samples from it, 100 updates of a small model; no target

The last line says what falls short; the exit status is then 1. --small: little data, for a look whether it runs; its numbers
mean nothing. Numbers want a quiet machine.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from echo.config import WeightsConfig  # noqa: E402
from echo.process import configure_logging  # noqa: E402
from tests.benchmarks.weights_announce import announce_figures  # noqa: E402
from tests.benchmarks.weights_broadcast import broadcast_figures  # noqa: E402
from tests.benchmarks.weights_delta import delta_figures  # noqa: E402
from tests.benchmarks.weights_pull import pull_figures  # noqa: E402

MIB = 2**20
PARTS = ("pull", "delta", "broadcast", "announce")


def shortfalls(found: Mapping[str, Any]) -> list[str]:
    """What misses its target, of what was measured."""
    missed = []
    for name, limit, is_least in (
        ("pull_ratio", 0.9, True),
        ("health_p99_ms", 20.0, False),
        ("delta_ratio", 0.03, False),
        ("origin_egress_models", 2.0, False),
    ):
        if name in found and not (found[name] >= limit if is_least else found[name] <= limit):
            missed.append(f"{name} is {found[name]:g}, to be at {'least' if is_least else 'most'} {limit:g}")
    if not found.get("delta_bit_identical", True):
        missed.append("delta_bit_identical is false")
    seconds = found.get("broadcast_seconds", {})
    if {"1", "8"} <= seconds.keys() and not seconds["8"] <= 1.4 * seconds["1"]:
        missed.append(f"broadcast_seconds 8 / 1 is {seconds['8'] / seconds['1']:.2f}, to be at most 1.4")
    return missed


def measure(parts: Sequence[str], *, small: bool) -> dict[str, Any]:
    chunk_bytes: int = WeightsConfig.model_fields["chunk_bytes"].default
    found: dict[str, Any] = {}
    for part in parts:
        print(f"{part} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="echo-weights-") as name:
            folder = Path(name)
            if part == "pull":
                nbytes, repetitions = (64 * MIB, 1) if small else (1024 * MIB, 5)
                found |= pull_figures(folder, nbytes=nbytes, chunk_bytes=chunk_bytes, repetitions=repetitions, tell=print)
            elif part == "delta":
                found |= delta_figures()
            elif part == "broadcast" and small:
                found |= broadcast_figures(
                    folder, nbytes=4 * MIB, chunk_bytes=MIB // 8, uplink=4 * MIB, counts=(1, 2), without=0
                )
            elif part == "broadcast":
                found |= broadcast_figures(folder, nbytes=64 * MIB, chunk_bytes=MIB // 2, uplink=8 * MIB)
            elif part == "announce":
                found |= announce_figures(folder, count=5 if small else 100)
        print(json.dumps(found), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    parser.add_argument("--small", action="store_true", help="little data: whether it runs, not how fast")
    options = parser.parse_args(arguments)
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    configure_logging(level="warning")
    found = measure(parts, small=options.small)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    missed = shortfalls(found)
    print("falls short: " + "; ".join(missed) if missed else "all targets that were measured are met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
