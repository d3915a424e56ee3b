"""One of two ranks of the real `echo-train`, without a launcher. Arguments: rank, the port where they meet, the command's own.

Run by `tests.chaos.processes`.
"""

import os
import sys

import consumers.cli


def be_rank(rank: str, port: str) -> None:
    """What a launcher tells a rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""})


def main() -> None:
    be_rank(*sys.argv[1:3])
    del sys.argv[1:3]
    consumers.cli.main()
