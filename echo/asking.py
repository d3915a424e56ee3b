"""A question to the broker that is repeated while a later answer may be better: at a start the broker may be restarting."""

from collections.abc import Callable
from typing import TypeVar

import tenacity

from echo.errors import BrokerError
from echo.waiting import Watch

T = TypeVar("T")

_PAUSE_S = 0.2


def ask_again(ask: Callable[[], T], what: str, *, patience_s: float, waiting_s: float) -> T:
    """The answer. Errors that may pass are waited for, `patience_s` in all; the wait logs `what` and the last error.

    waiting_s: how often. Raises what `ask` raises.
    """
    said = ""
    watch = Watch(what, lambda: said, limit_s=waiting_s)

    def note(state: tenacity.RetryCallState) -> None:
        nonlocal said
        said = str(state.outcome.exception()) if state.outcome is not None else ""
        watch.check()

    tries = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, BrokerError) and error.retriable),
        stop=tenacity.stop_after_delay(patience_s),
        wait=tenacity.wait_fixed(_PAUSE_S),
        before_sleep=note,
        reraise=True,
    )
    return tries(ask)
