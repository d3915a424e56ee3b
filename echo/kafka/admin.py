"""Questions to the cluster.

Refuses to change anything: echo/topics.py does, through `client`.
"""

from collections.abc import Iterable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from echo.addresses import authority
from echo.errors import BrokerError
from echo.kafka.client import CONSUMER_ONLY, PRODUCER_ONLY, ClientErrors, Settings, build, client_settings, wrap_error
from echo.log import Partition, TopicState


class KafkaLogAdmin:
    """See `LogAdmin`."""

    def __init__(self, settings: Settings, *, client_id: str) -> None:
        self._errors = ClientErrors(client_id)
        drop = (*PRODUCER_ONLY, *CONSUMER_ONLY)
        conf = client_settings(settings, {}, client_id=client_id, drop=drop)
        conf["error_cb"] = self._errors
        self._servers = conf.get("bootstrap.servers", "")
        self.client = build(AdminClient, conf)

    def cluster_id(self, timeout_s: float) -> str:
        return str(self.metadata(timeout_s).cluster_id)

    def nodes(self, timeout_s: float) -> dict[int, str]:
        return {number: authority(node.host, node.port) for number, node in self.metadata(timeout_s).brokers.items()}

    def partitions(self, topic: str, timeout_s: float) -> int:
        found = self.metadata(timeout_s).topics.get(topic)
        return len(found.partitions) if found is not None else 0

    def topics(self, names: Iterable[str], timeout_s: float) -> dict[str, TopicState]:
        # This request forbids the broker to create what it names.
        answers = self.client.describe_topics(TopicCollection(list(names)), request_timeout=timeout_s)
        found: dict[str, TopicState] = {}
        for name, answer in answers.items():
            try:
                # The client's own deadline comes first.
                topic = answer.result(timeout_s + 1.0)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise wrap_error(error.args[0], f"asking {self._servers} about topic {name}") from None
            except TimeoutError:
                raise BrokerError(f"no answer about topic {name} within {timeout_s:g} s", retriable=True) from None
            else:
                found[name] = TopicState(str(topic.topic_id), len(topic.partitions))
        return found

    def ends(self, timeout_s: float) -> dict[Partition, int]:
        """About how many records every partition holds: its log end. The embedded broker leaves out all but one of its last
        batch, so this is no base for lag."""
        asked = {
            TopicPartition(name, number): OffsetSpec.latest()
            for name, topic in self.metadata(timeout_s).topics.items()
            for number in topic.partitions
        }
        if not asked:
            return {}
        try:
            found = self.client.list_offsets(asked, request_timeout=timeout_s)
            return {(key.topic, key.partition): answer.result(timeout_s).offset for key, answer in found.items()}
        except KafkaException as error:
            raise wrap_error(error.args[0], f"asking {self._servers} for log ends") from None
        except TimeoutError:
            raise BrokerError(f"no log ends from {self._servers} within {timeout_s:g} s", retriable=True) from None

    def metadata(self, timeout_s: float) -> Any:
        """confluent-kafka's ClusterMetadata of all topics: naming one in the question makes some brokers create it."""
        try:
            return self.client.list_topics(timeout=timeout_s)
        except KafkaException as error:
            detail = f" ({self._errors.last})" if self._errors.last else ""
            raise BrokerError(
                f"no answer from {self._servers} within {timeout_s:.2g} s{detail}: is the broker up, and are "
                f"broker.settings right? [{error.args[0].name()}]",
                retriable=True,
            ) from None
