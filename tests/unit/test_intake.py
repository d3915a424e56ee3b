"""From records to batches: one decision per group, no stale token trained, every record resolved once, memory bounded."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.intake import BufferTooSmallError, DeadLetter, Intake, Settlement
from consumers.ledger import Ledger, Reason
from echo import codec
from echo.journal import covers
from echo.kafka import LogRecord
from echo.trajectory import Trajectory, group_id, incarnation_of, trajectory_id
from tests.helpers import RUN_ID, make_trajectory

SIZE = 2


def member(number: int, index: int, *, version: int = 0, **overrides: object) -> Trajectory:
    values: dict[str, object] = {
        "group_id": group_id(RUN_ID, f"p{number % 2}", number),
        "trajectory_id": trajectory_id(RUN_ID, f"p{number % 2}", number * SIZE + index),
        "group_size": SIZE,
        "group_index": index,
        "spans": ((0, version),),
    }
    return make_trajectory(**(values | overrides))


class Log:
    """Gives records their offsets in one partition."""

    def __init__(self) -> None:
        self.next = 0

    def put(self, trajectory: Trajectory) -> LogRecord:
        key, headers, value = codec.encode(trajectory)
        return self.raw(key, headers, value)

    def raw(self, key: bytes, headers: codec.Headers, value: bytes | None) -> LogRecord:
        record = LogRecord("trajectories", 0, self.next, key, [*headers], value, 0)
        self.next += 1
        return record


def make_intake(**overrides: object) -> Intake:
    values: dict[str, object] = {
        "run_id": RUN_ID,
        "max_staleness": 1,
        "groups_per_step": 2,
        "buffer_bytes": 2**30,
        "group_deadline_s": 10.0,
        "ledger": Ledger([0]),
        "newest_version": 0,
        "vocabulary": 100,
    }
    return Intake(**(values | overrides))  # type: ignore[arg-type]


def reasons(intake: Intake) -> Counter[Reason]:
    return Counter(intake.stats().resolved)


def test_complete_groups_come_out_in_the_order_of_their_completion() -> None:
    log, intake = Log(), make_intake()
    assert intake.offer([log.put(member(0, 0)), log.put(member(1, 1)), log.put(member(1, 0))]) == []
    assert intake.cut(0) is None
    intake.offer([log.put(member(0, 1))])
    batch = intake.cut(0)
    assert batch is not None
    assert [[m.trajectory.group_index for m in group.members] for group in batch] == [[0, 1], [0, 1]]
    assert [group.members[0].trajectory.group_id for group in batch] == [member(1, 0).group_id, member(0, 0).group_id]
    assert intake.stats().pending == 4
    intake.trained(batch)
    assert reasons(intake) == {Reason.TRAINED: 4}
    assert intake.stats().nbytes == 0


def test_the_oldest_policy_is_trained_first() -> None:
    """Else groups that waited in a partition would become stale while newer ones are trained."""
    log, intake = Log(), make_intake(newest_version=2, max_staleness=4)
    intake.offer([log.put(member(n, i, version=v)) for n, v in ((0, 2), (1, 1), (2, 0), (3, 1)) for i in (0, 1)])
    batch = intake.cut(0)
    assert batch is not None
    assert [group.members[0].trajectory.min_policy_version for group in batch] == [0, 1]
    assert batch[1].group_id == member(1, 0).group_id


def test_a_stale_member_drops_its_whole_group_also_those_that_come_later() -> None:
    log, intake = Log(), make_intake(newest_version=5)
    intake.offer([log.put(member(0, 0, version=5)), log.put(member(0, 1, version=3))])
    intake.offer([log.put(member(1, 1, version=3)), log.put(member(1, 0, version=5))])
    assert reasons(intake) == {Reason.STALE: 4}
    assert intake.settle(with_state=False).dropped_groups == {"p0": 1, "p1": 1}


def test_a_sibling_of_a_newer_minor_schema_is_told_its_groups_decision_and_the_group_counts_once() -> None:
    log, intake = Log(), make_intake(newest_version=5)
    first, second = log.put(member(0, 0)), log.put(member(0, 1))
    newer = [(name, b"1.7" if name == "schema" else value) for name, value in second.headers]
    intake.offer([first, second._replace(key=None, headers=newer)])
    assert reasons(intake) == {Reason.STALE: 2}
    assert intake.settle(with_state=False).dropped_groups == {"p0": 1}


def test_a_member_of_a_decided_group_is_dropped_by_its_key_before_its_headers_are_made() -> None:
    class Unread(Sequence[tuple[str, bytes | None]]):
        def __len__(self) -> int:
            raise AssertionError("headers were looked at")

        def __getitem__(self, at: Any) -> Any:
            raise AssertionError("headers were looked at")

    log, intake = Log(), make_intake(newest_version=5)
    intake.offer([log.put(member(0, 0)), log.put(member(0, 1))._replace(headers=Unread())])
    assert reasons(intake) == {Reason.STALE: 2}
    assert intake.settle(with_state=False).dropped_groups == {"p0": 1}


def test_the_headers_decide_where_the_key_says_nothing() -> None:
    """Another client may write no key: its group is known by the headers."""
    log, intake = Log(), make_intake(newest_version=5)
    intake.offer([log.put(member(0, index))._replace(key=None) for index in (0, 1)])
    assert reasons(intake) == {Reason.STALE: 2}
    assert intake.settle(with_state=False).dropped_groups == {"p0": 1}


def test_where_stale_tokens_are_masked_the_rest_of_the_group_is_trained() -> None:
    """Masked when the batch is cut, against what is newest then."""
    log, intake = Log(), make_intake(newest_version=5, on_stale="mask", groups_per_step=1)
    spans = ((0, 3), (1, 4), (2, 5))
    assert intake.offer([log.put(member(0, 0, spans=spans)), log.put(member(0, 1, version=5))]) == []
    intake.announced(6)
    batch = intake.cut(0)
    assert batch is not None
    masks = [m.trajectory.loss_mask.tolist() for m in batch[0].members]
    assert masks == [[False, False, True, True], [True, True, True, True]]
    assert [m.trajectory.spans for m in batch[0].members] == [spans, ((0, 5),)]
    assert intake.stats().masked_tokens == 2
    intake.trained(batch)
    assert reasons(intake) == {Reason.TRAINED: 2}


def test_where_stale_tokens_are_masked_a_member_without_a_fresh_one_drops_its_group() -> None:
    log, intake = Log(), make_intake(newest_version=5, on_stale="mask", groups_per_step=1)
    intake.offer([log.put(member(0, 0, spans=((0, 1), (2, 3)))), log.put(member(0, 1, version=5))])
    assert reasons(intake) == {Reason.STALE: 2}
    intake.offer([log.put(member(1, 0, spans=((0, 1), (2, 4)))), log.put(member(1, 1, version=5))])
    intake.offer([log.put(member(2, 0, version=4))])
    assert reasons(intake) == {Reason.STALE: 2}
    intake.announced(6)
    assert intake.cut(0) is None
    assert reasons(intake) == {Reason.STALE: 5}


def test_an_announcement_drops_what_it_makes_stale_complete_or_not() -> None:
    log, intake = Log(), make_intake(newest_version=0)
    intake.offer([log.put(member(0, 0)), log.put(member(0, 1)), log.put(member(1, 0))])
    intake.announced(1)
    intake.offer([log.put(member(2, 0, version=1))])
    intake.announced(2)
    assert reasons(intake) == {Reason.STALE: 3}
    assert intake.stats().members_incomplete == 1
    assert sum(intake.settle(with_state=False).dropped_groups.values()) == 2


def test_an_overdue_group_is_dropped_and_its_straggler_too() -> None:
    log = Log()
    intake = make_intake()
    intake.offer([log.put(member(0, 0))])
    intake.expire(9.9)
    assert intake.stats().pending == 1
    intake.expire(0.1)
    intake.offer([log.put(member(0, 1))])
    assert reasons(intake) == {Reason.DEADLINE: 2}


def test_an_overdue_group_is_trained_with_the_members_it_has_where_that_is_allowed() -> None:
    log = Log()
    intake = make_intake(groups_per_step=1, min_group_size=2)
    intake.offer(
        [log.put(member(0, 2, group_size=4)), log.put(member(0, 0, group_size=4)), log.put(member(1, 0, group_size=4))]
    )
    intake.expire(10.0)
    batch = intake.cut(0)
    assert batch is not None
    assert [m.trajectory.group_index for m in batch[0].members] == [0, 2]
    intake.offer([log.put(member(0, 1, group_size=4))])
    intake.trained(batch)
    assert reasons(intake) == {Reason.TRAINED: 2, Reason.DEADLINE: 2}


def test_duplicates_are_dropped_before_and_after_their_group_is_done() -> None:
    log, intake = Log(), make_intake(groups_per_step=1)
    intake.offer([log.put(member(0, 0)), log.put(member(0, 0)), log.put(member(0, 1)), log.put(member(0, 1))])
    batch = intake.cut(0)
    assert batch is not None
    intake.offer([log.put(member(0, 0))])
    intake.trained(batch)
    intake.offer([log.put(member(0, 1))])
    assert reasons(intake) == {Reason.TRAINED: 2, Reason.DUPLICATE: 4}


def test_a_record_of_another_run_is_dropped_from_its_headers() -> None:
    log, intake = Log(), make_intake()
    record = log.put(member(0, 0, run_id="other"))
    intake.offer([record._replace(value=b"never looked at")])
    assert reasons(intake) == {Reason.FOREIGN_RUN: 1}


def test_unreadable_records_are_dead_lettered_and_resolved_only_once_that_is_safe() -> None:
    log, intake = Log(), make_intake()
    future = [("schema", b"9.0")]
    plain = msgpack.unpackb(codec.encode(member(1, 0)).value)
    plain["schema"] = "9.1"
    letters = intake.offer(
        [
            log.raw(b"k", [], b"\x80\x04pickle"),
            log.raw(b"k", future, b"x"),
            log.put(member(0, 0))._replace(value=b"\x00garbage"),
            log.put(member(1, 0))._replace(value=msgpack.packb(plain)),
        ]
    )
    assert [letter.reason for letter in letters] == [Reason.CORRUPT, Reason.SCHEMA, Reason.CORRUPT, Reason.SCHEMA]
    assert intake.stats().pending == 4
    assert intake.frontiers() == {0: 0}
    for letter in letters:
        intake.dead_lettered(letter)
    assert intake.stats().pending == 0
    assert intake.frontiers() == {0: 4}


def test_headers_and_value_that_disagree_are_corrupt_and_the_group_is_given_up() -> None:
    log, intake = Log(), make_intake(newest_version=1)
    intake.offer([log.put(member(0, 0))])
    lying = log.put(member(0, 1, version=1))._replace(value=codec.encode(member(0, 1, version=0)).value)
    (letter,) = intake.offer([lying])
    assert (letter.reason, letter.detail) == (Reason.CORRUPT, "headers and value disagree")
    assert reasons(intake) == {Reason.INCOMPLETE_GROUP: 1}


@pytest.mark.parametrize("spans", [((0, 10**9),), ((0, 2), (1, 4)), ((0, 4),)])
@pytest.mark.parametrize("on_stale", ["drop", "mask"])
def test_a_version_that_was_never_announced_is_a_dead_letter_and_its_group_is_given_up(spans, on_stale) -> None:
    """It would count as fresh until that version is reached, and stay in the buffer for as long."""
    log, intake = Log(), make_intake(newest_version=2, on_stale=on_stale)
    intake.announcing(3)
    members = [member(0, 0, version=2), member(0, 1, spans=spans), member(0, 1, version=3, group_index=0)]
    (letter,) = intake.offer([log.put(one) for one in members])
    assert letter.reason is Reason.CORRUPT
    assert f"policy version {spans[-1][1]} is above 3" in letter.detail
    assert reasons(intake) == {Reason.INCOMPLETE_GROUP: 2}
    intake.dead_lettered(letter)
    assert intake.frontiers() == {0: 3}


def test_a_record_of_the_version_that_is_just_being_announced_is_taken() -> None:
    """A producer may sample from it before the trainer has the broker's answer to the announcement."""
    log, intake = Log(), make_intake(groups_per_step=1)
    intake.announcing(1)
    assert intake.offer([log.put(member(0, index, version=1)) for index in (0, 1)]) == []
    assert intake.cut(0) is not None


def test_a_token_that_the_learner_does_not_know_is_corrupt() -> None:
    log, intake = Log(), make_intake()
    (letter,) = intake.offer([log.put(member(0, 0, completion_ids=[1, 100]))])
    assert "token id 100 is outside the learner's vocabulary of 100" in letter.detail


def test_a_record_longer_than_the_model_takes_drops_its_whole_group_from_its_headers() -> None:
    """Longer by one token: its siblings go with it, before and after; one that just fits is trained."""
    log, intake = Log(), make_intake(groups_per_step=1, max_tokens=7)
    first = log.put(member(0, 0, group_size=3))
    long = log.put(member(0, 1, completion_ids=[1, 2, 3, 4, 5], group_size=3))
    assert len(member(1, 0).prompt_ids) + len(member(1, 0).completion_ids) == 7
    letters = intake.offer(
        [
            first,
            long._replace(value=b"never looked at"),
            log.put(member(0, 2, group_size=3)),
            *[log.put(member(1, index)) for index in range(SIZE)],
        ]
    )
    assert letters == []
    batch = intake.cut(0)
    assert batch is not None
    assert [group.group_id for group in batch] == [member(1, 0).group_id]
    assert reasons(intake) == {Reason.TOO_LARGE: 3}
    assert intake.settle(with_state=False).dropped_groups == {"p0": 1}


def test_siblings_that_disagree_about_the_group_size_are_corrupt() -> None:
    log, intake = Log(), make_intake()
    (letter,) = intake.offer([log.put(member(0, 0)), log.put(member(0, 1, group_size=3))])
    assert "group_size is 3, but 2 in its siblings" in letter.detail


def test_where_groups_are_requested_no_others_are_taken() -> None:
    log, intake = Log(), make_intake()
    asked = [member(number, 0).group_id for number in (0, 1, 2)]
    intake.request(asked)
    intake.offer([log.put(member(3, 0)), log.put(member(0, 0)), log.put(member(1, 1))])
    intake.offer([log.put(member(2, 0)), log.put(member(2, 1, completion_ids=[100]))])
    intake.offer([log.put(member(0, 1)), log.put(member(0, 1))])
    assert intake.standing(asked) == ({asked[0]}, {asked[2]: Reason.INCOMPLETE_GROUP})
    assert reasons(intake) == {Reason.UNREQUESTED: 1, Reason.INCOMPLETE_GROUP: 1, Reason.DUPLICATE: 1}
    intake.offer([log.put(member(1, 0))])
    assert intake.standing(asked).ready == {asked[0], asked[1]}
    assert intake.cut(0) is not None


def test_a_batch_left_out_for_nan_is_resolved_with_that_reason() -> None:
    log, intake = Log(), make_intake(groups_per_step=1)
    intake.offer([log.put(member(0, 0)), log.put(member(0, 1))])
    batch = intake.cut(0)
    assert batch is not None
    intake.trained(batch, Reason.NONFINITE)
    assert reasons(intake) == {Reason.NONFINITE: 2}


def test_a_full_buffer_stops_reading_until_a_batch_is_cut() -> None:
    log = Log()
    intake = make_intake(buffer_bytes=4 * member(0, 0).nbytes)
    intake.offer([log.put(member(n, i)) for n in (0, 1) for i in (0, 1)])
    assert intake.full()
    assert intake.cut(0) is not None
    assert not intake.full()


def test_incomplete_groups_make_room_where_they_keep_a_batch_from_completing() -> None:
    log = Log()
    intake = make_intake(buffer_bytes=4 * member(0, 0).nbytes)
    intake.offer([log.put(member(n, 0)) for n in range(5)])
    assert not intake.full()
    assert reasons(intake) == {Reason.BUFFER_FULL: 2}


def test_a_buffer_that_can_not_hold_one_batch_says_so() -> None:
    log = Log()
    intake = make_intake(buffer_bytes=2 * member(0, 0).nbytes)
    intake.offer([log.put(member(0, i)) for i in (0, 1)])
    with pytest.raises(BufferTooSmallError, match=r"batch\.buffer_bytes"):
        intake.full()


def test_a_restart_reads_pending_records_again_and_skips_resolved_ones() -> None:
    log, intake = Log(), make_intake(groups_per_step=1)
    records = [log.put(member(0, 0)), log.put(member(1, 0)), log.put(member(1, 1)), log.put(member(0, 1))]
    intake.offer(records[:3])
    batch = intake.cut(0)
    assert batch is not None
    intake.trained(batch)
    state = intake.settle(with_state=True).state
    again = make_intake(groups_per_step=1, ledger=Ledger([0], state))
    assert again.frontiers() == {0: 0}
    again.offer(records)
    batch = again.cut(0)
    assert batch is not None
    assert batch[0].group_id == member(0, 0).group_id
    again.trained(batch)
    assert reasons(again) == {Reason.TRAINED: 4}


def restarted(settled: Settlement, **overrides: object) -> Intake:
    """Goes on from a checkpoint."""
    state = json.loads(json.dumps(settled.state))
    return make_intake(**({"ledger": Ledger([0], state), "state": state} | overrides))


def test_the_stragglers_of_a_group_that_was_trained_at_its_deadline_are_no_second_group_after_a_restart() -> None:
    log = Log()
    intake = make_intake(groups_per_step=1, min_group_size=2)
    intake.offer([log.put(member(0, index, group_size=4)) for index in (0, 1)])
    intake.expire(10.0)
    batch = intake.cut(0)
    assert batch is not None
    held = intake.settle(with_state=True)
    assert held.state is not None
    assert held.state["decided"] == {}, "its members are read again, and it is decided anew"
    intake.trained(batch)
    again = restarted(intake.settle(with_state=True), groups_per_step=1, min_group_size=2)
    again.offer([log.put(member(0, index, group_size=4)) for index in (2, 3)])
    assert reasons(again) == {Reason.TRAINED: 2, Reason.DEADLINE: 2}
    assert again.settle(with_state=False).dropped_groups == {}


def test_a_group_that_a_checkpoint_cut_in_two_is_told_as_dropped_once() -> None:
    log, intake = Log(), make_intake(newest_version=5)
    intake.offer([log.put(member(number, 0)) for number in (0, 2)])
    first = intake.settle(with_state=True)
    again = restarted(first, newest_version=5)
    again.offer([log.put(member(0, 1))])
    second = again.settle(with_state=True)
    assert (first.dropped_groups, second.dropped_groups) == ({"p0": 2}, {})
    assert reasons(again) == {Reason.STALE: 3}
    assert second.state is not None
    assert second.state["decided"] == {member(2, 0).group_id: ["stale", 1]}, "all of group 0 has been seen"


def test_a_group_that_is_dropped_after_stragglers_came_is_remembered_until_the_last_of_them() -> None:
    log = Log()
    intake = make_intake(min_group_size=2)
    intake.offer([log.put(member(0, index, group_size=4)) for index in (0, 1)])
    intake.expire(10.0)
    intake.offer([log.put(member(0, 2, group_size=4))])
    intake.announced(5)
    before = intake.settle(with_state=True).state
    intake.offer([log.put(member(0, 3, group_size=4))])
    after = intake.settle(with_state=True).state
    assert before is not None
    assert after is not None
    assert (before["decided"], after["decided"]) == ({member(0, 0).group_id: ["stale", 1]}, {})


def test_a_dead_letter_that_waits_stays_one_over_restarts_whatever_became_of_its_group() -> None:
    """Also where the checkpoint between two restarts was written before the record was read again."""
    log, intake = Log(), make_intake()
    records = [log.put(member(1, 0)), log.put(member(0, 0))._replace(value=b"garbage")]
    assert [letter.reason for letter in intake.offer(records)] == [Reason.CORRUPT]
    again = restarted(intake.settle(with_state=True))
    assert again.offer(records[:1]) == []
    last = restarted(again.settle(with_state=True))
    (letter,) = last.offer(records)
    assert (letter.reason, letter.record) == (Reason.CORRUPT, records[1])
    last.dead_lettered(letter)
    state = last.settle(with_state=True).state
    assert state is not None
    assert state["letters"] == []


def test_a_checkpoint_holds_no_more_decisions_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumers.intake._CHECKPOINTED_GROUPS", 3)
    log, intake = Log(), make_intake(newest_version=5)
    intake.offer([log.put(member(number, 0)) for number in range(5)])
    state = intake.settle(with_state=True).state
    assert state is not None
    assert list(state["decided"]) == [member(number, 0).group_id for number in (2, 3, 4)]


class Lineage(NamedTuple):
    """What counts in the end: all of it goes back to the checkpoint with a crash."""

    settled: Settlement
    resolved: dict[int, str]
    decisions: Counter[str]
    lettered: set[int]

    def after(self, settled: Settlement, trained: Iterable[str], lettered: Iterable[int]) -> "Lineage":
        found = dict(self.resolved)
        for reason, spans in settled.resolved.by_reason().items():
            for offset in covers(spans["0"]):
                assert offset not in found, f"offset {offset} was {found[offset]}, and is {reason}"
                found[offset] = reason
        decisions = self.decisions + Counter(settled.dropped_groups) + Counter(trained)
        return Lineage(settled, found, decisions, self.lettered | {*lettered})


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_lives_between_checkpoints_decide_every_group_and_record_once(data: st.DataObject) -> None:
    """Members in any order, some unreadable; announcements, deadlines, steps, checkpoints and crashes at any moment."""
    size, newest, log = 3, 5, Log()
    options = {"max_staleness": 2, "groups_per_step": 1, "min_group_size": data.draw(st.sampled_from([None, 2]))}
    supply = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, size - 1)), max_size=12, unique=True))
    records = []
    for number, index in supply:
        # A producer for each group, so that what is told of producers tells of groups.
        names = {"group_id": group_id(RUN_ID, f"p{number}", 0), "trajectory_id": trajectory_id(RUN_ID, f"p{number}", index)}
        version = data.draw(st.sampled_from([2, 4, 5]))
        record = log.put(member(number, index, version=version, group_size=size, **names))
        kind = data.draw(st.sampled_from(["sound"] * 4 + ["bad value", "bad headers"]))
        changed = {"sound": {}, "bad value": {"value": b"x"}, "bad headers": {"headers": [], "value": b"x"}}[kind]
        records.append(record._replace(**changed))
    intake = make_intake(newest_version=newest, **options)
    saved = Lineage(intake.settle(with_state=True), {}, Counter(), set())
    known, letters, batch = saved, list[DeadLetter](), None
    at = crashes = 0
    while at < len(records):
        letters += intake.offer([records[at]])
        at += 1
        for action in data.draw(
            st.lists(st.sampled_from(["announce", "step", "expire", "letters", "save", "crash"]), max_size=2)
        ):
            trained: list[str] = []
            if action == "announce":
                newest += 1
                intake.announced(newest)
            elif action == "step" and batch is None:
                batch = intake.cut(0)
            elif action == "step" and batch is not None:
                intake.trained(batch)
                trained, batch = [incarnation_of(group.group_id) for group in batch], None
            elif action == "expire":
                intake.expire(10)
            elif action == "letters":
                for letter in letters:
                    intake.dead_lettered(letter)
                letters.clear()
            elif action == "crash" and crashes < 3:
                crashes += 1
                newest += 1
                intake = restarted(saved.settled, newest_version=newest, **options)
                known, letters, batch = saved, [], None
                at = intake.frontiers().get(0, 0)
                continue
            known = known.after(intake.settle(with_state=True), trained, [letter.record.offset for letter in letters])
            if action == "save":
                saved = known
    if batch is not None:
        intake.trained(batch)
    intake.expire(100)
    intake.announced(newest + 100)
    for letter in letters:
        intake.dead_lettered(letter)
    last = [incarnation_of(group.group_id) for group in batch or ()]
    known = known.after(intake.settle(with_state=True), last, [])
    assert intake.stats().pending == 0
    assert known.resolved.keys() == set(range(log.next))
    assert {known.resolved[offset] for offset in known.lettered} <= {"corrupt"}, "a dead letter that waited was given up"
    readable = {incarnation_of(member_of.group_id) for member_of in map(_header, records) if member_of is not None}
    assert known.decisions == Counter(readable)


def _header(record: LogRecord) -> codec.RecordHeader | None:
    return codec.decode_headers(record.headers) if record.headers else None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_interleaving_trains_nothing_stale_and_resolves_everything_once(data: st.DataObject) -> None:
    """Members in any order, doubled, of any version; announcements, deadlines, cuts and checkpoints at any moment."""
    log, bound = Log(), data.draw(st.integers(0, 2))
    on_stale = data.draw(st.sampled_from(["drop", "mask"]))
    intake = make_intake(max_staleness=bound, on_stale=on_stale)
    supply = data.draw(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1), st.integers(0, 6), st.integers(0, 3)), max_size=40),
        label="members",
    )
    newest = possible = 0
    trained: list[str] = []
    open_letters: list[DeadLetter] = []
    for number, index, version, later in supply:
        # Now and then one above what can be.
        highest = possible + data.draw(st.sampled_from([0, 0, 0, 1, 10**9]))
        first, last = min(version, highest), min(version + later, highest)
        spans = ((0, first), (1, last)) if last > first else ((0, first),)
        open_letters += intake.offer([log.put(member(number, index, spans=spans))])
        action = data.draw(st.sampled_from(["none", "announcing", "announce", "cut", "expire", "letters"]))
        if action == "announcing":
            possible = max(possible, newest + data.draw(st.integers(1, 3)))
            intake.announcing(possible)
        elif action == "announce":
            newest = max(possible, newest + 1)
            possible = newest
            intake.announced(newest)
        elif action == "expire":
            intake.expire(6)
        elif action == "letters":
            for letter in open_letters:
                intake.dead_lettered(letter)
            open_letters.clear()
        elif action == "cut":
            batch = intake.cut(0)
            if batch is not None:
                for group in batch:
                    assert len(group.members) == SIZE
                    for m in group.members:
                        trained_versions = m.trajectory.token_versions()[m.trajectory.loss_mask]
                        assert len(trained_versions), "a member with nothing to train"
                        assert newest - min(trained_versions) <= bound
                        assert max(trained_versions) <= possible
                        assert on_stale == "mask" or m.trajectory.loss_mask.all()
                    trained += [m.trajectory.trajectory_id for m in group.members]
                intake.trained(batch)
        stats = intake.stats()
        assert stats.read == log.next
        assert stats.read == sum(stats.resolved.values()) + stats.pending
    assert len(set(trained)) == len(trained)
    intake.expire(100)
    for letter in open_letters:
        intake.dead_lettered(letter)
    intake.announced(newest + 100)
    stats = intake.stats()
    assert stats.pending == 0
    assert stats.nbytes == 0
    found = intake.settle(with_state=True).resolved.by_reason()
    assert sorted(offset for spans in found.values() for offset in covers(spans["0"])) == list(range(log.next))
    assert {reason: len(list(covers(spans["0"]))) for reason, spans in found.items()} == stats.resolved
