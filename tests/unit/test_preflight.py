"""Before a process starts: the broker is waited for, and a wait that ends in vain says how long it was."""

import pytest

from echo.config import RunConfig
from echo.errors import BrokerError, ConfigError
from echo.preflight import check_cluster


def make_run(timeout_s: float = 0.3, **settings: str) -> RunConfig:
    return RunConfig.model_validate(
        {"run_id": "r", "model": {"path": "m"}, "broker": {"settings": settings, "timeout_s": timeout_s}}
    )


def test_a_broker_that_does_not_answer_is_an_error_that_names_the_whole_wait() -> None:
    run = make_run(**{"bootstrap.servers": "127.0.0.1:1"})
    with pytest.raises(BrokerError, match=r"127\.0\.0\.1:1 .*is the broker up.*broker\.timeout_s = 0\.3 s"):
        check_cluster(run, client_id="test", stopping=lambda: False)


def test_a_stop_ends_the_wait() -> None:
    run = make_run(3600.0, **{"bootstrap.servers": "127.0.0.1:1"})
    with pytest.raises(BrokerError, match="is the broker up"):
        check_cluster(run, client_id="test", stopping=lambda: True)


def test_a_run_file_without_a_broker_says_which_key() -> None:
    with pytest.raises(ConfigError, match=r"broker\.settings\.bootstrap\.servers is not set"):
        check_cluster(make_run(), client_id="test", stopping=lambda: False)
