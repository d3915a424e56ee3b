"""Batches that the client can't read, passed over: the reader gets their offsets instead, once it is known where they end.

The client reports such a batch by its first offset, again and again, or asks for it in silence for ever; no restart would get
past it. Offsets inside and after it are sought, and what comes from each says where it ends (echo/kafka/batch_end.py). Until
then the partition's messages are left out: all that follow the batch are read anew.

Refuses to pass over what was only late: a batch that the client is silent about is unreadable only if its broker answers, and
if there is silence again after something else was read. For the thread that reads alone.
"""

import time
from collections.abc import Callable, Iterable, Mapping

import structlog
from confluent_kafka import Consumer, KafkaException, TopicPartition

from echo.kafka.batch_end import BatchEnd
from echo.log import LogRecord, Partition

log = structlog.get_logger("kafka")

# A reader of committed records gets no event for an offset that an open transaction holds back. After so long, it is taken for
# one that is outside of the batch; if it was inside, the rest of the batch is reported anew.
_HIDDEN_S = 10.0
# A partition that gives nothing for so long although its log goes on is looked into: its leader is asked anything else, on the
# connection on which records come. When it has answered, it has answered what was asked for before, too.
_STALLED_S = 5.0
_ANSWER_S = 1.0
# From seeking an offset until the client has asked the broker for its records.
_SOUGHT_S = 1.0


class _Batch:
    """first: as the client reports it. high: the log's end when the search began. asked: the offset that was sought last; None:
    none was yet.

    silent: the client does not report it. Then its first offset is asked for once more before its end is looked for, and again
    after it was found: while it is in doubt, anything that comes is the batch, which was only late.
    """

    def __init__(self, first: int, problem: str, search: BatchEnd, high: int, *, silent: bool) -> None:
        self.first = first
        self.high = high
        self.problem = problem
        self.search = search
        self.silent = silent
        self.doubted = silent
        self.verified = not silent
        self.asked: int | None = None
        self.asked_at = 0.0


class PassingOver:
    """See the module. What returns a LogRecord gives the offsets of a batch whose end is known; reading resumes after it."""

    def __init__(self, consumer: Consumer, *, committed: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._consumer = consumer
        self._clock = clock
        self._committed = committed
        self._batches: dict[Partition, _Batch] = {}
        self._seeks: dict[Partition, int] = {}
        self._still: dict[Partition, tuple[int, float]] = {}

    def clear(self) -> None:
        """Other partitions are assigned, or the same anew."""
        self._batches, self._seeks, self._still = {}, {}, {}

    def __bool__(self) -> bool:
        """Whether any partition's messages are left out."""
        return bool(self._batches or self._seeks)

    def holds(self, partition: Partition) -> bool:
        """Whether messages of this partition are left out: hand them to `came`."""
        return partition in self._batches or partition in self._seeks

    def reported(self, partition: Partition, first: int, position: int | None, problem: str) -> LogRecord | None:
        """The client reports a batch, by its first offset. position: the next offset that the reader lacks, if it is known."""
        batch = self._batches.get(partition)
        if partition in self._seeks:
            return None
        if batch is None:
            self._begin(partition, first, position, problem, silent=False)
            return None
        return self._answer(partition, batch, None if first <= batch.first else first)

    def came(self, partition: Partition, offset: int | None) -> LogRecord | None:
        """A record or the end of the log came, at `offset`; None: a record that lies about where it stands."""
        if partition in self._seeks:
            # From before the seek.
            return None
        return self._answer(partition, self._batches[partition], offset)

    def resume(self, partition: Partition, offset: int) -> None:
        """Read on from here: what comes before the next `go_on` is left out."""
        self._seeks[partition] = offset

    def look_into(self, partitions: Iterable[Partition], positions: Mapping[Partition, int]) -> dict[Partition, int]:
        """Called now and then: those of these partitions that give nothing although their log goes on, with their positions.

        The search for the end begins, but not for a reader of committed records: it can't tell such a batch from records that
        an open transaction hides.
        """
        still: dict[Partition, int] = {}
        now, before, self._still = self._clock(), self._still, {}
        for partition in partitions:
            low, high = self._consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
            position = positions.get(partition, low)
            if self.holds(partition) or not 0 <= position < high:
                continue
            known, since = before.get(partition, (-1, now))
            self._still[partition] = (position, since if known == position else now)
            if known == position and now - since >= _STALLED_S:
                still[partition] = position
                if not self._committed:
                    problem = "the client gives nothing of it, and no error"
                    self._begin(partition, position, position, problem, silent=True)
        self.seek()
        return still

    def go_on(self, paused: Iterable[Partition]) -> list[LogRecord]:
        """Called after every read: seek what is to be asked next, and draw conclusions from silence."""
        now, waits = self._clock(), set(paused)
        found: list[LogRecord] = []
        for partition, batch in list(self._batches.items()):
            if partition in waits or batch.asked is None:
                batch.asked_at = now
            if not batch.silent and batch.search.ask is None:
                record: LogRecord | None = self._finish(partition, batch)
            else:
                record = None if partition in self._seeks else self._hear_silence(partition, batch, now)
            if record is not None:
                found.append(record)
        self.seek()
        return found

    def seek(self) -> None:
        for partition, offset in list(self._seeks.items()):
            try:
                self._consumer.seek(TopicPartition(*partition, offset))
            except KafkaException as error:
                # The client has just lost the partition's leader, or has not found it yet.
                log.info("seeking failed, trying again", partition=partition, offset=offset, error=str(error.args[0]))
                continue
            del self._seeks[partition]
            if (batch := self._batches.get(partition)) is not None:
                batch.asked, batch.asked_at = offset, self._clock()

    def _begin(self, partition: Partition, first: int, position: int | None, problem: str, *, silent: bool) -> None:
        low, high = self._consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
        begin = max(first, low, first if position is None else position)
        # Silence must end somewhere, at the latest at the log's end, which is asked for, too: else nothing can be read at all.
        search = BatchEnd(begin, high + 1 if silent else high)
        batch = self._batches[partition] = _Batch(first, problem, search, high, silent=silent)
        if silent:
            self._seeks[partition] = begin
        else:
            self._look_for_end(partition, batch)

    def _look_for_end(self, partition: Partition, batch: _Batch) -> None:
        batch.doubted = False
        if batch.search.ask is not None:
            self._seeks[partition] = batch.search.ask
            where = f"{partition[0]}[{partition[1]}]@{batch.search.first}"
            log.warning("a batch can't be read, looking for its end", where=where, error=batch.problem)

    def _verify(self, partition: Partition, batch: _Batch) -> None:
        batch.doubted = batch.verified = True
        self._seeks[partition] = batch.search.first

    def _answer(self, partition: Partition, batch: _Batch, beyond: int | None) -> LogRecord | None:
        """What came from the offset asked for: the same batch (None), or something else, which begins at `beyond`."""
        search = batch.search
        if batch.doubted:
            # It can be read, and was only late.
            self._leave(partition, batch)
            return None
        if search.ask is not None:
            search.inside() if beyond is None else search.beyond(beyond)
        if search.ask is not None:
            self._seeks[partition] = search.ask
        elif batch.verified:
            return self._finish(partition, batch)
        elif search.end > batch.high:
            self._leave(partition, batch)
        else:
            self._verify(partition, batch)
        return None

    def _leave(self, partition: Partition, batch: _Batch) -> None:
        """Nothing is passed over."""
        del self._batches[partition]
        self._seeks[partition] = batch.search.first

    def _hear_silence(self, partition: Partition, batch: _Batch, now: float) -> LogRecord | None:
        if now - batch.asked_at < (_SOUGHT_S if batch.silent else _HIDDEN_S):
            return None
        if not batch.silent:
            return self._answer(partition, batch, batch.asked) if self._committed else None
        if not self._broker_answers(partition):
            return None
        if not batch.doubted:
            return self._answer(partition, batch, None)
        if batch.verified:
            return self._finish(partition, batch)
        self._look_for_end(partition, batch)
        return None

    def _broker_answers(self, partition: Partition) -> bool:
        try:
            self._consumer.get_watermark_offsets(TopicPartition(*partition), _ANSWER_S, cached=False)
        except KafkaException:
            return False
        return True

    def _finish(self, partition: Partition, batch: _Batch) -> LogRecord:
        del self._batches[partition]
        topic, number = partition
        first, end = batch.search.first, batch.search.end
        problem = f"the batch of offsets {first} to {end - 1} can't be read: {batch.problem}"
        log.warning("passed over", where=f"{topic}[{number}]@{first}", error=problem)
        self._seeks[partition] = end
        return LogRecord(topic, number, first, None, (), None, 0, problem, end - first)
