"""Before a process starts: the broker is waited for, and a wait that ends in vain says how long it was."""

import pytest

from echo import preflight
from echo.config import RunConfig
from echo.errors import BrokerError, ConfigError, StoppedError
from echo.preflight import check_cluster


def make_run(timeout_s: float = 0.3, **settings: str) -> RunConfig:
    return RunConfig.model_validate(
        {"run_id": "r", "model": {"path": "m"}, "broker": {"settings": settings, "timeout_s": timeout_s}}
    )


@pytest.mark.parametrize(("whole_s", "question_s"), [(0.3, "0.3"), (0.55, "0.2")])
def test_a_broker_that_does_not_answer_is_an_error_that_names_the_whole_wait(
    monkeypatch: pytest.MonkeyPatch, whole_s: float, question_s: str
) -> None:
    """And not how short the last question was, for which little time was left."""
    if whole_s > 0.3:
        monkeypatch.setattr(preflight, "_ASK_S", 0.2)
    run = make_run(whole_s, **{"bootstrap.servers": "127.0.0.1:1"})
    said = rf"127\.0\.0\.1:1 within {question_s} s: is the broker up.*; asked for broker\.timeout_s = {whole_s} s in all$"
    with pytest.raises(BrokerError, match=said):
        check_cluster(run, client_id="test", stopping=lambda: False)


def test_a_stop_ends_the_wait() -> None:
    run = make_run(3600.0, **{"bootstrap.servers": "127.0.0.1:1"})
    with pytest.raises(StoppedError, match="is the broker up"):
        check_cluster(run, client_id="test", stopping=lambda: True)


def test_a_run_file_without_a_broker_says_which_key() -> None:
    with pytest.raises(ConfigError, match=r"broker\.settings\.bootstrap\.servers is not set"):
        check_cluster(make_run(), client_id="test", stopping=lambda: False)
