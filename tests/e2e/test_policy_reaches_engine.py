"""A producer samples from exactly the policy that the trainer published: learner, store, HTTP and engine are all real."""

from functools import partial
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from consumers.learner import Learner
from consumers.policy import ControlWriter, PolicyPublisher
from echo.broker import RunningBroker
from echo.config import RunConfig
from echo.kafka import KafkaLogReader, TransactionalProducer
from echo.metrics import ProducerMetrics
from echo.trajectory import Sampling
from echo.weights.client import WeightClient
from echo.weights.spawn import WeightServerProcess
from echo.weights.store import WeightStore
from producers.engines.registry import make_engine
from producers.policy import PolicyListener, PolicyPuller
from tests.conftest import CreateTopic
from tests.eventually import eventually
from tests.helpers import RUN_ID, make_group
from tests.tiny import END_IDS, VOCABULARY, save_tiny

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
TOKENS = 12
GREEDY = Sampling(max_tokens=TOKENS, top_k=1)


pytestmark = pytest.mark.usefixtures("own_process")


def greedy(learner: Learner) -> list[list[int]]:
    """What the learner's own model says, token by token, without a cache."""
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        while len(ids) < len(prompt) + TOKENS:
            with torch.no_grad():
                logits = learner._module(input_ids=torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
            if ids[-1] in END_IDS:
                break
        found.append(ids[len(prompt) :])
    return found


def test_the_engine_says_what_the_learner_says_after_every_version(
    tansu: RunningBroker, create_topic: CreateTopic, tmp_path: Path
) -> None:
    control = create_topic(tansu, "control")
    settings = {"bootstrap.servers": tansu.bootstrap_servers}
    run = RunConfig.model_validate(
        {
            "run_id": RUN_ID,
            "model": {"path": save_tiny(tmp_path / "model", tied=True)},
            "learner": {"lr": 3e-2, "threads": 1},
            "weights": {"dir": tmp_path / "weights", "port": 0, "token": "let-me-in"},
        }
    )
    learner, engine = Learner(run), make_engine(run)
    metrics = ProducerMetrics(RUN_ID, "p0", CollectorRegistry())
    open_reader = partial(KafkaLogReader, settings, client_id="p0", max_record_bytes=2**20)
    writer = ControlWriter(TransactionalProducer(settings, transactional_id=RUN_ID, client_id="trainer"), control)
    listener = PolicyListener(open_reader, control, run_id=RUN_ID, incarnation="p0.1").start()
    client = WeightClient(token=run.weights.token, connect_timeout_s=5, read_timeout_s=10)
    puller = PolicyPuller(listener, client, metrics=metrics, max_staleness=0, deadline_s=30).start()
    outputs = []
    try:
        with WeightServerProcess.start(run, tmp_path / "server.log") as server:
            publisher = PolicyPublisher(
                run_id=RUN_ID,
                store=WeightStore(run.weights.dir),
                writer=writer,
                server_url=server.url,
                chunk_bytes=4096,
                keep=2,
                newest=-1,
            )
            for step in range(4):
                stored = publisher.store(step=step, tensors=learner.host_tensors())
                version = publisher.announce(stored, grants=lambda sequence: {}).version
                policy = eventually(puller.take_policy, f"version {version} pulled ({puller.last_error})")
                engine.load(policy)
                assert engine.policy_version == version == step
                completions = engine.generate(PROMPTS, GREEDY)
                assert [c.token_ids for c in completions] == greedy(learner)
                assert {c.spans for c in completions} == {((0, version),)}
                outputs.append([c.token_ids for c in completions])
                tokens = torch.randint(3, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(step))
                members = [{"completion_ids": row.tolist()} for row in tokens]
                learner.step([make_group(4, number=step, members=members)], version)
    finally:
        puller.close()
        listener.close()
        writer.close()
        engine.close()
    # A test of equal outputs means something only where versions differ.
    assert len({str(output) for output in outputs}) > 1
