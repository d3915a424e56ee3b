"""The real collaborators of the producer's loop, from a run file: broker, topics, weights, engine, tokenizer, task, scorer.

Refuses to start on a broker that does not answer or topics that do not fit: it says so and ends, and creates no topic.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

from echo.config import RunConfig
from echo.errors import ConfigError
from echo.kafka import KafkaLogProducer, KafkaLogReader
from echo.metrics import ProducerMetrics
from echo.preflight import check_cluster
from echo.weights.client import WeightClient
from producers.collaborators import Collaborators, Stop, Tokenizer
from producers.engines.registry import make_engine
from producers.produce import ProduceLoop
from producers.tasks.registry import make_task
from producers.tasks.scoring import ScorerPool

# Scoring is far cheaper than sampling; a second worker goes on while a first one runs into its time limit.
_SCORERS = 2


def produce(run: RunConfig, producer_id: str, *, metrics: ProducerMetrics, stop: Stop, metrics_url: str = "") -> str:
    """Be one producer of the run, to its end or to a stop; says which. Raises EchoError."""
    with collaborators(run, producer_id, stop=stop) as made:
        loop = ProduceLoop(run, producer_id, made, metrics=metrics, stop=stop, metrics_url=metrics_url)
        return loop.run()


@contextmanager
def collaborators(run: RunConfig, producer_id: str, *, stop: Stop) -> Iterator[Collaborators]:
    """Open everything that the run file names, cheapest and likeliest to be wrong first; close it in reverse.

    Raises ConfigError, BrokerError, TopicError, TaskError, EngineError.
    """
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
            connect_timeout_s=run.weights.connect_timeout_s,
            read_timeout_s=run.weights.read_timeout_s,
        )
        yield Collaborators(
            topics=spec.names,
            request_partitions=actual.topics[spec.names.requests].partitions,
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
        )


def load_tokenizer(path: str, *, chat: bool) -> Tokenizer:
    """The model's tokenizer; with `chat`, one that puts each prompt into its chat template.

    Raises ConfigError where the folder or hub id has none, or the tokenizer has no template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"model.path: {path} gives no tokenizer: {text[:300]}") from error
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
