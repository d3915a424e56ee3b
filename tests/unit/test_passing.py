"""A batch that the client is silent about is passed over, and one that was only late is not."""

from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from echo.kafka.passing import PassingOver
from echo.log import LogRecord

PLACE = ("t", 0)


class Client:
    """Of confluent-kafka's consumer what a search needs: the log holds offsets 0 to `high`; a clock that tests move."""

    def __init__(self, high: int) -> None:
        self.now = 0.0
        self.high = high
        self.sought: list[int] = []
        self.answers = True

    def clock(self) -> float:
        return self.now

    def get_watermark_offsets(self, place: TopicPartition, timeout_s: float = 0.0, *, cached: bool) -> tuple[int, int]:
        if not cached and not self.answers:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return 0, self.high

    def seek(self, place: TopicPartition) -> None:
        self.sought.append(place.offset)


def searching(client: Client, position: int = 4, *, committed: bool = False) -> PassingOver:
    """Nothing came from `position` for long enough."""
    passing: Any = PassingOver(client, committed=committed, clock=client.clock)  # type: ignore[arg-type]
    for client.now in (0.0, 6.0):
        still = passing.look_into([PLACE], {PLACE: position})
    assert still == {PLACE: position}
    return passing  # type: ignore[no-any-return]


def drive(client: Client, passing: PassingOver, comes: Callable[[int], int | None]) -> list[LogRecord]:
    """Until nothing is left out any more, at most ten minutes. comes: what an offset that is sought gives; None: silence."""
    found: list[LogRecord] = []
    while passing and client.now < 600.0:
        asked = client.sought[-1]
        if passing.holds(PLACE) and (offset := comes(asked)) is not None and (record := passing.came(PLACE, offset)):
            found.append(record)
        client.now += 0.5
        found += passing.go_on(())
    return found


def test_a_batch_that_gives_nothing_is_passed_over_once_its_end_is_known() -> None:
    client = Client(high=100)
    (run,) = drive(client, searching(client), lambda asked: None if asked < 9 else asked)
    assert (run.offset, run.span, run.unreadable != "") == (4, 5, True)
    assert client.sought[-1] == 9


def test_the_last_batch_of_the_log_is_passed_over() -> None:
    client = Client(high=9)
    (run,) = drive(client, searching(client), lambda asked: None if asked < 9 else asked)
    assert (run.offset, run.span) == (4, 5)


def test_what_was_only_late_is_read_from_where_it_stood() -> None:
    client = Client(high=100)
    passing = searching(client)
    assert client.sought == [4]
    assert drive(client, passing, lambda asked: asked) == []
    assert client.sought == [4, 4]


def test_what_is_late_until_its_end_was_found_is_read_all_the_same() -> None:
    """Its leader moved, say: everything was silent for a while, and then nothing is any more."""
    client = Client(high=100)
    passing = searching(client)
    assert drive(client, passing, lambda asked: None if client.now < 20.0 else asked) == []
    assert (client.sought[0], client.sought[-1], len(client.sought) > 4) == (4, 4, True)


def test_silence_up_to_the_logs_end_and_at_it_means_nothing() -> None:
    client = Client(high=100)
    passing = searching(client)
    assert drive(client, passing, lambda asked: None if client.now < 100.0 else asked) == []
    assert (100 in client.sought, client.sought[-1]) == (True, 4)


def test_silence_means_nothing_while_the_broker_does_not_answer() -> None:
    client = Client(high=100)
    passing = searching(client)
    client.answers = False
    assert drive(client, passing, lambda asked: None) == []
    assert client.sought == [4]


def test_a_reader_of_committed_records_searches_nothing_by_itself() -> None:
    """It can't tell such a batch from what an open transaction hides."""
    client = Client(high=100)
    assert not searching(client, committed=True)
    assert client.sought == []
