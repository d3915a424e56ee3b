"""Every record read is resolved exactly once, and a checkpoint loses none and trains none twice."""

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.ledger import OUTCOME_OF, Ledger, Outcome, Reason, Resolved
from echo.journal import covers

reasons = st.sampled_from(list(Reason))


def test_every_reason_has_an_outcome() -> None:
    assert OUTCOME_OF.keys() == set(Reason)


def test_the_frontier_is_the_lowest_unresolved_offset() -> None:
    ledger = Ledger([0])
    for offset in (3, 4, 7, 8):
        assert ledger.begin(0, offset)
    assert ledger.frontiers() == {0: 3}
    ledger.resolve(0, 4, Reason.TRAINED)
    assert ledger.frontiers() == {0: 3}
    ledger.resolve(0, 3, Reason.STALE)
    assert ledger.frontiers() == {0: 7}
    ledger.resolve(0, 8, Reason.TRAINED)
    assert ledger.state()["above"] == {"0": [[8, 9]]}
    ledger.resolve(0, 7, Reason.TRAINED)
    assert ledger.frontiers() == {0: 9}


def test_a_partition_is_named_in_a_checkpoint_once_anything_of_it_was_read() -> None:
    """Its first record need not have offset 0: where retention moved the start, a restart at 0 would be an error."""
    ledger = Ledger([0, 1, 2])
    ledger.begin(1, 0)
    ledger.pass_over(2, 7, Reason.STALE)
    state = ledger.state()
    assert state["frontier"] == {"1": 0, "2": 8}
    assert ledger.unresolved_span() == {0: 0, 1: 1, 2: 0}
    again = Ledger([0, 1, 2], state)
    assert again.frontiers() == {1: 0, 2: 8}
    assert again.state() == state


def test_resolving_twice_or_unread_is_an_error() -> None:
    ledger = Ledger([0])
    ledger.begin(0, 5)
    ledger.resolve(0, 5, Reason.TRAINED)
    with pytest.raises(AssertionError, match="offset 5"):
        ledger.resolve(0, 5, Reason.STALE)
    with pytest.raises(AssertionError, match="offset 6"):
        ledger.resolve(0, 6, Reason.STALE)
    with pytest.raises(AssertionError, match="offset 5"):
        ledger.begin(0, 5)
    with pytest.raises(AssertionError, match="offset 5"):
        ledger.pass_over(0, 5, Reason.STALE)


@given(
    st.lists(st.lists(st.integers(1, 3), max_size=30), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), max_size=5),
    st.randoms(use_true_random=False),
)
def test_any_interleaving_with_restarts_resolves_every_record_once(gaps, lives, random) -> None:  # type: ignore[no-untyped-def]
    """Read and resolve in any order over several lives; only what a checkpoint holds survives a crash. Some offsets can't be
    read, and come as runs, which another life may see cut elsewhere."""
    logs = {}
    unreadable = set()
    for partition, steps in enumerate(gaps):
        offsets, at = [], -1
        for step in steps:
            at += step
            offsets.append(at)
            if random.random() < 0.2:
                unreadable.add((partition, at))
        logs[partition] = offsets
    durable: dict[tuple[int, int], Reason] = {}
    state = None
    for life in [*lives, None]:
        ledger = Ledger(logs, state)
        mine = dict(durable)
        pending: list[tuple[int, int, int]] = []
        unread = {p: [o for o in offsets if o >= ledger.frontiers().get(p, 0)] for p, offsets in logs.items()}
        actions = 10**6 if life is None else life * 5
        while actions > 0 and (pending or any(unread.values())):
            actions -= 1
            partition = random.choice(list(logs))
            if unread[partition] and random.random() < 0.6:
                record = (partition, unread[partition].pop(0))
                if record in unreadable:
                    end = record[1] + 1
                    while unread[partition][:1] == [end] and (partition, end) in unreadable and random.random() < 0.8:
                        end = unread[partition].pop(0) + 1
                    for begin, stop in ledger.begin_run(*record, end):
                        assert not {(partition, offset) for offset in range(begin, stop)} & mine.keys()
                        pending.append((partition, begin, stop))
                elif random.random() < 0.3:
                    ledger.pass_over(*record, Reason.STALE)
                    mine.setdefault(record, Reason.STALE)
                elif ledger.begin(*record):
                    assert record not in mine, "resolved before, and read as new"
                    pending.append((*record, record[1] + 1))
                else:
                    assert record in mine
            elif pending:
                where, begin, stop = pending.pop(random.randrange(len(pending)))
                reason = random.choice(list(Reason))
                ledger.resolve(where, begin, reason)
                mine |= {(where, offset): reason for offset in range(begin, stop)}
            resolved = sum(ledger.count(outcome) for outcome in Outcome)
            assert ledger.read == resolved + ledger.pending
            assert resolved == len(mine)
            assert ledger.pending == sum(stop - begin for _, begin, stop in pending)
            if random.random() < 0.3:
                state, durable = ledger.state(), dict(mine)
    assert mine.keys() == {(p, o) for p, offsets in logs.items() for o in offsets}


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=20), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_any_deletions_and_new_partitions_between_restarts_leave_each_offset_resolved_once(gaps, lives, random) -> None:  # type: ignore[no-untyped-def]
    """Each life begins with the partitions that there are by then, loses what was deleted since the last checkpoint, reads and
    resolves. What it lost and what it resolved are together all offsets up to the frontier, each once, and counted."""
    logs = [list(itertools.accumulate(steps)) for steps in gaps]
    state, durable, present = None, {}, 1
    for actions, deletions in lives:
        present = random.randint(present, len(logs))
        ledger = Ledger((), state)
        begins = dict.fromkeys(range(present), 0)
        for number in random.choices(range(present), k=deletions):
            begins[number] = random.randint(0, logs[number][-1] + 1)
        ledger.grow(present)
        mine, known = dict(durable), set(durable)
        for number, frontier in ledger.frontiers().items():
            for first, end in ledger.lose(number, begins[number]) if frontier < begins[number] else ():
                for offset in range(first, end):
                    assert (number, offset) not in mine, "resolved before, and lost"
                    mine[number, offset] = Reason.LOST
        assert all(begins[number] <= frontier for number, frontier in ledger.frontiers().items())
        pending: list[tuple[int, int]] = []
        unread = {n: [o for o in logs[n] if o >= ledger.frontiers()[n]] for n in range(present)}
        for _ in range(actions):
            number = random.randrange(present)
            if unread[number] and random.random() < 0.6:
                record = (number, unread[number].pop(0))
                if ledger.begin(*record):
                    assert record not in mine
                    pending.append(record)
                else:
                    assert record in mine
            elif pending:
                record = pending.pop(random.randrange(len(pending)))
                ledger.resolve(*record, Reason.TRAINED)
                mine[record] = Reason.TRAINED
            if random.random() < 0.3:
                state, durable = ledger.state(), dict(mine)
        assert ledger.read == len(mine) + ledger.pending
        assert ledger.resolved[Reason.LOST] == sum(reason is Reason.LOST for reason in mine.values())
        told = ledger.take_resolved().by_reason().get("lost", {})
        lost = {place for place, reason in mine.items() if reason is Reason.LOST and place not in known}
        assert {(int(number), offset) for number, spans in told.items() for offset in covers(spans)} == lost
        for number in range(present):
            done = {(number, offset) for offset in logs[number] if offset < ledger.frontiers()[number]}
            assert done <= mine.keys()


def test_what_is_lost_is_what_lies_between_the_frontier_and_the_log_less_what_was_resolved() -> None:
    ledger = Ledger([0])
    for offset in range(10):
        ledger.begin(0, offset)
    for offset in (0, 1, 4, 5, 8):
        ledger.resolve(0, offset, Reason.TRAINED)
    again = Ledger([0], ledger.state())
    assert again.frontiers() == {0: 2}
    assert again.lose(0, 7) == [(2, 4), (6, 7)]
    assert again.frontiers() == {0: 7}
    assert (again.read, again.resolved, again.pending) == (8, {Reason.TRAINED: 5, Reason.LOST: 3}, 0)
    assert again.take_resolved().by_reason() == {"lost": {"0": [(2, 4), (6, 7)]}}
    assert [again.begin(0, offset) for offset in (7, 8, 9)] == [True, False, True]


def test_records_that_were_read_are_not_lost() -> None:
    ledger = Ledger([0])
    ledger.begin(0, 0)
    with pytest.raises(AssertionError, match="1 records were read already"):
        ledger.lose(0, 5)


def test_offsets_that_can_not_be_read_are_one_run_of_any_length() -> None:
    """Of a batch of a million offsets, each counts, and they take no more memory than one."""
    ledger = Ledger([0])
    before = _bytes_of(ledger)
    ledger.begin(0, 4)
    assert ledger.begin_run(0, 5, 1_000_005) == [(5, 1_000_005)]
    assert (ledger.read, ledger.pending, ledger.frontiers()) == (1_000_001, 1_000_001, {0: 4})
    ledger.resolve(0, 5, Reason.UNREADABLE)
    assert ledger.state()["above"] == {"0": [[5, 1_000_005]]}
    assert ledger.count(Outcome.DEAD_LETTERED) == 1_000_000
    assert ledger.take_resolved().by_reason() == {"unreadable": {"0": [(5, 1_000_005)]}}
    assert _bytes_of(ledger) < before + 1000
    again = Ledger([0], ledger.state())
    again.begin(0, 4)
    assert again.begin_run(0, 5, 1_000_010) == [(1_000_005, 1_000_010)]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60)), unique=True), st.lists(st.integers(0, 60), max_size=4))
def test_resolved_offsets_are_told_exactly_and_in_as_few_intervals_as_can_be(
    places: list[tuple[int, int]], taken_after: list[int]
) -> None:
    """In whatever order they were resolved, and however often they were taken over in between."""
    ledger, found = Ledger([0, 1]), Resolved()
    for partition, offset in sorted(places):
        ledger.begin(partition, offset)
    reason_of = {place: Reason.STALE if sum(place) % 3 else Reason.TRAINED for place in places}
    for number, place in enumerate(places):
        ledger.resolve(*place, reason_of[place])
        for _ in range(taken_after.count(number)):
            found.update(ledger.take_resolved())
    found.update(ledger.take_resolved())
    told = found.by_reason()
    assert {
        (int(partition), offset): Reason(reason)
        for reason, partitions in told.items()
        for partition, spans in partitions.items()
        for offset in covers(spans)
    } == reason_of
    for partitions in told.values():
        assert all(a[1] < b[0] for spans in partitions.values() for a, b in itertools.pairwise(spans))


def test_many_records_in_a_row_are_one_run() -> None:
    """A trainer that drops for hours between two steps must not remember each record."""
    found = Resolved()
    for offset in range(100_000):
        found.add(0, offset, Reason.STALE)
    assert sum(sys.getsizeof(runs) for runs in found._runs.values()) < 200


def test_records_that_end_differently_by_turns_take_few_bytes_each() -> None:
    found, number = Resolved(), 10_000
    for offset in range(number):
        found.add(0, offset, (Reason.STALE, Reason.DUPLICATE)[offset % 2])
    runs = found._runs.values()
    assert (
        sum(sys.getsizeof(part) + sum(sys.getsizeof(x) for x in part if not isinstance(x, int)) for part in runs) < 20 * number
    )


def test_what_is_resolved_above_one_pending_record_takes_no_memory_for_each() -> None:
    """One dead letter that waits for hours, while all else is dropped."""
    ledger = Ledger([0])
    for start in (0, 50_000):
        ledger.begin(0, start)
    before = _bytes_of(ledger)
    for offset in range(50_001, 60_000):
        ledger.pass_over(0, offset, Reason.STALE)
    assert ledger.state()["above"] == {"0": [[1, 50_000], [50_001, 60_000]]}
    assert _bytes_of(ledger) < before + 1000


def _bytes_of(ledger: Ledger) -> int:
    """Of the containers of partition 0: the numbers in them come on top."""
    return sum(sys.getsizeof(found) for found in vars(ledger._partitions[0]).values())
