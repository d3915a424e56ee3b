"""With `learner.lora.publish: adapter` the base is stored once, stays as it is, and adapters alone travel from then on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from consumers.learner import Learner
from consumers.policy import AdapterBase, ControlWriter, PolicyPublisher
from echo import control
from echo.control import Announcement
from echo.weights import manifest as manifests
from echo.weights.chunks import ChunkFiles, StoredTensor
from echo.weights.manifest import HostTensor, Manifest
from echo.weights.store import WeightStore
from tests.fakes.log import FakeLog, FakeTransactions
from tests.unit.test_learner import make_batch, make_model, make_run

RUN = "run"


class Trainer:
    """A learner with adapters and its publisher, as one life of `echo-train` has them."""

    def __init__(self, model: str, store: WeightStore, log: FakeLog, newest: int, **weights: Any) -> None:
        self.learner = Learner(make_run(model, lora={"rank": 4, "alpha": 12, "publish": "adapter"}, **weights))
        self.publisher = PolicyPublisher(
            run_id=RUN,
            store=store,
            writer=ControlWriter(FakeTransactions(log, transactional_id=RUN), "control"),
            server_url="http://127.0.0.1:1",
            chunk_bytes=2**20,
            keep=2,
            newest=newest,
            delta_chain=1,
        )

    def publish(self, step: int) -> int:
        base = AdapterBase(self.learner.adapter_config, self.learner.base_tensors)
        tensors = self.learner.adapter_tensors()
        stored = self.publisher.store(step=step, tensors=tensors, adapts=base)
        return self.publisher.announce(stored, grants=lambda sequence: {}).version


pytestmark = pytest.mark.usefixtures("own_process")


def stored(store: WeightStore, version: int) -> tuple[Manifest, dict[str, torch.Tensor]]:
    manifest = manifests.decode(store.read_manifest(RUN, version)[0], where="test", run_id=RUN)
    files = ChunkFiles(store.root)
    return manifest, {
        entry.name: torch.frombuffer(StoredTensor(files, entry).read(0, entry.nbytes), dtype=torch.float32).reshape(entry.shape)
        for entry in manifest.tensors
    }


def merged(store: WeightStore, version: int) -> dict[str, torch.Tensor]:
    """The policy that a producer makes of an adapter version, by peft's definition: W + alpha / rank * B A."""
    manifest, adapter = stored(store, version)
    assert manifest.adapter is not None
    _, policy = stored(store, manifest.adapter.model_version)
    scale = manifest.adapter.config["lora_alpha"] / manifest.adapter.config["r"]
    for name, a in adapter.items():
        if name.endswith("lora_A.weight"):
            b = adapter[name.replace("lora_A", "lora_B")]
            policy[name.removeprefix("base_model.model.").replace("lora_A.", "")] += b @ a * scale
    return policy


def as_tensors(host: Iterator[HostTensor]) -> dict[str, torch.Tensor]:
    return {one.name: torch.frombuffer(bytearray(one.data), dtype=torch.float32).reshape(one.shape) for one in host}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-6, atol=1e-7)


def test_adapters_travel_alone_and_make_the_learners_policy(tmp_path: Path) -> None:
    """Version 0 is the base, never announced; each adapter version put on it is the policy that was trained. A restarted
    trainer finds the base by its bytes; another base gets a version of its own."""
    store, log = WeightStore(tmp_path / "store"), FakeLog()
    log.create_topic("control")
    model = make_model(tmp_path / "model")
    trainer = Trainer(model, store, log, newest=-1)
    assert trainer.publish(0) == 1
    base_digest = store.read_manifest(RUN, 0)[1]
    assert_equal(merged(store, 1), stored(store, 0)[1])
    for step in (1, 2):
        trainer.learner.step(make_batch(step), trainer.publisher.newest)
        assert trainer.publish(step) == 1 + step
        assert_equal(merged(store, 1 + step), as_tensors(trainer.learner.host_tensors()))
    assert not torch.equal(
        merged(store, 3)["model.layers.0.mlp.up_proj.weight"], stored(store, 0)[1]["model.layers.0.mlp.up_proj.weight"]
    )
    newest = stored(store, 3)[0]
    assert newest.adapter is not None
    assert (newest.kind, newest.adapter.model_digest) == ("adapter", base_digest)
    assert store.read_manifest(RUN, 0)[1] == base_digest
    assert store.verify() == []

    again = Trainer(model, store, log, newest=3)
    assert again.publish(2) == 4
    assert store.versions(RUN) == [0, 3, 4]
    other = Trainer(make_model(tmp_path / "other", tied=False), store, log, newest=4)
    assert other.publish(0) == 6
    assert stored(store, 6)[0].adapter.model_version == 5  # type: ignore[union-attr]

    messages = [control.decode_control(one.value, one.where) for one in log.records("control")]
    announced = [(message.version, message.nbytes) for message in messages if isinstance(message, Announcement)]
    assert [version for version, _ in announced] == [1, 2, 3, 4, 6]
    assert {nbytes for _, nbytes in announced} == {newest.nbytes}
