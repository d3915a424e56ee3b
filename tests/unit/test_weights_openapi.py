"""The weight server answers what its OpenAPI schema says, whatever it is asked: schemathesis makes requests from the schema."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from echo.metrics import WeightsMetrics
from echo.weights.manifest import HostTensor
from echo.weights.server import WeightServer, create_app
from echo.weights.store import WeightStore

TOKEN = "s3cret-token"


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("store")
    store = WeightStore(folder)
    tensor = HostTensor("a", "U8", (5000,), memoryview(np.random.default_rng(0).bytes(5000)))
    store.publish("run", 3, 3, [tensor], chunk_bytes=4096, keep=2, created=1.5)
    app = create_app(store, token=SecretStr(TOKEN), metrics=WeightsMetrics(CollectorRegistry()))
    server = WeightServer(app, host="127.0.0.1", port=0).start()
    try:
        yield schemathesis.openapi.from_url(f"{server.url}/v1/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})
    finally:
        server.stop()


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_answers_are_what_the_schema_says(schema: Any, mode: schemathesis.GenerationMode) -> None:
    """Statuses, content types and bodies are documented, malformed input is refused, and nothing is a server error."""
    asked = set()
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"})
            asked.add(case.operation.label)

        try:
            check()
        except Unsatisfiable:
            # Nothing about a route without parameters can be malformed.
            assert mode is schemathesis.GenerationMode.NEGATIVE, operation.label
    assert len(asked) >= 4, asked
