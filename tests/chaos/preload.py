"""What every process of the kill tests would import first: imported once, in the process that forks them."""

import importlib

for _name in (
    "transformers.models.qwen3.modeling_qwen3",
    "uvicorn",
    "echo.weights.server",
    "tests.chaos.producer_process",
    "tests.chaos.trainer_process",
    "tests.chaos.weights_process",
):
    importlib.import_module(_name)
