"""Dead letters on their way to their topic: sent, tried again, and held until the broker has them.

A letter that would be larger than its topic takes is cut, as echo/dead_letter.py says, and once more if the broker refuses it
for its size all the same.

Refuses to give one up, and to grow: `full` says when so many wait that no more records may be read. Whatever keeps a letter
from being written (a broker that is away, a topic that is missing or takes only smaller records), its record stays
unresolved, so that a restart reads it again; training goes on with what can be read, and every refusal is logged with the
number of letters that wait. Only a producer that can't go on at all ends the trainer.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

import structlog

from consumers.intake import DeadLetter
from echo import dead_letter
from echo.errors import BrokerError
from echo.log import Delivery, LogProducer
from echo.waiting import Watch

log = structlog.get_logger("dead_letters")

# Letters without acknowledgement from which on reading stops. One read's worth may come on top.
MAX_LETTERS = 2000
MAX_BYTES = 64 * 2**20
# What a broker that refuses a letter for its size takes instead: any topic's default limit is above it.
SMALL_BYTES = 512 * 1024
# What was refused is sent again after so long, seconds.
RETRY_S = 5.0

# As the client and the broker name it.
_TOO_LARGE = "MSG_SIZE_TOO_LARGE"


class DeadLetters:
    """For one thread: reports come inside `send`'s and `flush`'s calls. `acknowledged` gets each letter that is safe.

    max_bytes: the largest letter that the topic takes.
    """

    def __init__(
        self,
        producer: LogProducer,
        topic: str,
        *,
        acknowledged: Callable[[DeadLetter], None],
        max_bytes: int | None = None,
        waiting_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._acknowledged = acknowledged
        self._max_bytes = max_bytes
        self._clock = clock
        self._unsent: deque[DeadLetter] = deque()
        # By place: letters that were refused for their size.
        self._small: set[tuple[int, int]] = set()
        self._refused: list[DeadLetter] = []
        self._refusal = ""
        self._retry_at = 0.0
        self._watch = Watch(f"topic {topic} to take dead letters", self._describe, limit_s=waiting_s, clock=clock)
        self.held = 0
        self.held_bytes = 0

    @property
    def full(self) -> bool:
        return self.held >= MAX_LETTERS or self.held_bytes >= MAX_BYTES

    def add(self, letters: Iterable[DeadLetter]) -> None:
        for letter in letters:
            log.warning("dead letter", where=letter.record.where, reason=letter.reason.value, detail=letter.detail)
            self._unsent.append(letter)
            self.held += 1
            self.held_bytes += _nbytes(letter)

    def send(self) -> None:
        """Send what waits as far as the producer takes it, and serve its reports. Raises BrokerError if it can't go on."""
        if self._refused and self._clock() >= self._retry_at:
            log.error("dead letters refused, trying again", count=len(self._refused), error=self._refusal)
            self._unsent.extend(self._refused)
            self._refused.clear()
        while self._unsent and self._hand_over(self._unsent[0]):
            self._unsent.popleft()
        # Also raises what ended the producer, which `_hand_over` takes for a refusal of one letter.
        self._producer.poll(0)
        if not self.held:
            self._watch.progress()
        self._watch.check()

    def flush(self, timeout_s: float) -> None:
        """Wait for reports; what is not acknowledged then stays unresolved."""
        self._producer.flush(timeout_s)

    def _hand_over(self, letter: DeadLetter) -> bool:
        """False where the producer's queue is full."""
        small = _place(letter) in self._small
        key, headers, value = dead_letter.wrap(
            letter.record, letter.reason.value, letter.detail, max_bytes=SMALL_BYTES if small else self._max_bytes
        )

        def report(delivery: Delivery) -> None:
            self._on_delivery(letter, delivery.error)

        try:
            return self._producer.send(self._topic, key=key, value=value, headers=headers, on_delivery=report)
        except BrokerError as error:
            self._refuse(letter, str(error))
            return True

    def _on_delivery(self, letter: DeadLetter, error: str | None) -> None:
        if error is not None:
            self._refuse(letter, error)
            return
        self.held -= 1
        self.held_bytes -= _nbytes(letter)
        self._small.discard(_place(letter))
        self._watch.progress()
        self._acknowledged(letter)

    def _refuse(self, letter: DeadLetter, error: str) -> None:
        if _TOO_LARGE in error and _place(letter) not in self._small:
            log.warning("dead letter too large, cutting it", where=letter.record.where, error=error)
            self._small.add(_place(letter))
            self._unsent.append(letter)
            return
        if not self._refused:
            self._retry_at = self._clock() + RETRY_S
        self._refusal = f"{letter.record.where}: {error}"
        self._refused.append(letter)

    def _describe(self) -> str:
        refusal = f"; the last refusal: {self._refusal}" if self._refusal else ""
        stop = "; no more records are read until it does" if self.full else ""
        return f"{self.held} letters of {self.held_bytes} bytes wait{refusal}{stop}"


def _place(letter: DeadLetter) -> tuple[int, int]:
    return letter.record.partition, letter.record.offset


def _nbytes(letter: DeadLetter) -> int:
    record = letter.record
    known, _ = record.known_headers()
    headers = sum(len(name) + len(value or b"") for name, value in known)
    return len(record.key or b"") + len(record.value or b"") + headers + dead_letter.OVERHEAD_BYTES
