"""Publishing a policy, as the log sees it: when an announcement comes, what it announces can be pulled."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from consumers.policy import AdapterBase, ControlWriter, PolicyPublisher
from echo import control
from echo.control import Announcement
from echo.errors import WeightsError
from echo.weights import manifest as manifests
from echo.weights.manifest import HostTensor
from echo.weights.store import WeightStore

RUN = "run"


class Looking:
    """A `LogTransactions` that reads each policy that is announced at once, as a producer may."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.announced = 0
        self.pulled: list[dict[str, bytes]] = []

    def send(self, topic: str, messages: Sequence[tuple[bytes, bytes]]) -> None:
        for _, value in messages:
            message = control.decode_control(value, topic)
            assert isinstance(message, Announcement)
            self.announced += 1
            self.pulled.append(self._pull(message))

    def _pull(self, told: Announcement) -> dict[str, bytes]:
        store = WeightStore(self._folder)
        raw, digest = store.read_manifest(RUN, told.version)
        assert digest == told.manifest_digest
        manifest = manifests.decode(raw, where="test", run_id=RUN)
        if manifest.adapter is not None:
            assert store.read_manifest(RUN, manifest.adapter.model_version)[1] == manifest.adapter.model_digest
        return {
            entry.name: b"".join(
                store.chunk_path(piece.chunk.digest).read_bytes()[piece.start : piece.start + piece.nbytes]
                for piece in manifests.pieces(entry)
            )
            for entry in manifest.tensors
        }

    def close(self) -> None: ...


def make(folder: Path) -> tuple[PolicyPublisher, Looking]:
    log = Looking(folder)
    publisher = PolicyPublisher(
        run_id=RUN,
        store=WeightStore(folder),
        writer=ControlWriter(log, "control"),
        server_url="http://127.0.0.1:1",
        chunk_bytes=1024,
        keep=2,
        newest=-1,
        delta_chain=2,
    )
    return publisher, log


def tensor(seed: int) -> HostTensor:
    return HostTensor("w", "U8", (5000,), memoryview(np.random.default_rng(seed).bytes(5000)))


def publish(publisher: PolicyPublisher, *, step: int, tensors: list[HostTensor], adapts: AdapterBase | None = None) -> None:
    publisher.announce(publisher.store(step=step, tensors=tensors, adapts=adapts), grants=lambda sequence: {})


def test_what_is_announced_can_be_pulled_whole_at_that_moment(tmp_path: Path) -> None:
    publisher, log = make(tmp_path)
    for step in range(4):
        publish(publisher, step=step, tensors=[tensor(step)])
    assert log.pulled == [{"w": bytes(tensor(step).data)} for step in range(4)]


def test_an_announced_adapter_has_its_base_beside_it(tmp_path: Path) -> None:
    publisher, log = make(tmp_path)
    adapts = AdapterBase({}, lambda: [tensor(9)])
    publish(publisher, step=0, tensors=[tensor(0)], adapts=adapts)
    assert log.pulled == [{"w": bytes(tensor(0).data)}]


def test_what_could_not_be_stored_is_not_announced(tmp_path: Path) -> None:
    publisher, log = make(tmp_path)
    wrong = HostTensor("w", "U8", (6000,), tensor(0).data)
    with pytest.raises(WeightsError):
        publish(publisher, step=0, tensors=[wrong])
    assert (log.announced, publisher.newest) == (0, -1)
