"""The seam's clients where something is wrong: no broker, a replaced broker, wrong settings."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echo.broker import plan_broker, start_broker
from echo.errors import BrokerError, ConfigError
from echo.kafka import KafkaLogAdmin, KafkaLogProducer, KafkaLogReader, TransactionalProducer
from echo.log import BEGINNING, Delivery
from tests.conftest import CreateTopic
from tests.eventually import eventually

DEADLINE_S = 30.0


@pytest.fixture
def nobody() -> Iterator[dict[str, str]]:
    """Settings that lead to a port where nothing answers."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield {"bootstrap.servers": f"127.0.0.1:{held.getsockname()[1]}"}


def producer_for(settings: dict[str, str]) -> KafkaLogProducer:
    return KafkaLogProducer(settings, client_id="t", max_record_bytes=2**20, queue_bytes=2**20)


def repeat(action: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        action()


def test_closing_reports_what_was_never_sent(nobody: dict[str, str]) -> None:
    """Every record that was taken gets exactly one delivery report, with the reason; flush keeps its deadline before."""
    producer = producer_for(nobody)
    reports: list[Delivery] = []
    for _ in range(10):
        assert producer.send("topic", key=b"k", value=b"v", on_delivery=reports.append)
    began = time.monotonic()
    assert producer.flush(0.3) == 10
    assert time.monotonic() - began < 5.0
    assert reports == []
    producer.close()
    assert [(report.offset, report.error is None) for report in reports] == [(-1, False)] * 10
    assert "Connection refused" in producer.last_error or "brokers are down" in producer.last_error


def test_a_client_without_a_broker_closes_at_once(nobody: dict[str, str]) -> None:
    """And reading returns empty at its timeout: waiting for a broker is the caller's decision."""
    reader = KafkaLogReader(nobody, client_id="t", max_record_bytes=2**20)
    reader.assign({("topic", 0): 5})
    began = time.monotonic()
    assert reader.read(10, 0.3) == []
    assert not reader.at_end()
    assert reader.lag() == {("topic", 0): None}
    reader.close()
    assert time.monotonic() - began < 5.0


def test_a_readers_last_error_is_for_waits_while_it_is_recent(nobody: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that passed says nothing about a later wait."""
    reader = KafkaLogReader(nobody, client_id="t", max_record_bytes=2**20)
    reader.assign({("topic", 0): 5})
    said = eventually(lambda: reader.read(10, 0.1) or reader.last_error, "the client's error")
    assert "Connection refused" in said or "brokers are down" in said
    monkeypatch.setattr("echo.kafka.client._RECENT_S", -1.0)
    assert reader.last_error == ""
    reader.close()


def test_taking_over_keeps_its_deadline(nobody: dict[str, str]) -> None:
    """A retriable error that names the transactional id."""
    began = time.monotonic()
    with pytest.raises(BrokerError, match="taking over transactional id run-1") as caught:
        TransactionalProducer(nobody, transactional_id="run-1", client_id="t", timeout_s=1.0)
    assert caught.value.retriable
    assert time.monotonic() - began < 5.0


def test_the_admin_says_who_does_not_answer(nobody: dict[str, str]) -> None:
    with pytest.raises(BrokerError, match=nobody["bootstrap.servers"]) as caught:
        KafkaLogAdmin(nobody, client_id="t").partitions("topic", 0.3)
    assert caught.value.retriable


@pytest.mark.parametrize(
    "make",
    [
        producer_for,
        lambda settings: TransactionalProducer(settings, transactional_id="r", client_id="t"),
        lambda settings: KafkaLogReader(settings, client_id="t", max_record_bytes=2**20),
        lambda settings: KafkaLogAdmin(settings, client_id="t"),
    ],
    ids=["producer", "transactions", "reader", "admin"],
)
def test_a_wrong_setting_is_a_config_error(make: Callable[[dict[str, str]], object]) -> None:
    """It names the key, from whichever client is made first."""
    with pytest.raises(ConfigError, match=r"broker\.settings: .*sasl\.mechanismm"):
        make({"bootstrap.servers": "127.0.0.1:1", "sasl.mechanismm": "PLAIN"})


def test_any_client_setting_of_a_run_file_suits_every_client(nobody: dict[str, str]) -> None:
    """One section serves producers and readers: a producer's setting does not break a reader, a long delivery timeout not the
    transactions, a record limit above the client's own fetch limits not the reader."""
    settings = {
        **nobody,
        "delivery.timeout.ms": "600000",
        "fetch.wait.max.ms": "50",
        "acks": "all",
        "group.protocol": "classic",
    }
    producer_for(settings).close()
    KafkaLogReader(settings, client_id="t", max_record_bytes=200 * 2**20).close()
    KafkaLogAdmin(settings, client_id="t")
    with pytest.raises(BrokerError, match="taking over"):
        TransactionalProducer(settings, transactional_id="r", client_id="t", timeout_s=0.5)


def test_a_memory_broker_that_was_replaced_is_noticed(tmp_path: Path, create_topic: CreateTopic) -> None:
    """A broker with another cluster id under the same address: reader and producer stop and say that the records are gone,
    where Kafka's client keeps its position and gets nothing, in silence."""
    plan = plan_broker(environ={})
    with start_broker(plan, data_dir=tmp_path) as first:
        port = int(first.bootstrap_servers.split(":")[1])
        settings = {"bootstrap.servers": first.bootstrap_servers}
        topic = create_topic(first, "gone")
        producer = producer_for(settings)
        assert producer.send(topic, key=b"k", value=b"v")
        assert producer.flush(DEADLINE_S) == 0
        reader = KafkaLogReader(settings, client_id="t", max_record_bytes=2**20)
        reader.assign({(topic, 0): BEGINNING})
        assert len(reader.read(10, DEADLINE_S)) == 1
    with start_broker(plan, data_dir=tmp_path, port=port) as second:
        assert second.bootstrap_servers == first.bootstrap_servers
        expected = rf"cluster {second.cluster_id}, and it was {first.cluster_id} .* is gone"
        with pytest.raises(BrokerError, match=expected):
            repeat(lambda: reader.read(10, 0.2))
        with pytest.raises(BrokerError, match=expected):
            repeat(lambda: producer.poll(0.2))
        reader.close()
        producer.close()
