"""From an announcement to an engine that samples from it: the whole way of a version, 100 times, for a small model.

Trainer's side: store (fsync), transactional announcement on the embedded Tansu. Weight server: a process of its own.
Producer's side: listener, puller, deltas, load into the transformers engine, canary-less. Every wait is for an event; what is
told is the time from the announcement's `created`, before anything is stored, to the engine's new `policy_version`.
"""

import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from confluent_kafka.admin import AdminClient, NewTopic
from prometheus_client import CollectorRegistry
from transformers import Qwen3Config, Qwen3ForCausalLM

from consumers.policy import ControlWriter, PolicyPublisher
from echo.broker import plan_broker, start_broker
from echo.config import RunConfig
from echo.kafka import KafkaLogReader, TransactionalProducer
from echo.metrics import ProducerMetrics
from echo.weights.client import WeightClient
from echo.weights.manifest import HostTensor
from echo.weights.spawn import WeightServerProcess
from echo.weights.store import WeightStore
from producers.engines.transformers import TransformersEngine
from producers.policy import PolicyListener, PolicyPuller

RUN_ID = "announce"
CONTROL = "control"
DEADLINE_S = 60.0


def save_model(folder: Path) -> Qwen3ForCausalLM:
    """0.6 million parameters, as a folder."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    return model


def updates(model: Qwen3ForCausalLM, count: int) -> Iterator[list[HostTensor]]:
    """The bf16 policy after steps that move each weight by 1e-6 to one side or the other, as AdamW's do."""
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        tensors = []
        for name, value in model.named_parameters():
            with torch.no_grad():
                value.add_(1e-6 * torch.randn(value.shape, generator=generator).sign())
            data = value.detach().bfloat16().contiguous().view(torch.uint8).numpy().tobytes()
            tensors.append(HostTensor(name, "BF16", tuple(value.shape), memoryview(data)))
        yield tensors


def announce_figures(folder: Path, *, count: int) -> dict[str, Any]:
    model = save_model(folder / "model")
    run = RunConfig.model_validate(
        {
            "run_id": RUN_ID,
            "model": {"path": str(folder / "model")},
            "weights": {"dir": folder / "weights", "port": 0, "dtype": "bfloat16"},
        }
    )
    engine = TransformersEngine(run.model.path, dtype="bfloat16", device="cpu")
    plan = plan_broker(environ={})
    with (
        start_broker(plan, data_dir=folder / "broker") as broker,
        WeightServerProcess.start(run, folder / "server.log") as server,
    ):
        settings = {"bootstrap.servers": broker.bootstrap_servers}
        admin = AdminClient(settings)
        admin.create_topics([NewTopic(CONTROL, num_partitions=1, replication_factor=1)])[CONTROL].result(30)
        writer = ControlWriter(TransactionalProducer(settings, transactional_id=RUN_ID, client_id="trainer"), CONTROL)
        reader = partial(KafkaLogReader, settings, client_id="p0", max_record_bytes=2**20)
        listener = PolicyListener(reader, CONTROL, run_id=RUN_ID, incarnation="p0.1").start()
        puller = PolicyPuller(
            listener,
            WeightClient(),
            metrics=ProducerMetrics(RUN_ID, "p0", CollectorRegistry()),
            max_staleness=4,
            deadline_s=DEADLINE_S,
        ).start()
        publisher = PolicyPublisher(
            run_id=RUN_ID,
            store=WeightStore(run.weights.dir),
            writer=writer,
            server_url=server.url,
            chunk_bytes=run.weights.chunk_bytes,
            keep=run.versions_kept,
            newest=-1,
            delta_chain=run.weights.delta_chain,
        )
        try:
            times = [_one(publisher, listener, puller, engine, step, one) for step, one in enumerate(updates(model, count + 1))]
        finally:
            puller.close()
            listener.close()
            writer.close()
    # The first one pulls the whole model, and opens everything.
    waits = [wait for wait, _ in times[1:]]
    stored = [seconds for _, seconds in times[1:]]
    return {
        "announce_p50_s": round(statistics.median(waits), 4),
        "announce_p95_s": round(statistics.quantiles(waits, n=20)[18], 4),
        "announce_store_p50_s": round(statistics.median(stored), 4),
        "announce_updates": count,
        "announce_broker": plan.kind,
    }


def _one(
    publisher: PolicyPublisher,
    listener: PolicyListener,
    puller: PolicyPuller,
    engine: TransformersEngine,
    step: int,
    tensors: list[HostTensor],
) -> tuple[float, float]:
    """Seconds to serving, and those of them until the announcement was out."""
    announcement = publisher.announce(publisher.store(step=step, tensors=tensors), grants=lambda sequence: {})
    announced = time.time()
    deadline = time.monotonic() + DEADLINE_S
    with listener.changed:
        while not puller.has_policy:
            if not listener.changed.wait(deadline - time.monotonic()):
                raise RuntimeError(f"version {announcement.version} is not there: {puller.last_error}")
    policy = puller.take_policy()
    assert policy is not None
    engine.load(policy)
    assert engine.policy_version == announcement.version
    return time.time() - announcement.created, announced - announcement.created
