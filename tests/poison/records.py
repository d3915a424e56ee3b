"""Records that no trainer should choke on, made from a seed: what each is, and which fates are right for it.

    for together in itertools.islice(poisons(random.Random(1), vocabulary=24), 10_000): ...

Refuses to know the codec's opinion: allowed fates follow from how a record was made. "deadline" is allowed where a mutation
may leave a sound record, which then waits in vain for the rest of its group.
"""

import pickle
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgpack
import numpy as np

from echo import codec
from echo.trajectory import Sampling, Trajectory, group_id, trajectory_id
from tests.helpers import RUN_ID, make_trajectory

Header = tuple[str, bytes | None]

_HUGE = 2**32 - 1
_LENGTH_CLAIMS = {
    "array32": b"\xdd" + struct.pack(">I", _HUGE),
    "map32": b"\xdf" + struct.pack(">I", _HUGE),
    "str32": b"\xdb" + struct.pack(">I", _HUGE),
    "bin32": b"\xc6" + struct.pack(">I", _HUGE),
    "ext32": b"\xc9" + struct.pack(">IB", _HUGE, 5),
}
_OTHER_TYPES: list[Any] = [
    None,
    True,
    -1,
    2**64 - 1,
    1.5,
    "text",
    b"bytes",
    [],
    [[1]],
    {},
    {"a": [1]},
    [[0, "x"]],
    msgpack.Timestamp(1),
]
_COUNT_HEADERS = ("group_size", "group_index", "min_version", "max_version", "tokens")


class Poison(NamedTuple):
    """A record, and the reasons of which one is right."""

    kind: str
    key: bytes | None
    headers: list[Header]
    value: bytes | None
    allowed: frozenset[str]


def member(number: int, index: int = 0, **overrides: Any) -> Trajectory:
    """A member of a poisoned group of two, sound but for what is overridden."""
    values: dict[str, Any] = {
        "group_id": group_id(RUN_ID, "poison", number),
        "trajectory_id": trajectory_id(RUN_ID, "poison", 2 * number + index),
        "group_size": 2,
        "group_index": index,
        "reward_components": {"format": 0.5},
        "loss_mask": np.array([True, False, True, True]),
    }
    return make_trajectory(**(values | overrides))


def poisons(rng: random.Random, *, vocabulary: int) -> Iterator[list[Poison]]:
    """Without end: kinds in random order. A list is of a group of its own, most have one record; keep its order."""
    number = 0
    while True:
        kind = rng.choice(_KINDS)
        number += 1
        yield [poison._replace(kind=kind.__name__.lstrip("_")) for poison in kind(rng, number, vocabulary)]


def _made(number: int, *allowed: str, **changed: Any) -> Poison:
    """The sound record with some of its parts changed."""
    record = codec.encode(member(number))
    parts: dict[str, Any] = {"key": record.key, "headers": list(record.headers), "value": record.value} | changed
    return Poison("", parts["key"], parts["headers"], parts["value"], frozenset(allowed))


def _plain(number: int) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(codec.encode(member(number)).value)
    return found


def _spliced(plain: dict[str, Any], field: str, raw: bytes) -> bytes:
    """The map with one field's encoding replaced by bytes of our own."""
    items = [msgpack.packb(name) + (raw if name == field else msgpack.packb(value)) for name, value in plain.items()]
    return b"\xde" + struct.pack(">H", len(items)) + b"".join(items)


def _with_header(number: int, name: str, value: bytes | None) -> list[Header]:
    return [(n, value if n == name else v) for n, v in codec.encode(member(number)).headers]


def _bit_flips(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    raw = bytearray(codec.encode(member(number)).value)
    for _ in range(rng.randint(1, 8)):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    yield _made(number, "corrupt", "schema", "deadline", value=bytes(raw))


def _truncated(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    raw = codec.encode(member(number)).value
    yield _made(number, "corrupt", value=raw[: rng.randrange(len(raw))])


def _grown(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    yield _made(number, "corrupt", value=codec.encode(member(number)).value + rng.randbytes(rng.randint(1, 50)))


def _garbage(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    size = 2**20 if rng.random() < 0.02 else rng.randint(0, 300)
    yield _made(number, "corrupt", value=rng.randbytes(size))


def _wrong_type(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    plain = _plain(number)
    plain[rng.choice(list(plain))] = rng.choice(_OTHER_TYPES)
    # Some fields may be null or any number, some numbers are as good as others.
    yield _made(number, "corrupt", "schema", "deadline", value=msgpack.packb(plain))


def _missing_field(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    plain = _plain(number)
    del plain[rng.choice(list(plain))]
    yield _made(number, "corrupt", value=msgpack.packb(plain))


def _not_finite(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    plain, wrong = _plain(number), rng.choice([float("nan"), float("inf"), float("-inf")])
    field = rng.choice(["reward", "reward_components", "logprobs", "temperature"])
    if field == "logprobs":
        plain["logprobs"] = {"dtype": "<f4", "data": np.array([-1, wrong, -1, -1], "<f4").tobytes()}
    elif field == "temperature":
        plain["sampling"]["temperature"] = wrong
    else:
        plain[field] = wrong if field == "reward" else {"format": wrong}
    yield _made(number, "corrupt", value=msgpack.packb(plain))


def _huge_lengths(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    claim, plain = rng.choice(list(_LENGTH_CLAIMS.values())), _plain(number)
    yield _made(number, "corrupt", value=rng.choice([claim, _spliced(plain, rng.choice(list(plain)), claim)]))


def _nested(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    deep = rng.choice([b"\x91", b"\x81\xa1a"]) * rng.randint(5_000, 20_000)
    plain = _plain(number) | {"added": 0}
    yield _made(number, "corrupt", value=rng.choice([deep, _spliced(plain, rng.choice(list(plain)), deep)]))


def _pickles(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    yield _made(number, "corrupt", value=pickle.dumps(_plain(number), protocol=rng.randint(0, 5)))


def _token_ids(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    plain, field = _plain(number), rng.choice(["prompt_ids", "completion_ids"])
    size = 3 if field == "prompt_ids" else 4
    dtype, token = rng.choice(
        [
            ("<u2", vocabulary),
            ("<u2", 2**16 - 1),
            ("<u4", 2**31 - 1),
            ("<u4", 2**32 - 1),
            ("<i4", -1),
            ("<i8", 2**62),
            ("|O", 0),
        ]
    )
    data = bytes(8 * size) if dtype == "|O" else np.full(size, token, dtype).tobytes()
    yield _made(number, "corrupt", value=msgpack.packb(plain | {field: {"dtype": dtype, "data": data}}))


def _lengths_differ(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    plain = _plain(number)
    array = plain[rng.choice(["logprobs", "completion_ids", "prompt_ids", "loss_mask"])]
    array["data"] = array["data"] * rng.choice([0, 2, 1000]) + b"\1" * rng.choice([0, 1, 3])
    yield _made(number, "corrupt", value=msgpack.packb(plain))


def _null(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    yield rng.choice(
        [
            _made(number, "corrupt", value=None),
            _made(number, "deadline", key=None),
            _made(number, "corrupt", value=None, key=None),
        ]
    )


def _missing_header(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    headers = codec.encode(member(number)).headers
    gone = set(rng.sample([name for name, _ in headers], rng.randint(1, len(headers))))
    yield _made(number, "corrupt", headers=[(n, v) for n, v in headers if n not in gone])


def _wrong_header(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    value = rng.choice([None, b"", b"-1", b"+1", b"1_0", b"\xff\xfe", b"9" * 5000, b"77", b"0x1", rng.randbytes(8)])
    yield _made(number, "corrupt", headers=_with_header(number, rng.choice(_COUNT_HEADERS), value))


def _wrong_name(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    name = rng.choice(["trajectory", "group"])
    value = rng.choice([None, b"\xff\xfe", b"other", b"n" * rng.choice([2_000, 100_000])])
    # Two groups may be given the same name; the first of them to fail then decides for the second.
    yield _made(number, "corrupt", "incomplete_group", headers=_with_header(number, name, value))


def _unknown_major(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    schema = rng.choice(["2.0", "0.9", "99999999999999999999.0", "9" * 5000 + ".0", "1", "one.two", "\u00b2.0", "\uff11.0", ""])
    yield rng.choice(
        [
            _made(number, "schema", headers=_with_header(number, "schema", schema.encode())),
            _made(number, "schema", value=msgpack.packb(_plain(number) | {"schema": schema})),
            _made(number, "schema", value=msgpack.packb({"schema": "7.0", "all": "else"})),
        ]
    )


def _other_run(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    yield _made(number, "foreign_run", headers=_with_header(number, "run", b"other"), value=rng.randbytes(20))


def _other_size(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    """Two members of one group that disagree about its size: the second is at fault, and the group can't be completed."""
    for index, size in enumerate((2, rng.choice([3, 2**40]))):
        record = codec.encode(member(number, index, group_size=size))
        yield Poison(
            "", record.key, list(record.headers), record.value, frozenset({"corrupt" if index else "incomplete_group"})
        )


def _ruinous_group(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    """Both members, complete and well formed, with values from which a learner computes NaN or an overflow."""
    ruin = rng.choice(["temperature", "reward", "logprob", "version", "future"])
    for index in range(2):
        plain = msgpack.unpackb(codec.encode(member(number, index)).value)
        headers: list[Header] = list(codec.encode(member(number, index)).headers)
        if ruin == "temperature":
            plain["sampling"]["temperature"] = rng.choice([0.0, -1.0, 1e-30, 1e30])
        elif ruin == "reward":
            plain["reward"] = rng.choice([1e308, 1e30, 1e9]) * (-1) ** index
        elif ruin == "logprob":
            plain["logprobs"] = {"dtype": "<f4", "data": np.full(4, rng.choice([3e38, -3e38, -9999.0]), "<f4").tobytes()}
        else:
            version = 2**63 if ruin == "version" else 10**9
            plain["spans"] = [[0, version]]
            headers = [(n, b"%d" % version if n.endswith("_version") else v) for n, v in headers]
        allowed = frozenset({"incomplete_group"} if index else {"corrupt"})
        yield Poison("", plain["group_id"].encode(), headers, msgpack.packb(plain), allowed)


def _odd_but_sound(rng: random.Random, number: int, vocabulary: int) -> Iterator[Poison]:
    """Nothing wrong with it but that its siblings never come."""
    odd = rng.choice(["headers", "unknown", "extreme"])
    if odd == "headers":
        extra: list[Header] = [("x", rng.randbytes(50_000)), ("run", RUN_ID.encode()), ("", None)]
        yield _made(number, "deadline", headers=[*codec.encode(member(number)).headers, *extra])
    elif odd == "unknown":
        yield _made(number, "deadline", value=msgpack.packb(_plain(number) | {"later": [{"a": 1}] * 100, "schema": "1.99"}))
    else:
        extreme = member(number, group_size=2**60, reward=-1e6, sampling=Sampling(max_tokens=4, seed=2**63))
        record = codec.encode(extreme)
        yield Poison("", record.key, list(record.headers), record.value, frozenset({"deadline"}))


_KINDS: list[Callable[[random.Random, int, int], Iterator[Poison]]] = [
    _bit_flips,
    _bit_flips,
    _bit_flips,
    _truncated,
    _grown,
    _garbage,
    _wrong_type,
    _missing_field,
    _not_finite,
    _huge_lengths,
    _nested,
    _pickles,
    _token_ids,
    _lengths_differ,
    _null,
    _missing_header,
    _wrong_header,
    _wrong_name,
    _unknown_major,
    _other_run,
    _other_size,
    _ruinous_group,
    _odd_but_sound,
]
