"""A process knows its place among the ranks from what launchers say, and nothing else."""

import pytest

from consumers.launched import place
from echo.errors import ConfigError


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, (2, 3)),
        # One of them alone is somebody else's: nobody must follow a leader that is not there.
        ({"RANK": "1"}, (0, 1)),
        ({"WORLD_SIZE": "8"}, (0, 1)),
        # accelerate's one process, as it is meant.
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, (0, 1)),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}, (0, 2)),
    ],
)
def test_a_place_is_what_both_variables_say(environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert place(environment) == expected


def test_one_process_where_several_were_asked_for_is_an_error() -> None:
    """What `accelerate launch --cpu --num_processes 2` leaves in the environment of the one process that it starts."""
    with pytest.raises(ConfigError, match="has started one: without --multi_gpu it does"):
        place({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"})
