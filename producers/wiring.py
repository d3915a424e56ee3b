"""The real collaborators of the producer's loop, from a run file: broker, topics, weights, engine, tokenizer, task, scorer.

Refuses to start on a broker that does not answer or topics that do not fit: it says so and ends, and creates no topic.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

from echo.addresses import is_loopback, is_wildcard
from echo.agreement import model_files
from echo.config import RunConfig, WeightsConfig
from echo.errors import ConfigError
from echo.http_server import Tls
from echo.kafka import KafkaLogAdmin, KafkaLogProducer, KafkaLogReader
from echo.metrics import ProducerMetrics
from echo.model_path import check_model_path, unloadable
from echo.preflight import check_cluster
from echo.weights.client import WeightClient
from echo.weights.peers import PeerNode
from echo.weights.transport import Access
from producers.collaborators import Collaborators, Stop, Tokenizer
from producers.engines.registry import make_engine
from producers.produce import ProduceLoop
from producers.tasks.registry import make_task
from producers.tasks.scoring import ScorerPool

# Scoring is far cheaper than sampling; a second worker goes on while a first one runs into its time limit.
_SCORERS = 2


def produce(run: RunConfig, producer_id: str, *, metrics: ProducerMetrics, stop: Stop, metrics_url: str = "") -> str:
    """Be one producer of the run, to its end or to a stop; says which. Raises EchoError."""
    with collaborators(run, producer_id, stop=stop, metrics=metrics) as made:
        loop = ProduceLoop(run, producer_id, made, metrics=metrics, stop=stop, metrics_url=metrics_url)
        return loop.run()


@contextmanager
def collaborators(run: RunConfig, producer_id: str, *, stop: Stop, metrics: ProducerMetrics) -> Iterator[Collaborators]:
    """Open everything that the run file names, cheapest and likeliest to be wrong first; close it in reverse.

    Raises ConfigError, BrokerError, TopicError, TaskError, EngineError.
    """
    from transformers.utils.hub import cached_file

    client_id = f"echo-produce-{run.run_id}-{producer_id}"
    with ExitStack() as opened:
        task = make_task(run.task)
        # Before any Kafka client: none of them survives a fork.
        scorer = ScorerPool(task, workers=_SCORERS, timeout_s=run.task.scorer_timeout_s, memory_mib=run.task.scorer_memory_mib)
        opened.callback(scorer.close)
        tokenizer = load_tokenizer(run.model.path, chat=run.task.chat)
        spec, actual = check_cluster(run, client_id=client_id, stopping=stop.is_set)
        engine = make_engine(run)
        opened.callback(engine.close)
        # They started while the engine was built.
        scorer.wait_ready()
        settings = run.broker.settings
        producer = KafkaLogProducer(
            settings,
            client_id=client_id,
            max_record_bytes=run.limits.record_bytes,
            # The publisher keeps the bound; the client's own must not be met before it.
            queue_bytes=2 * max(run.producer.queue_bytes, run.limits.record_bytes),
            cluster_id=actual.cluster_id,
        )
        opened.callback(producer.close)
        weights = WeightClient(
            token=run.weights.token,
            tls_ca=run.weights.tls_ca,
            connect_timeout_s=run.weights.connect_timeout_s,
            read_timeout_s=run.weights.read_timeout_s,
            make_node=partial(_peer_node, run.weights, metrics) if run.weights.peers else None,
        )
        opened.callback(weights.close)
        yield Collaborators(
            topics=spec.names,
            topic_states=KafkaLogAdmin(settings, client_id=client_id).topics,
            producer=producer,
            open_reader=partial(
                KafkaLogReader,
                settings,
                client_id=client_id,
                max_record_bytes=run.limits.record_bytes,
                cluster_id=actual.cluster_id,
            ),
            weights=weights,
            engine=engine,
            tokenizer=tokenizer,
            task=task,
            scorer=scorer,
            model=model_files(run.model.path, cached_file),
        )


def _peer_node(weights: WeightsConfig, metrics: ProducerMetrics, access: Access) -> PeerNode:
    """What serves this producer's chunks to the others. Raises WeightsError, ConfigError."""
    if access.token is None and not is_loopback(weights.peer_host):
        raise ConfigError(
            f"weights.peer_host is {weights.peer_host!r} and there is no weights.token: set one, or use 127.0.0.1"
        )
    if is_wildcard(weights.peer_host) and weights.peer_url is None:
        raise ConfigError(f"weights.peer_host is {weights.peer_host!r}, which peers can't reach: set weights.peer_url as well")
    tls = Tls(weights.tls_cert, weights.tls_key) if weights.tls_cert is not None and weights.tls_key is not None else None
    return PeerNode(
        access,
        host=weights.peer_host,
        port=weights.peer_port,
        url=weights.peer_url,
        tls=tls,
        max_egress_bytes_per_s=weights.max_egress_bytes_per_s,
        sent=metrics.peer_sent_bytes.inc,
    )


def load_tokenizer(path: str, *, chat: bool) -> Tokenizer:
    """The model's tokenizer; with `chat`, one that puts each prompt into its chat template.

    Raises ConfigError where the folder or hub id has none, or the tokenizer has no template.
    """
    from transformers import AutoTokenizer

    check_model_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(unloadable(path, "gives no tokenizer", error)) from error
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        # What transformers makes of a folder without one, for some kinds of model: every prompt would be unknown, or empty.
        raise ConfigError(f"model.path: {path} has no tokenizer's files: put the model's there (tokenizer.json, ...)")
    if not chat:
        return cast("Tokenizer", tokenizer)
    if not tokenizer.chat_template:
        raise ConfigError(f"task.chat: the tokenizer of {path} has no chat template: set task.chat to false")
    return ChatTokenizer(tokenizer)


class ChatTokenizer:
    """A tokenizer whose prompts are a user's message, with the header of the assistant's answer after it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        prompt = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        # The template holds the special tokens already.
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text
