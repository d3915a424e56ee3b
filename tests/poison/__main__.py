"""Mutated records by the million, as raw bytes, through a Kafka of its own: python -m tests.poison --records 1000000"""

import argparse
import os
import tempfile
from pathlib import Path

from echo import topics
from echo.broker import plan_broker, start_broker
from echo.kafka import KafkaLogAdmin
from echo.process import configure_logging
from tests.conftest import ROOT
from tests.poison.fuzz import run

_PARTITIONS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000, help="records that the broker must have let in")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    configure_logging(level="error")
    home = os.environ.get("KAFKA_HOME") or str(ROOT.parent / "shared" / "kafka")
    plan = plan_broker(environ={**os.environ, "KAFKA_HOME": home})
    with (
        tempfile.TemporaryDirectory(prefix="poison-") as folder,
        start_broker(plan, data_dir=Path(folder), heap_mib=1024) as broker,
    ):
        spec = topics.load()
        admin = KafkaLogAdmin({"bootstrap.servers": broker.bootstrap_servers}, client_id="poison")
        topics.apply(topics.plan(spec, topics.read_actual(admin, spec.names, 30.0)), admin, 30.0)
        result = run(broker.bootstrap_servers, spec.names, partitions=_PARTITIONS, records=options.records, seed=options.seed)
    fed = sum(result.fed.records.values())
    print(f"{fed} records in {result.fed.batches} batches, {result.fed.groups} sound groups; refused {result.fed.refused}")
    print(f"read {result.read}, pending {result.pending}, resolved {result.resolved}")
    print(f"{result.letters} dead letters for {result.lettered_offsets} offsets")
    print(f"{result.seconds:.0f} s, the reader grew by {result.rss / 2**20:.0f} MiB at most")
    assert result.read == fed == sum(result.resolved.values())
    assert result.dead_lettered == result.lettered_offsets


if __name__ == "__main__":
    main()
