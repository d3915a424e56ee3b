"""What a launcher tells this process: which of how many ranks it is. Pure, and light: asked before anything heavy is loaded."""

from collections.abc import Mapping
from typing import NamedTuple

from echo.errors import ConfigError

COMMAND = "`accelerate launch --multi_gpu --num_processes N -m consumers.cli RUN_FILE`"

# torchrun and accelerate, then the kinds of mpirun that accelerate knows.
_NAMES = (
    ("RANK", "WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)


class Place(NamedTuple):
    rank: int
    ranks: int


def place(environ: Mapping[str, str]) -> Place:
    """This process's place among the ranks; (0, 1) where nobody launched several.

    Raises ConfigError where accelerate was asked for several and has started one.
    """
    for rank, ranks in _NAMES:
        if rank in environ and ranks in environ:
            return Place(int(environ[rank]), int(environ[ranks]))
    if "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_PORT" in environ:
        raise ConfigError(
            "accelerate launch was asked for several processes and has started one: without --multi_gpu it does. Use "
            f"{COMMAND}, also on CPUs"
        )
    return Place(0, 1)
