"""Trainer and producer on a real Apache Kafka whose operator adds partitions, deletes records and deletes topics."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from consumers.groups import Member
from consumers.train import Trainer
from consumers.wiring import kafka_clients, trainer_of
from echo import codec, control, journal, report
from echo.broker import RunningBroker
from echo.config import RunConfig
from echo.control import ControlMessage
from echo.demo import make_topics
from echo.errors import CheckpointError, EchoError, TopicError
from echo.kafka import KafkaLogAdmin, KafkaLogProducer, KafkaLogReader
from echo.log import LogRecord
from echo.metrics import ProducerMetrics, TrainerMetrics
from echo.process import StopSignal
from echo.topic_spec import TopicNames
from echo.trajectory import Sampling
from producers.collaborators import Collaborators
from producers.engines.base import Completion, TakePolicy
from producers.produce import ProduceLoop
from tests.brokers import add_partitions, delete_before, delete_topic
from tests.conftest import CreateTopic
from tests.eventually import eventually
from tests.fakes.engine import FakeEngine, FakeScorer, FakeTask, FakeTokenizer, FakeWeights
from tests.helpers import RUN_ID, make_group
from tests.unit.test_topics_in_mid_run import once
from tests.unit.test_train_loop import GROUP, make_run, model_path

__all__ = ["model_path"]

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("own_process"), pytest.mark.timeout(120)]

RECORD_BYTES = 2**19
VOCABULARY = 24
DEADLINE_S = 60.0


class Kafka:
    """A run's topics on a broker: `trajectories` with two partitions."""

    def __init__(self, broker: RunningBroker, create_topic: CreateTopic, prefix: str, make: Callable[..., RunConfig]) -> None:
        self.broker = broker
        self.create_topic = create_topic
        self.names = TopicNames.with_prefix(prefix)
        self.settings = {"bootstrap.servers": broker.bootstrap_servers}
        self._make = partial(
            make,
            broker={"settings": self.settings},
            topics={"prefix": prefix},
            limits={"record_bytes": RECORD_BYTES, "waiting_s": 0.5},
        )
        create_topic(broker, "trajectories", partitions=2)
        make_topics(self.run(1))

    def run(self, steps: int, **sections: Any) -> RunConfig:
        return self._make(steps=steps, **sections)

    def send(self, members: Sequence[Member]) -> None:
        """By a client that knows the topic as it is now."""
        with closing(
            KafkaLogProducer(self.settings, client_id="t", max_record_bytes=RECORD_BYTES, queue_bytes=2**24)
        ) as producer:
            for member in members:
                key, headers, value = codec.encode(member.trajectory)
                assert producer.send(self.names.trajectories, key=key, value=value, headers=headers)
            assert producer.flush(DEADLINE_S) == 0

    def records(self, topic: str) -> list[LogRecord]:
        partitions = KafkaLogAdmin(self.settings, client_id="t").partitions(topic, DEADLINE_S)
        with closing(KafkaLogReader(self.settings, client_id="t", max_record_bytes=RECORD_BYTES)) as reader:
            return list(report.read_topic(reader, topic, partitions, deadline_s=DEADLINE_S))

    def messages(self) -> list[ControlMessage]:
        return [control.decode_control(record.value, record.where) for record in self.records(self.names.control)]

    def counts(self, run: RunConfig) -> report.Counts:
        lines = journal.read(run.checkpoint.dir / journal.FILE_NAME)
        trajectories, letters = self.records(self.names.trajectories), self.records(self.names.dead_letter)
        return report.count(RUN_ID, trajectories, letters, report.fates(lines))

    def train(self, run: RunConfig) -> None:
        with self.trainer(run) as trainer:
            trainer.run()

    @contextmanager
    def trainer(self, run: RunConfig, stop: StopSignal | None = None) -> Iterator[Trainer]:
        stop = stop or StopSignal()
        metrics = TrainerMetrics(RUN_ID, CollectorRegistry())
        with trainer_of(run, kafka_clients(run, stop=stop), metrics=metrics, stop=stop) as trainer:
            yield trainer


class Letters(FakeTokenizer):
    """Of the tiny model's vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCABULARY for letter in text]


class Sampler(FakeEngine):
    """Its tokens are of the tiny model's vocabulary."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, take_policy: TakePolicy | None = None
    ) -> list[Completion]:
        found = super().generate(prompts, sampling, take_policy=take_policy)
        return [one._replace(token_ids=[token % VOCABULARY for token in one.token_ids]) for one in found]


class Producer:
    """A producer in a thread, its engine a fake one: `error` is what ended it."""

    def __init__(self, kafka: Kafka, run: RunConfig) -> None:
        self.stop = threading.Event()
        self.error: EchoError | None = None
        self._log = KafkaLogProducer(kafka.settings, client_id="p", max_record_bytes=RECORD_BYTES, queue_bytes=2**24)
        made = Collaborators(
            topics=kafka.names,
            topic_states=KafkaLogAdmin(kafka.settings, client_id="p").topics,
            producer=self._log,
            open_reader=partial(KafkaLogReader, kafka.settings, client_id="p", max_record_bytes=RECORD_BYTES),
            weights=FakeWeights(),
            engine=Sampler(),
            tokenizer=Letters(),
            task=FakeTask(),
            scorer=FakeScorer(),
        )
        metrics = ProducerMetrics(RUN_ID, "p0", CollectorRegistry())
        self.loop = ProduceLoop(run, "p0", made, metrics=metrics, stop=self.stop)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.loop.run()
        except EchoError as error:
            self.error = error

    def close(self) -> None:
        self.stop.set()
        self.thread.join(DEADLINE_S)
        self._log.close()
        assert not self.thread.is_alive()


@pytest.fixture
def kafka(
    apache: RunningBroker,
    create_topic: CreateTopic,
    topic_prefix: str,
    model_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Kafka:
    monkeypatch.setattr("echo.topic_watch.LOOK_EVERY_S", 0.2)
    monkeypatch.setattr("echo.topic_watch.GONE_AFTER_S", 2.0)
    return Kafka(apache, create_topic, topic_prefix, partial(make_run, model_path, tmp_path))


def groups(numbers: range, version: int = 0) -> list[Member]:
    return [member for number in numbers for member in make_group(GROUP, number=number, policy_version=version).members]


def test_new_partitions_are_read_in_mid_run_and_after_a_restart(kafka: Kafka) -> None:
    """Of eight groups one half is written before the topic grows, and the other after it: they may stand in two partitions."""
    later = groups(range(4, 12))
    kafka.send(groups(range(4)))
    kafka.send(later[::2])

    def grow() -> None:
        add_partitions(kafka.broker, kafka.names.trajectories, 5)
        kafka.send(later[1::2])

    run = kafka.run(6)
    with kafka.trainer(run) as trainer:
        trainer._check_children = once(grow)
        trainer.run()
    assert kafka.counts(run) == report.Counts(12 * GROUP, 12 * GROUP, {}, 0, 0, 5)
    assert {record.partition for record in kafka.records(kafka.names.trajectories)} > {0, 1}
    add_partitions(kafka.broker, kafka.names.trajectories, 9)
    kafka.send(groups(range(12, 18), version=6))
    run = kafka.run(9)
    kafka.train(run)
    counts = kafka.counts(run)
    assert (counts.produced, counts.trained) == (18 * GROUP, 18 * GROUP)


def test_deleted_records_are_an_error_before_anything_is_announced_or_counted_as_lost(kafka: Kafka) -> None:
    kafka.send(groups(range(4)))
    kafka.train(kafka.run(2))
    kafka.send(groups(range(4, 14)))
    ends, read = dict.fromkeys(range(2), 0), dict.fromkeys(range(2), 0)
    for record in kafka.records(kafka.names.trajectories):
        ends[record.partition] = max(ends[record.partition], record.offset + 1)
    for line in journal.read(kafka.run(2).checkpoint.dir / journal.FILE_NAME):
        for number, spans in line["resolved"]["trained"].items():
            read[int(number)] = max(read[int(number)], spans[-1][1])
    number = max(read, key=lambda one: ends[one] - read[one])
    assert ends[number] - read[number] > GROUP
    delete_before(kafka.broker, (kafka.names.trajectories, number), read[number] + GROUP)
    before = kafka.messages()
    where = rf"{kafka.names.trajectories}\[{number}\] begins at offset {read[number] + GROUP}, and is read up to {read[number]}"
    with pytest.raises(CheckpointError, match=rf"{where}\. `echo-train RUN_FILE --accept-lost`"):
        kafka.train(kafka.run(4))
    assert kafka.messages() == before
    run = kafka.run(4, checkpoint={"accept_lost": True})
    kafka.train(run)
    counts = kafka.counts(run)
    assert (counts.produced, counts.trained, counts.dropped) == (14 * GROUP, 8 * GROUP, {"lost": GROUP})
    assert counts.pending == 5 * GROUP


@pytest.mark.parametrize("made_anew", [False, True])
@pytest.mark.parametrize("role", ["trajectories", "control", "requests"])
def test_a_topic_that_the_run_rests_on_ends_both_sides_with_its_name_and_the_remedy(
    kafka: Kafka, role: str, made_anew: bool
) -> None:
    """Deleted while both wait for each other."""
    mode = {"mode": "sequential"} if role == "requests" else {}
    run = kafka.run(1, batch={"groups_per_step": 1000}, producer={"flush_timeout_s": 5}).model_copy(update=mode)
    topic = getattr(kafka.names, role)
    producer = Producer(kafka, run)

    def delete() -> None:
        eventually(lambda: trainer._fleet.alive(), "the trainer hears of the producer")
        delete_topic(kafka.broker, topic)
        if made_anew:
            config = {"cleanup.policy": "compact"} if role == "control" else {}
            kafka.create_topic(kafka.broker, role, partitions=1 if role == "control" else 2, config=config)

    what = "was deleted and made anew" if made_anew else "was deleted"
    with closing(producer):
        with kafka.trainer(run) as trainer:
            trainer._check_children = once(delete)
            producer.thread.start()
            with pytest.raises(TopicError, match=rf"topic {topic} {what} in mid-run.*`echo-topics apply`"):
                trainer.run()
        producer.thread.join(DEADLINE_S)
        assert isinstance(producer.error, TopicError)
        assert f"topic {topic} {what} in mid-run" in str(producer.error)


def test_heartbeats_that_are_deleted_are_waited_for_aloud_and_received_again(kafka: Kafka) -> None:
    run = kafka.run(1, batch={"groups_per_step": 100_000, "producer_dead_s": 2.0}, producer={"heartbeat_s": 0.2})
    producer, stop = Producer(kafka, run), StopSignal()
    topic = kafka.names.heartbeats
    phase = 0

    def turn() -> None:
        nonlocal phase
        alive = trainer._fleet.alive()
        if phase == 0 and alive:
            delete_topic(kafka.broker, topic)
            phase = 1
        elif phase == 1 and not alive and any(f"topic {topic} does not exist any more" in entry["event"] for entry in said):
            kafka.create_topic(kafka.broker, "heartbeats")
            phase = 2
        elif phase == 2 and alive:
            stop.request()

    with capture_logs() as said, closing(producer), kafka.trainer(run, stop) as trainer:
        trainer._check_children = turn
        producer.thread.start()
        trainer.run()
    assert (phase, producer.error) == (2, None)


def test_a_run_that_starts_over_after_records_were_deleted_trains_with_the_producers_that_live(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have begun as many groups as they may, and the new trainer can't read these any more."""
    monkeypatch.setattr("consumers.fleet._SETTLED_S", 1.0)
    sections = {"producer": {"heartbeat_s": 0.2, "groups_per_call": 1}, "sampling": {"group_size": GROUP}}
    run, stop = kafka.run(1000, **sections), StopSignal()
    producer = Producer(kafka, run)

    def stop_soon() -> None:
        if trainer.step >= 2:
            stop.request()

    with closing(producer):
        with kafka.trainer(run, stop) as trainer:
            trainer._check_children = stop_soon
            producer.thread.start()
            trainer.run()
        eventually(lambda: producer.loop.state.startswith("waiting"), "the producer has begun what it may")
        assert producer.loop._window.outstanding >= producer.loop._window.grant.window
        for number in range(2):
            found = [record.offset for record in kafka.records(kafka.names.trajectories) if record.partition == number]
            delete_before(kafka.broker, (kafka.names.trajectories, number), max(found, default=-1) + 1)
        again = kafka.run(2, checkpoint={"resume": "never"}, **sections)
        with kafka.trainer(again) as trainer:
            trainer.run()
        assert trainer.step == 2
    assert producer.error is None
