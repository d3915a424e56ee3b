"""What Echo's own work costs on the way of the records: the same bytes, on the same broker, with and without Echo.

    python tests/benchmarks/datapath.py [--json out.json] [--records 20000] [--repetitions 7]

Runs on the embedded Tansu and, where there is a home (KAFKA_HOME or ../shared/kafka) and Java, on Apache Kafka after a
warm-up. A record has 256 prompt and 1,024 completion tokens with float32 logprobs; eight of a group share their prompt.

    datapath_ratio          bare time / Echo's time, each for writing all records and then reading them. Echo: `Publisher`
                            (encoding, byte bound, delivery reports), then `TrajectoryReader` and `Intake` (header filter,
                            duplicates, ledger, decoding, groups, batches). Bare: confluent-kafka's produce() of the encoded
                            records without reports, then consume(100), with the same client settings. At least 0.85.
                            From the making of a client to the last record. A bare client lets half a second pass before
                            its first record, Echo's does not (`find_leaders`): that is a part of this ratio.
    steady_ratio            the same, against bare clients that ask for their leaders first, as Echo's do: what Echo costs
                            per record in a long run. No target: it is the price of Python at 40 us a record
    stale_drop_us           time to read and drop a record that its headers call stale, above consumption by such a bare
                            client; at most 2. Per record: from the first one read to the last, since a client's start takes
                            50 ms more or less by chance, which is more than is asked here
    bytes_per_token         bytes that the producer's sockets sent / (prompt and completion tokens); at most 6.4
    consumer_cpu_s_per_10k  CPU seconds of the reading process, all its threads, per 10,000 records

Writing and reading are timed one after the other: they run on different machines in earnest. Bare and Echo alternate, what is
told is the median over the repetitions (of stale_drop_us over all its pairs of reads), and at the top of the JSON the worse of
the brokers. The last line says what falls short; the exit status is then 1. Refuses to judge throughput in MB/s, which is the
machine's.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from prometheus_client import CollectorRegistry

from consumers.intake import Intake
from consumers.ledger import Ledger, Reason
from consumers.reader import TrajectoryReader
from echo import codec
from echo.broker import BrokerPlan, RunningBroker, plan_broker, start_broker
from echo.errors import BrokerError
from echo.kafka import KafkaLogProducer, KafkaLogReader
from echo.kafka import producer as kafka_producer
from echo.kafka import reader as kafka_reader
from echo.kafka.client import CONSUMER_ONLY, PRODUCER_ONLY, client_settings
from echo.log import BEGINNING, LogRecord
from echo.metrics import ProducerMetrics
from echo.trajectory import Sampling, Trajectory, group_id, trajectory_id
from producers.publisher import Publisher

ROOT = Path(__file__).resolve().parents[2]
RUN_ID = "benchmark"
PROMPT, COMPLETION = 256, 1024
GROUP = 8
GROUPS_PER_STEP = 32
VOCABULARY = 151_936
PARTITIONS = 8
QUEUE_BYTES = 256 * 2**20  # As echo-produce has it by default
RECORD_BYTES = 16 * 2**20
DEADLINE_S = 120.0
STALE_READS = 4
# Token arrays made; records share them at a distance of some 30 MB, far beyond what a compressor looks back.
POOL = 4096

TARGETS = {
    "datapath_ratio": (0.85, "at least"),
    "stale_drop_us": (2.0, "at most"),
    "bytes_per_token": (6.4, "at most"),
}


class Timed(NamedTuple):
    wall_s: float
    cpu_s: float


class Clock:
    """Wall and CPU seconds of this process, all threads, since it was made or started again."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> Timed:
        return Timed(time.perf_counter() - self._wall, time.process_time() - self._cpu)


def make_groups(records: int) -> list[list[Trajectory]]:
    """Token ids follow Zipf's law over the vocabulary; logprobs are those of a policy that is mostly sure of its tokens."""
    rng = np.random.default_rng(7)
    weights = 1.0 / np.arange(1, VOCABULARY + 1)
    cumulative = np.cumsum(weights / weights.sum())

    def ids(rows: int, length: int) -> Any:
        return np.searchsorted(cumulative, rng.random((rows, length))).clip(0, VOCABULARY - 1).astype(np.int32)

    completions = ids(POOL, COMPLETION)
    logprobs = -rng.gamma(0.35, 1.2, (POOL, COMPLETION)).astype(np.float32)
    prompts = ids(POOL // GROUP, PROMPT)
    mask = np.ones(COMPLETION, np.bool_)
    groups = []
    for number in range(records // GROUP):
        group = []
        for index in range(GROUP):
            counter = number * GROUP + index
            group.append(
                Trajectory(
                    run_id=RUN_ID,
                    trajectory_id=trajectory_id(RUN_ID, "host-1.5f3a", counter),
                    group_id=group_id(RUN_ID, "host-1.5f3a", number),
                    group_size=GROUP,
                    group_index=index,
                    task="gsm_symbolic",
                    prompt_id=f"gsm_symbolic-{number}",
                    prompt_ids=prompts[number % len(prompts)],
                    completion_ids=completions[counter % POOL],
                    logprobs=logprobs[counter % POOL],
                    loss_mask=mask,
                    spans=((0, 10), (512, 11)),
                    reward=float(index % 2),
                    reward_components={"correct": float(index % 2), "format": 0.5},
                    finish_reason="stop",
                    sampling=Sampling(max_tokens=2048, seed=counter),
                    engine="vllm 0.12",
                    model="Qwen/Qwen3-4B",
                    producer_id="host-1",
                    sequence_number=counter,
                    started_at=1_700_000_000.0 + counter,
                    finished_at=1_700_000_010.0 + counter,
                )
            )
        groups.append(group)
    return groups


class FromFirst(KafkaLogReader):
    """Starts the clock when the first record is here."""

    clock: Clock | None = None

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        records = super().read(max_records, timeout_s)
        if records and self.clock is not None:
            self.clock.start()
            self.clock = None
        return records


class Bench:
    """One broker, its topics, and both ways over it."""

    def __init__(self, broker: RunningBroker, groups: list[list[Trajectory]], encoded: list[codec.EncodedRecord]) -> None:
        self._settings = {"bootstrap.servers": broker.bootstrap_servers}
        self._admin = AdminClient({**self._settings, "log_level": 2})
        self._groups = groups
        self._encoded = encoded
        self._topics = 0

    @contextlib.contextmanager
    def topic(self) -> Iterator[str]:
        self._topics += 1
        name = f"datapath-{self._topics}"
        new = NewTopic(name, num_partitions=PARTITIONS, replication_factor=1, config={"max.message.bytes": str(RECORD_BYTES)})
        self._admin.create_topics([new], operation_timeout=20.0)[name].result(30.0)
        try:
            yield name
        finally:
            self._admin.delete_topics([name], operation_timeout=20.0)[name].result(30.0)

    def bare_write(self, topic: str, *, ask_first: bool) -> Timed:
        conf = client_settings(self._settings, kafka_producer._PRODUCER_DEFAULTS, client_id="bare", drop=CONSUMER_ONLY)
        producer = Producer({**conf, "message.max.bytes": RECORD_BYTES, "queue.buffering.max.kbytes": QUEUE_BYTES // 1024})
        clock = Clock()
        if ask_first:
            producer.list_topics(topic, DEADLINE_S)
        for key, headers, value in self._encoded:
            while True:
                try:
                    producer.produce(topic, value=value, key=key, headers=headers)
                    break
                except BufferError:
                    producer.poll(0.01)
        left = producer.flush(DEADLINE_S)
        taken = clock.read()
        assert left == 0, f"{left} records were not acknowledged"
        return taken

    def bare_read(self, topic: str, *, ask_first: bool, from_first: bool = False) -> Timed:
        conf = client_settings(self._settings, kafka_reader._READER_DEFAULTS, client_id="bare", drop=PRODUCER_ONLY)
        consumer = Consumer(
            {**conf, "group.id": "bare", "fetch.message.max.bytes": RECORD_BYTES, "enable.partition.eof": False}
        )
        clock = Clock()
        if ask_first:
            consumer.list_topics(topic, DEADLINE_S)
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
        seen, end = 0, time.monotonic() + DEADLINE_S
        while seen < len(self._encoded):
            messages = consumer.consume(100, 0.1)
            if from_first and messages and not seen:
                clock.start()
            seen += sum(1 for message in messages if message.error() is None)
            assert time.monotonic() < end, f"{seen} records in {DEADLINE_S} s"
        taken = clock.read()
        consumer.close()
        return taken

    def echo_write(self, topic: str, **settings: Any) -> Timed:
        producer = KafkaLogProducer(
            {**self._settings, **settings}, client_id="echo", max_record_bytes=RECORD_BYTES, queue_bytes=QUEUE_BYTES
        )
        publisher = Publisher(
            producer,
            topic,
            metrics=ProducerMetrics(RUN_ID, "host-1", CollectorRegistry()),
            queue_bytes=QUEUE_BYTES,
            record_bytes=RECORD_BYTES,
        )
        clock = Clock()
        for group in self._groups:
            assert publisher.publish(group)
        publisher.flush(DEADLINE_S)
        taken = clock.read()
        publisher.close()
        assert publisher.acknowledged == len(self._encoded)
        producer.close()
        return taken

    def echo_read(self, topic: str, *, stale: bool) -> Timed:
        intake = Intake(
            run_id=RUN_ID,
            max_staleness=4,
            groups_per_step=GROUPS_PER_STEP,
            buffer_bytes=2**30,
            group_deadline_s=120.0,
            ledger=Ledger(range(PARTITIONS)),
            newest_version=100 if stale else 12,
            vocabulary=VOCABULARY,
        )
        dead_letters = KafkaLogProducer(
            self._settings, client_id="echo", max_record_bytes=RECORD_BYTES, queue_bytes=QUEUE_BYTES
        )
        log_reader = FromFirst(self._settings, client_id="echo", max_record_bytes=RECORD_BYTES)
        reader = TrajectoryReader(
            intake=intake,
            reader=log_reader,
            producer=dead_letters,
            topic=topic,
            partitions=lambda: PARTITIONS,
            frontiers=dict.fromkeys(range(PARTITIONS), BEGINNING),
            dead_letter_topic="none",
        )
        clock = Clock()
        log_reader.clock = clock if stale else None
        reader.start()
        end = time.monotonic() + DEADLINE_S
        whole_batches = len(self._groups) // GROUPS_PER_STEP * GROUPS_PER_STEP * GROUP
        done = len(self._encoded) if stale else whole_batches
        reason = Reason.STALE if stale else Reason.TRAINED
        while (stats := intake.stats()).read < len(self._encoded) or stats.resolved.get(reason, 0) < done:
            batch = intake.cut(0.005)
            if batch is not None:
                intake.trained(batch)
            intake.settle(with_state=False)
            reader.check()
            assert time.monotonic() < end, intake.stats()
        taken = clock.read()
        assert intake.stats().resolved == {reason: done}
        reader.close()
        dead_letters.close()
        return taken

    def stale_and_plain(self, topic: str, *, stale_first: bool) -> tuple[Timed, Timed]:
        """One read of all records as stale ones and a bare one, from the first record on, in this order or the other."""
        reads = [
            partial(self.echo_read, topic, stale=True),
            partial(self.bare_read, topic, ask_first=True, from_first=True),
        ]
        first, second = [run() for run in (reads if stale_first else reads[::-1])]
        return (first, second) if stale_first else (second, first)

    def bytes_on_the_wire(self, **settings: Any) -> int:
        """What the sockets of a producer send for all records, as its client counts it."""
        sent: list[int] = []

        def count(text: str) -> None:
            sent.append(sum(broker["txbytes"] for broker in json.loads(text)["brokers"].values()))

        with self.topic() as name:
            producer = KafkaLogProducer(
                {**self._settings, "statistics.interval.ms": 100, "stats_cb": count, **settings},
                client_id="echo",
                max_record_bytes=RECORD_BYTES,
                queue_bytes=QUEUE_BYTES,
            )
            for key, headers, value in self._encoded:
                while not producer.send(name, key=key, value=value, headers=headers):
                    producer.poll(0.01)
            assert producer.flush(DEADLINE_S) == 0
            told = len(sent)
            # The next count but one began after the last acknowledgement.
            while len(sent) < told + 2:
                producer.poll(0.1)
            producer.close()
        return sent[-1]


def measure(bench: Bench, records: int, repetitions: int, say: Callable[[str], None]) -> dict[str, float]:
    found: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value)

    for repetition in range(-1, repetitions):
        gc.collect()
        with bench.topic() as bare, bench.topic() as echo, bench.topic() as warm:
            steps: list[list[tuple[str, Callable[[], Timed]]]] = [
                [
                    ("bare_write", partial(bench.bare_write, bare, ask_first=False)),
                    ("echo_write", partial(bench.echo_write, echo)),
                    ("warm_write", partial(bench.bare_write, warm, ask_first=True)),
                ],
                [
                    ("bare_read", partial(bench.bare_read, bare, ask_first=False)),
                    ("echo_read", partial(bench.echo_read, echo, stale=False)),
                    ("warm_read", partial(bench.bare_read, warm, ask_first=True)),
                ],
            ]
            # What is compared runs one right after the other, in turns the one or the other first.
            times = {name: run() for together in steps for name, run in (together if repetition % 2 else together[::-1])}
            # A difference of few per cent wants more than one look, at the same batches.
            looks = [bench.stale_and_plain(warm, stale_first=bool(look % 2)) for look in range(STALE_READS)]
        if repetition < 0:
            continue  # a warm-up: of the broker's Java, of the page cache
        for stale, plain in looks:
            note(
                stale_drop_us=(stale.wall_s - plain.wall_s) / records * 1e6,
                stale_drop_cpu_us=(stale.cpu_s - plain.cpu_s) / records * 1e6,
                stale_read_s=stale.wall_s,
                plain_read_s=plain.wall_s,
            )
        wall = {name: timed.wall_s for name, timed in times.items()}
        note(
            datapath_ratio=(wall["bare_write"] + wall["bare_read"]) / (wall["echo_write"] + wall["echo_read"]),
            write_ratio=wall["bare_write"] / wall["echo_write"],
            read_ratio=wall["bare_read"] / wall["echo_read"],
            steady_ratio=(wall["warm_write"] + wall["warm_read"]) / (wall["echo_write"] + wall["echo_read"]),
            steady_write_ratio=wall["warm_write"] / wall["echo_write"],
            steady_read_ratio=wall["warm_read"] / wall["echo_read"],
            consumer_cpu_s_per_10k=times["echo_read"].cpu_s / records * 1e4,
            bare_consumer_cpu_s_per_10k=times["bare_read"].cpu_s / records * 1e4,
            publisher_cpu_s_per_10k=times["echo_write"].cpu_s / records * 1e4,
            bare_producer_cpu_s_per_10k=times["bare_write"].cpu_s / records * 1e4,
            **{f"{name}_s": value for name, value in wall.items()},
        )
        say(
            "  "
            + "  ".join(f"{name} {values[-1]:.2f}" for name, values in found.items() if name.endswith(("_s", "_ratio", "_us")))
        )
    result = {name: round(statistics.median(values), 3) for name, values in found.items()}
    result["bytes_per_token"] = round(bench.bytes_on_the_wire() / (records * (PROMPT + COMPLETION)), 3)
    return result


def plans() -> list[BrokerPlan]:
    """Tansu and, where it can be started, Apache Kafka."""
    home = os.environ.get("KAFKA_HOME") or str(ROOT.parent / "shared" / "kafka")
    found = [plan_broker(environ={})]
    try:
        found.append(plan_broker(environ={**os.environ, "KAFKA_HOME": home}))
    except BrokerError as error:
        print(f"no Apache Kafka: {error}")
    return found


def shortfalls(result: dict[str, Any]) -> list[str]:
    """One phrase per target that is missed."""
    return [
        f"{name} is {result[name]}, to be {bound} {target}"
        for name, (target, bound) in TARGETS.items()
        if (result[name] < target if bound == "at least" else result[name] > target)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--broker", choices=["tansu", "apache"], help="only this one")
    options = parser.parse_args(arguments)
    groups = make_groups(options.records)
    encoded = [codec.encode(trajectory) for group in groups for trajectory in group]
    # The records made above are no work for the collector while others are timed.
    gc.freeze()
    brokers: dict[str, dict[str, float]] = {}
    for plan in plans():
        if options.broker not in (None, plan.kind):
            continue
        with tempfile.TemporaryDirectory() as folder, start_broker(plan, data_dir=Path(folder)) as broker:
            print(broker.describe())
            brokers[plan.kind] = measure(Bench(broker, groups, encoded), len(encoded), options.repetitions, print)
        print(json.dumps(brokers[plan.kind]))
    worst: dict[str, Any] = {
        name: (min if name.endswith("_ratio") else max)(broker[name] for broker in brokers.values())
        for name in ("datapath_ratio", "steady_ratio", "stale_drop_us", "bytes_per_token", "consumer_cpu_s_per_10k")
    }
    result = {**worst, "records": len(encoded), "brokers": brokers}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    gc.unfreeze()
    missed = shortfalls(worst)
    print("falls short: " + "; ".join(missed) if missed else "all targets are met: " + json.dumps(worst))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
