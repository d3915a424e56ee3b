"""Engines by the name that `producer.engine` of a run file gives them.

Refuses to import an engine that is not asked for: each brings its own heavy libraries.
"""

from collections.abc import Callable

from echo.config import RunConfig
from echo.errors import ConfigError
from producers.engines.base import Engine
from producers.params import nearest


def _transformers(run: RunConfig) -> Engine:
    from producers.engines.transformers import from_run

    return from_run(run)


ENGINES: dict[str, Callable[[RunConfig], Engine]] = {"transformers": _transformers}


def make_engine(run: RunConfig) -> Engine:
    """Build the engine that the run file names; it has no policy until its first `load`.

    Raises ConfigError for an unknown name or parameter, EngineError where the model can't be built.
    """
    build = ENGINES.get(run.producer.engine)
    if build is None:
        raise ConfigError(f"producer.engine: unknown engine {run.producer.engine!r}: {nearest(run.producer.engine, ENGINES)}")
    return build(run)
