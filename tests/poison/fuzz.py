"""Mutated records and batches as raw bytes, through a real broker into the trainer's reading: seam, intake, dead letters.

    outcome = run(servers, topics, records=1_000_000, seed=1)

A process of its own builds and sends the batches, so that memory is the reader's alone. The broker refuses some of them, which
is counted; what it lets in must be resolved.
"""

import itertools
import multiprocessing
import multiprocessing.connection
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import psutil

from consumers.intake import Intake
from consumers.ledger import Ledger, Outcome, Reason
from consumers.reader import TrajectoryReader
from echo import codec, dead_letter, report
from echo.kafka import KafkaLogProducer, KafkaLogReader
from echo.topic_spec import TopicNames
from tests.helpers import RUN_ID, make_group
from tests.poison import protocol
from tests.poison.protocol import GZIP, LZ4, NONE, SNAPPY, ZSTD, RawHeader, RawProducer, batch, bomb, record
from tests.poison.records import poisons

VOCABULARY = 24
RECORD_BYTES = 16 * 2**20
GROUP = 4
_POOL = 4000
_PER_BATCH = 120
_QUEUE_BYTES = 64 * 2**20
_DEADLINE_S = 120.0


class Fed(NamedTuple):
    """What was sent. records: those that the broker let in, by partition; refused: batches by error code."""

    records: dict[int, int]
    batches: int
    groups: int
    refused: dict[int, int]


class Result(NamedTuple):
    """What became of it. letters: records of the dead-letter topic; rss: bytes, how much the reader grew at most."""

    fed: Fed
    read: int
    pending: int
    resolved: dict[str, int]
    dead_lettered: int
    letters: int
    lettered_offsets: int
    rss: int
    seconds: float


class Parts(NamedTuple):
    key: bytes | None
    headers: list[RawHeader]
    value: bytes | None


def pool_of(rng: random.Random) -> list[Parts]:
    made = itertools.chain.from_iterable(poisons(rng, vocabulary=VOCABULARY))
    return [
        Parts(one.key, [(name.encode(), value) for name, value in one.headers], one.value)
        for one in itertools.islice((one for one in made if len(one.value or b"") < 2**16), _POOL)
    ]


def _flipped(rng: random.Random, raw: bytes, most: int = 4) -> bytes:
    if not raw:
        return raw
    out = bytearray(raw)
    for _ in range(rng.randint(1, most)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _record(rng: random.Random, pool: list[Parts], delta: int) -> bytes:
    """One of the pool with some of its bytes changed."""
    key, headers, value = rng.choice(pool)
    part = rng.random()
    if part < 0.4 and value:
        value = _flipped(rng, value)
    elif part < 0.7 and headers:
        headers = list(headers)
        at = rng.randrange(len(headers))
        name, content = headers[at]
        how = rng.random()
        if how < 0.4:
            headers[at] = (_flipped(rng, name or b"x"), content)
        elif how < 0.7:
            headers[at] = (name, _flipped(rng, content or b"x"))
        else:
            headers.insert(at, (rng.randbytes(rng.choice([0, 1, 8, 300])), rng.choice([None, b"", rng.randbytes(20)])))
    elif part < 0.8:
        key = rng.choice([None, b"", rng.randbytes(rng.choice([1, 20, 5000]))])
    extra: dict[str, Any] = {}
    if rng.random() < 0.02:
        extra["attributes"] = rng.randint(-128, 127)
    if rng.random() < 0.02:
        extra["timestamp_delta"] = rng.choice([-1, 2**40, -(2**40), 2**62])
    return record(value, key=key, headers=headers, offset_delta=delta, **extra)


def _lie(rng: random.Random, number: int) -> dict[str, Any]:
    """A claim of the batch that is not so."""
    return rng.choice(
        [
            {"count": number + rng.choice([-1, 1, 1000, -number, 2**31 - 1 - number])},
            {"last_offset_delta": rng.choice([-1, 0, number, 2**31 - 1])},
            {"crc": rng.getrandbits(32)},
            {"magic": rng.choice([0, 1, 3, 127, -1])},
            {"length": rng.choice([0, 5, 49, 10**6])},
            {"attributes": rng.getrandbits(15) & ~7},
            {"base_offset": rng.choice([-1, 1, 2**62])},
            {"timestamp": rng.choice([-1, 0, -(2**62)])},
            {"max_timestamp": rng.choice([-1, 0, 2**62])},
            {"producer": (rng.randint(-2, 2**40), rng.randint(-2, 100), rng.randint(-2, 100))},
        ]
    )


def any_batch(rng: random.Random, pool: list[Parts], bombs: list[bytes]) -> bytes:
    """A batch that may be damaged in one of many ways."""
    how = rng.random()
    if how < 0.002:
        return rng.choice(bombs)
    number = rng.randint(1, _PER_BATCH)
    packing = rng.choice([NONE, NONE, GZIP, SNAPPY, LZ4, ZSTD, ZSTD])
    deltas = list(range(number))
    if how < 0.04:
        deltas = rng.choice([[0] * number, deltas[::-1], [-delta for delta in deltas], [delta * 1000 for delta in deltas]])
    records = [_record(rng, pool, delta) for delta in deltas]
    if how < 0.06:
        records[-1] = record(
            b"v",
            offset_delta=number - 1,
            header_count=rng.choice([-1, 1, 5, 2**31]),
            tail=rng.randbytes(rng.choice([0, 3, 30])),
        )
    elif how < 0.08:
        records[-1] = record(b"v", offset_delta=number - 1, length=rng.choice([-1, 0, 1, 5, 2**31 - 1]))
    elif how < 0.12:
        body = protocol.pack(b"".join(records), packing)
        return batch(records, codec=packing, packed=_flipped(rng, body))
    elif how < 0.14:
        body = protocol.pack(b"".join(records), packing)
        cut = body[: rng.randrange(len(body))]
        return batch(records, codec=packing, packed=rng.choice([cut, body + b"trailing", body * 2, b"", b"\0" * 40]))
    elif how < 0.16:
        return batch(records, codec=rng.choice([5, 6, 7]), packed=b"".join(records))
    elif how < 0.18:
        return _flipped(rng, batch(records, codec=packing))
    elif how < 0.26:
        return batch(records, codec=packing, **_lie(rng, number))
    return batch(records, codec=packing)


def bombs_of_all_kinds() -> list[bytes]:
    """Readable but for the letter's size, and unreadable: of one offset and of many."""
    return [
        bomb(40 * 2**20, GZIP),
        bomb(20 * 2**20, LZ4, key=b"k" * 1000, headers=[(b"h", b"v" * 1000)]),
        bomb(30 * 2**20, ZSTD, headers=[(b"\xff", b"v")]),
        bomb(120 * 2**20, GZIP),
        bomb(101 * 10**6, ZSTD),
        bomb(150 * 2**20, ZSTD, span=50),
        bomb(110 * 2**20, LZ4, span=3),
    ]


def _good(number: int) -> bytes:
    """A whole group, sound: it must be trained."""
    members = [codec.encode(member.trajectory) for member in make_group(GROUP, number=number).members]
    return batch(
        [
            record(one.value, key=one.key, headers=[(name.encode(), value) for name, value in one.headers], offset_delta=at)
            for at, one in enumerate(members)
        ],
        codec=ZSTD,
    )


def feed(
    servers: str, topic: str, partitions: int, records: int, seed: int, done: "multiprocessing.connection.Connection"
) -> None:
    """Send until the broker has let in so many records; then say what was sent."""
    rng = random.Random(seed)
    pool, bombs = pool_of(rng), bombs_of_all_kinds()
    let_in, refused, batches, groups = Counter[int](), Counter[int](), 0, 0
    with RawProducer(servers) as raw:
        while let_in.total() < records:
            partition = rng.randrange(partitions)
            made = any_batch(rng, pool, bombs)
            whole = rng.random() < 0.01
            if whole:
                made, groups = _good(groups), groups + 1
            answer = raw.produce(topic, partition, made)
            if answer.error == 0:
                batches += 1
                # It has taken the header's word for it, having counted.
                let_in[partition] += int.from_bytes(made[57:61], "big")
            else:
                assert not whole, answer
                refused[answer.error] += 1
    done.send(Fed(dict(let_in), batches, groups, dict(refused)))


def run(servers: str, topics: TopicNames, *, partitions: int, records: int, seed: int) -> Result:
    """Feed and read at the same time, until all is resolved. Raises what ends the reader."""
    settings = {"bootstrap.servers": servers}
    intake = Intake(
        run_id=RUN_ID,
        max_staleness=100,
        groups_per_step=1,
        buffer_bytes=64 * 2**20,
        group_deadline_s=2.0,
        ledger=Ledger(range(partitions)),
        newest_version=0,
        vocabulary=VOCABULARY,
    )
    producer = KafkaLogProducer(
        settings,
        client_id="fuzz",
        max_record_bytes=RECORD_BYTES + dead_letter.OVERHEAD_BYTES,
        queue_bytes=_QUEUE_BYTES,
    )
    reader = TrajectoryReader(
        intake=intake,
        reader=KafkaLogReader(settings, client_id="fuzz", max_record_bytes=RECORD_BYTES, committed=False),
        producer=producer,
        topic=topics.trajectories,
        partitions=lambda: partitions,
        frontiers=dict.fromkeys(range(partitions), 0),
        dead_letter_topic=topics.dead_letter,
        max_letter_bytes=RECORD_BYTES + dead_letter.OVERHEAD_BYTES,
    )
    process, began, peak = psutil.Process(), time.monotonic(), 0
    before = process.memory_info().rss
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    feeder = context.Process(target=feed, args=(servers, topics.trajectories, partitions, records, seed, sending), daemon=True)
    feeder.start()
    reader.start()
    fed: Fed | None = None
    moved, last = time.monotonic(), -1
    try:
        while fed is None or (stats := intake.stats()).read < sum(fed.records.values()) or stats.pending > 0:
            for group in _batches(intake):
                intake.trained(group)
            intake.settle(with_state=False)
            peak = max(peak, process.memory_info().rss - before)
            reader.check()
            if fed is None and receiving.poll(0):
                fed = receiving.recv()
            stats = intake.stats()
            if stats.read + stats.resolved.get(Reason.CORRUPT, 0) != last:
                moved, last = time.monotonic(), stats.read + stats.resolved.get(Reason.CORRUPT, 0)
            assert time.monotonic() - moved < _DEADLINE_S, f"stands still: {stats}, fed {fed}, lag {reader.lag()}"
            assert fed is not None or feeder.is_alive(), "the feeder ended"
    finally:
        feeder.kill()
        feeder.join()
        reader.close()
        producer.close()
    stats = intake.stats()
    letters, offsets = _letters(settings, topics)
    return Result(
        fed,
        stats.read,
        stats.pending,
        {reason.value: count for reason, count in stats.resolved.items()},
        intake._ledger.count(Outcome.DEAD_LETTERED),
        letters,
        offsets,
        peak,
        time.monotonic() - began,
    )


def _batches(intake: Intake) -> Iterator[Any]:
    while (found := intake.cut(0.05)) is not None:
        yield found


def _letters(settings: dict[str, str], topics: TopicNames) -> tuple[int, int]:
    """Records of the dead-letter topic, each sound, and the offsets that they stand for."""
    letters = offsets = 0
    with closing(KafkaLogReader(settings, client_id="fuzz", max_record_bytes=2 * RECORD_BYTES, committed=False)) as reader:
        for one in report.read_topic(reader, topics.dead_letter, 1, deadline_s=600.0):
            letters += 1
            offsets += dead_letter.unwrap(one).offsets
    return letters, offsets
