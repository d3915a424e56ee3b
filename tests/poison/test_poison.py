"""10,000 poisoned records between good groups, through a real broker into the trainer: it trains every good group, each
poisoned record ends with a right reason, the dead letters are the original bytes, and memory stays within its bound."""

import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from confluent_kafka import KafkaError, Message, Producer
from prometheus_client import CollectorRegistry

from consumers.ledger import OUTCOME_OF, Outcome, Reason
from consumers.wiring import Clients, kafka_clients, trainer_of
from echo import codec, dead_letter, journal, report, topics
from echo.broker import RunningBroker
from echo.config import RunConfig
from echo.kafka import KafkaLogAdmin
from echo.log import LogRecord
from echo.metrics import TrainerMetrics
from echo.process import StopSignal
from tests.helpers import RUN_ID, make_group
from tests.poison.fuzz import run as run_fuzz
from tests.poison.records import Poison, poisons
from tests.unit.test_learner import VOCABULARY, make_model

POISONS = 10_000
SEED = 20260
GROUP = 4
GOOD_GROUPS = 30
LAST_GROUPS = 2
GROUPS_PER_STEP = 2
# Half of it was seen. The poison claims lengths of 4 GB; the clients prefetch and queue at most 64 MiB each way.
RSS_BOUND_BYTES = 160 * 2**20

# Batches may unpack to 100 MB, and their letters are held whole until they are safe.
FUZZ_RSS_BOUND_BYTES = 600 * 2**20

pytestmark = pytest.mark.usefixtures("own_process")


class Sent(NamedTuple):
    """Where a record stands in the log."""

    poison: Poison
    where: tuple[int, int]


class Feeder:
    """Writes good groups and poison, and knows afterwards where each record stands."""

    def __init__(self, broker: RunningBroker, topic: str) -> None:
        self._topic = topic
        self._producer = Producer(
            {
                "bootstrap.servers": broker.bootstrap_servers,
                "compression.type": "lz4",
                "linger.ms": 20,
                "message.max.bytes": 2**24,
                "log_level": 2,
            }
        )
        self.sent: list[Sent] = []

    def put(self, poison: Poison) -> None:
        def report(error: KafkaError | None, message: Message) -> None:
            assert error is None, error
            self.sent.append(Sent(poison, (message.partition(), message.offset())))

        self._producer.produce(self._topic, key=poison.key, value=poison.value, headers=poison.headers, on_delivery=report)
        self._producer.poll(0)

    def put_good(self, number: int) -> list[Poison]:
        members = [codec.encode(member.trajectory) for member in make_group(GROUP, number=number).members]
        records = [Poison("good", r.key, list(r.headers), r.value, frozenset({"trained"})) for r in members]
        for record in records:
            self.put(record)
        return records

    def flush(self) -> None:
        assert self._producer.flush(30.0) == 0


def feed(feeder: Feeder) -> None:
    """Good groups spread over the poison; copies of their members, whole and broken, come later."""
    rng = random.Random(SEED)
    good: list[Poison] = []
    every = POISONS // GOOD_GROUPS
    made = 0
    for together in poisons(rng, vocabulary=VOCABULARY):
        while len(good) < GROUP * GOOD_GROUPS and made >= every * len(good) // GROUP:
            good += feeder.put_good(len(good) // GROUP)
        if rng.random() < 0.05:
            copied = rng.choice(good)
            value = rng.choice([copied.value, copied.value[:50], b"\x00" + copied.value])
            together.append(copied._replace(kind="copy", value=value, allowed=frozenset({"duplicate"})))
        for poison in together:
            feeder.put(poison)
        made += len(together)
        if made >= POISONS:
            break
    feeder.flush()


def make_run(broker: RunningBroker, prefix: str, model: str, folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_id": RUN_ID,
            "model": {"path": model},
            "max_staleness": 100,
            "broker": {"settings": {"bootstrap.servers": broker.bootstrap_servers}},
            "topics": {"prefix": prefix},
            # Half a group is given up after so long, which is how odd but sound poison ends.
            "batch": {"groups_per_step": GROUPS_PER_STEP, "group_deadline_s": 5.0},
            "learner": {"steps": (GOOD_GROUPS + LAST_GROUPS) // GROUPS_PER_STEP, "lr": 1e-3, "threads": 1},
            "checkpoint": {"dir": folder / "checkpoints", "every": 1000},
            "weights": {"dir": folder / "weights", "serve": False, "url": "http://127.0.0.1:1"},
        }
    )


def apply_topics(run: RunConfig) -> None:
    spec, admin = topics.of_run(run), KafkaLogAdmin(run.broker.settings, client_id="test")
    topics.apply(topics.plan(spec, topics.read_actual(admin, spec.names, 30.0)), admin, 30.0)


def records_of(clients: Clients, topic: str, partitions: int) -> list[LogRecord]:
    reader = clients.open_reader()
    try:
        return list(report.read_topic(reader, topic, partitions, deadline_s=30.0))
    finally:
        reader.close()


def test_poison_leaves_the_trainer_running(tansu: RunningBroker, topic_prefix: str, tmp_path: Path) -> None:
    run = make_run(tansu, topic_prefix, make_model(tmp_path / "tiny"), tmp_path)
    apply_topics(run)
    stop = StopSignal()
    clients = kafka_clients(run, stop=stop)
    feeder = Feeder(tansu, clients.topics.trajectories)
    feed(feeder)
    fed = len(feeder.sent)
    assert fed >= POISONS + GOOD_GROUPS * GROUP
    process, peak = psutil.Process(), 0
    with trainer_of(run, clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=stop) as trainer:
        intake = trainer._intake
        before = process.memory_info().rss

        def look() -> None:
            """Between two looks at the buffer: the last groups come once all that was sent is read and resolved."""
            nonlocal peak
            peak = max(peak, process.memory_info().rss - before)
            stats = intake.stats()
            if stats.read == len(feeder.sent) == fed and stats.pending == 0:
                for number in range(LAST_GROUPS):
                    feeder.put_good(GOOD_GROUPS + number)
                feeder.flush()

        trainer._check_children = look
        trainer.run()
    assert peak < RSS_BOUND_BYTES, peak
    assert intake.stats().pending == 0

    fates = report.fates(journal.read(run.checkpoint.dir / journal.FILE_NAME))
    wrong = [
        (sent.poison.kind, fates[sent.where].reason)
        for sent in feeder.sent
        if fates[sent.where].reason not in sent.poison.allowed
    ]
    assert not wrong, Counter(wrong)
    assert len(fates) == len(feeder.sent) == fed + LAST_GROUPS * GROUP

    counts = Counter(Reason(fate.reason) for fate in fates.values())
    assert intake.stats().resolved == counts
    assert counts[Reason.TRAINED] == (GOOD_GROUPS + LAST_GROUPS) * GROUP
    assert {Reason.CORRUPT, Reason.SCHEMA, Reason.FOREIGN_RUN, Reason.DUPLICATE, Reason.DEADLINE} < counts.keys()

    letters = [dead_letter.unwrap(record) for record in records_of(clients, clients.topics.dead_letter, 1)]
    topic = clients.topics.trajectories
    expected = {
        f"{topic}[{sent.where[0]}]@{sent.where[1]}": (
            fates[sent.where].reason,
            sent.poison.key,
            sent.poison.headers,
            sent.poison.value,
        )
        for sent in feeder.sent
        if OUTCOME_OF[Reason(fates[sent.where].reason)] is Outcome.DEAD_LETTERED
    }
    assert len(letters) == len(expected) > POISONS // 2
    assert {letter.origin: (letter.reason, letter.key, letter.headers, letter.value) for letter in letters} == expected


@pytest.mark.kafka
@pytest.mark.timeout(400)
def test_mutated_bytes_leave_the_reader_running(apache: RunningBroker, topic_prefix: str) -> None:
    """Records and batches as raw bytes: whatever the broker lets in is resolved once, and sound groups among it are trained.

    A million of them: `python -m tests.poison --records 1000000`.
    """
    spec, admin = (
        topics.load(prefix=topic_prefix),
        KafkaLogAdmin({"bootstrap.servers": apache.bootstrap_servers}, client_id="t"),
    )
    topics.apply(topics.plan(spec, topics.read_actual(admin, spec.names, 30.0)), admin, 30.0)
    result = run_fuzz(apache.bootstrap_servers, spec.names, partitions=8, records=10_000, seed=SEED)
    fed = sum(result.fed.records.values())
    assert (result.read, result.pending, sum(result.resolved.values())) == (fed, 0, fed)
    assert fed >= 10_000
    assert result.resolved["trained"] == GROUP * result.fed.groups
    assert result.lettered_offsets == result.dead_lettered
    assert {"corrupt", "schema", "unreadable", "foreign_run"} < result.resolved.keys()
    assert len(result.fed.refused) > 2
    assert result.rss < FUZZ_RSS_BOUND_BYTES, result.rss
