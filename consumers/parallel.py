"""Ranks: one trainer as several processes, started by `accelerate launch`, and what they must agree on.

    accelerate launch --multi_gpu --num_processes 4 -m consumers.cli run.yaml

Rank 0 leads: it alone reads Kafka, serves, writes to disk and decides. The others follow: they wait for its next command, take
part in it, and wait again. So no rank can be in a collective that another one never enters: before every step all ranks have
agreed (one all-reduce) that there is one, that there is none yet, or that the run is over.

Refuses to wait for ever: every collective has `timeout_s`, and while rank 0 has nothing for the others it says that (`WAIT`,
from a thread of its own, so that a long pause of the trainer is no silence). Where a rank dies its connections close and the
others fail at once; one that hangs is noticed by the timeout. A job that lost a rank ends; it starts again from its checkpoint,
with as many ranks as one likes.

Refuses pickle: commands carry bytes, and say themselves what these are.
"""

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from types import TracebackType
from typing import Any, Literal, Self

import structlog
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from consumers.launched import COMMAND, place
from echo.background import Background
from echo.errors import ConfigError, RankError

log = structlog.get_logger("ranks")

Precision = Literal["float32", "bfloat16", "float16"]
Sharding = Literal["none", "full"]

_MIXED_PRECISION = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


class Command(IntEnum):
    """What all ranks do next. WAIT: nothing yet. FAILED: rank 0 gave up, and its own error says why."""

    WAIT = 0
    BUILD = 1
    STEP = 2
    PUBLISH = 3
    ADAPTERS = 4
    STATE = 5
    LOAD = 6
    END = 7
    FAILED = 8
    BASE = 9
    CANARY = 10


class Team:
    """The ranks of this trainer, as one of them sees them; one process is a team of one.

    timeout_s: how long a rank waits for the others in one collective.
    Raises ConfigError where `precision` does not fit this host, RankError where the others don't come.
    """

    def __init__(self, *, precision: Precision, timeout_s: float, sharding: Sharding = "none") -> None:
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
            raise ConfigError("how the model is sharded is the run file's: set learner.sharding, and launch without --use_fsdp")
        wanted = place(os.environ).ranks
        group = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))
        # Where there is no accelerator accelerate must be told that the CPU is meant, or each rank would be alone.
        on_cpu = {"cpu": True} if wanted > 1 and not torch.accelerator.is_available() else {}
        try:
            self.accelerator = Accelerator(mixed_precision=_MIXED_PRECISION[precision], kwargs_handlers=[group], **on_cpu)
        except ValueError as error:
            raise ConfigError(f"model.dtype {precision} can't be used here: {error}") from None
        except dist.DistError as error:
            raise RankError(f"the ranks did not find each other within {timeout_s:g} s: {error}") from error
        self.rank: int = self.accelerator.process_index
        self.size: int = self.accelerator.num_processes
        if self.size != wanted:
            raise ConfigError(f"{wanted} ranks were launched, and this one knows {self.size}: start them by {COMMAND}")
        self.device: torch.device = self.accelerator.device
        self.sharding: Sharding = sharding if self.size > 1 else "none"
        if precision == "float16" and self.accelerator.scaler is None:
            raise ConfigError("model.dtype float16 needs loss scaling, so a GPU: take bfloat16 or float32 on this host")
        if precision == "float16" and self.sharding != "none":
            raise ConfigError("learner.sharding and model.dtype float16 don't go together: take bfloat16")
        self._lock = threading.RLock()
        self._company = Background("ranks", self._keep_company)
        self._failure: BaseException | None = None
        self._mesh: DeviceMesh | None = None
        if self.size == 1:
            return
        # Commands go over gloo on the host, apart from the collectives of a step, which may be on GPUs.
        self._commands = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        if self.sharding != "none":
            self._mesh = init_device_mesh(self.device.type, (self.size,))
        if self.rank == 0:
            self._period_s = min(2.0, timeout_s / 5)
            self._company.start()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @contextmanager
    def together(self, command: Command, payload: Callable[[], bytes] = bytes) -> Iterator[None]:
        """What is inside is done by all ranks. Rank 0 tells the others first; they get here because `listen` gave the command.

        Raises RankError where another rank is gone, also out of a collective inside.
        """
        if self.size == 1:
            yield
            return
        data = payload() if self.leads else b""
        with self._lock:
            self.check()
            try:
                if self.leads:
                    self._exchange(command, data)
                yield
            except torch.OutOfMemoryError as error:
                self._failure = error
                raise
            except RuntimeError as error:  # What gloo and NCCL raise where the other side is gone.
                self._failure = error
                raise RankError(f"rank {self.rank} could not do {command.name} together with the others: {error}") from error
            except BaseException as error:  # Also a generator that was left in the middle of a gathering.
                self._failure = error
                raise

    def listen(self) -> tuple[Command, bytes]:
        """A follower's wait for what to do next. Raises RankError where rank 0 is gone or gave up."""
        command, payload = Command.WAIT, b""
        while command is Command.WAIT:
            try:
                command, payload = self._exchange(Command.WAIT, b"")
            except RuntimeError as error:
                raise RankError(f"rank {self.rank} lost rank 0 while it waited for the next step: {error}") from error
        if command is Command.FAILED:
            raise RankError(f"rank {self.rank} ends because rank 0 failed: its own error says why")
        return command, payload

    def check(self) -> None:
        """Raise RankError where another rank is known to be gone."""
        if self._failure is not None:
            raise RankError(f"another rank is gone, and the job ends with it: {self._failure}") from self._failure
        self._company.check()

    def close(self, *, failed: bool = False) -> None:
        """Rank 0 ends the others' wait, well or not. Nobody is left to be told where a collective was broken."""
        if self.size == 1 or self._company.stopping.is_set():
            return
        self._company.stopping.set()
        with self._lock:
            if self._failure is None:
                try:
                    if self.leads:
                        self._exchange(Command.FAILED if failed else Command.END, b"")
                    dist.destroy_process_group(self._commands)
                except RuntimeError as error:
                    log.warning("the ranks parted badly", rank=self.rank, error=str(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(failed=error is not None)
        if self.size > 1 and error is None:
            dist.destroy_process_group()

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks, on their device, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def from_leader(self, value: Tensor) -> Tensor:
        """Rank 0's tensor on the host, in place. To be called inside `together` alone."""
        if self.size > 1:
            dist.broadcast(value, src=0, group=self._commands)
        return value

    def level(self, module: nn.Module) -> None:
        """Give a module on the host rank 0's weights."""
        with torch.no_grad():
            for value in module.state_dict().values():
                self.from_leader(value)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module on its device, made to train on all ranks: sharded, or whole on each with gradients averaged.

        Sharding is in place: its parameters are other objects afterwards.
        """
        if self.size == 1:
            return module.to(self.device)
        if self._mesh is not None:
            return self.shard(module)
        device_ids = None if self.device.type == "cpu" else [self.device]
        # A causal model's buffers are constants. Newer torch has another name for it, and warns of the old one.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
        return DistributedDataParallel(
            module.to(self.device), device_ids=device_ids, init_sync=False, gradient_as_bucket_view=True, **buffers
        )

    def shard(self, module: nn.Module) -> nn.Module:
        """Split every parameter over the ranks: a layer at a time is whole while it computes."""
        if self._mesh is None:
            return module.to(self.device)
        layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not layers:
            log.warning("the model names no layers: it is gathered whole for each pass", model=type(module).__name__)
        for layer in layers:
            fully_shard(layer, mesh=self._mesh)
        fully_shard(module, mesh=self._mesh)
        return module

    def local(self, value: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a whole tensor that every rank has, laid out as `like` is."""
        if not isinstance(like, DTensor):
            return value.to(like.device)
        return distribute_tensor(value.to(self.device), like.device_mesh, like.placements, src_data_rank=None)

    def _keep_company(self) -> None:
        """Rank 0's word to the others, while its trainer has nothing for them."""
        while not self._company.stopping.wait(self._period_s):
            with self._lock:
                if self._company.stopping.is_set() or self._failure is not None:
                    return
                try:
                    self._exchange(Command.WAIT, b"")
                except RuntimeError as error:
                    self._failure = error
                    return

    def _exchange(self, command: Command, payload: bytes) -> tuple[Command, bytes]:
        """Rank 0's command and payload on all ranks. Every rank must be here: it is how the others are known to live."""
        header = torch.tensor([command, len(payload)] if self.leads else [0, 0], dtype=torch.int64)
        dist.all_reduce(header, group=self._commands)
        command, size = Command(int(header[0])), int(header[1])
        if size:
            data = (
                torch.frombuffer(bytearray(payload), dtype=torch.uint8) if self.leads else torch.empty(size, dtype=torch.uint8)
            )
            payload = self.from_leader(data).numpy().tobytes()
        return command, payload


def whole(value: Tensor) -> Tensor:
    """A sharded tensor gathered, any other as it is. All ranks gather, or none."""
    return value.full_tensor() if isinstance(value, DTensor) else value
