"""What a client can't read ends no reader: not the trainer's, and none that follows control, requests or heartbeats."""

import threading

import pytest
from structlog.testing import capture_logs

from consumers import dead_letters
from consumers.dead_letters import DeadLetters
from consumers.intake import DeadLetter
from consumers.ledger import Outcome, Reason
from consumers.policy import read_told
from echo import codec, control, dead_letter, report
from echo.cli.show import run_of, to_json, to_text
from echo.cli.tail import Scan
from echo.control import Announcement, Request
from echo.errors import CheckpointError
from echo.log import BEGINNING, LogRecord
from producers.policy import PolicyListener
from producers.requests import RequestListener
from tests.eventually import eventually
from tests.fakes.log import FakeLog, FakeProducer, FakeReader, UnreadableHeaders
from tests.helpers import RUN_ID
from tests.unit.test_fleet import beat
from tests.unit.test_fleet_listener import TOPIC as HEARTBEATS
from tests.unit.test_fleet_listener import listening, tell
from tests.unit.test_trajectory_reader import DEAD, TOPIC, Clock, make_intake, member, put, reading

BATCH = 3
WHY = "its codec is unknown"


def odd_headers(log: FakeLog, topic: str, value: bytes = b"v") -> None:
    with log.changed:
        log.append(topic, b"odd", value, UnreadableHeaders())


def letters_of(log: FakeLog) -> dict[str, dead_letter.DeadLetter]:
    return {letter.origin: letter for letter in map(dead_letter.unwrap, log.records(DEAD))}


def test_the_trainer_resolves_and_counts_what_it_can_not_read() -> None:
    """A record with odd headers and batches of offsets, among the members of a group that is trained."""
    log, intake = FakeLog(), make_intake()
    for topic in (TOPIC, DEAD):
        log.create_topic(topic)
    log.append_unreadable(TOPIC, 0, BATCH, WHY)
    put(log, member(0, 0))
    odd_headers(log, TOPIC)
    log.append_unreadable(TOPIC, 0, BATCH, WHY)
    put(log, member(0, 1))
    with reading(log, intake) as trajectories:
        batch = intake.cut(10.0)
        assert batch is not None
        intake.trained(batch)
        eventually(lambda: intake.stats().pending == 0, "all is resolved")
        trajectories.check()
    stats = intake.stats()
    assert stats.resolved == {Reason.UNREADABLE: 2 * BATCH, Reason.CORRUPT: 1, Reason.TRAINED: 2}
    assert (stats.read, intake.frontiers()) == (2 * BATCH + 3, {0: 2 * BATCH + 3})
    letters = letters_of(log)
    assert letters.keys() == {f"{TOPIC}[0]@{offset}" for offset in (0, 4, 5)}
    assert (letters[f"{TOPIC}[0]@0"].reason, letters[f"{TOPIC}[0]@0"].offsets) == ("unreadable", BATCH)
    assert WHY in letters[f"{TOPIC}[0]@0"].detail
    odd = letters[f"{TOPIC}[0]@4"]
    assert (odd.key, odd.value, "not UTF-8" in odd.detail) == (b"odd", b"v", True)


def test_a_restart_before_the_letter_is_safe_writes_it_again_and_counts_once() -> None:
    log = FakeLog()
    for topic in (TOPIC, DEAD):
        log.create_topic(topic)
    log.append_unreadable(TOPIC, 0, BATCH, WHY)
    put(log, member(0, 0))
    first = make_intake()
    reader = FakeReader(log)
    reader.assign({(TOPIC, 0): 0})
    (letter,) = first.offer(reader.read(10, 0.0))
    assert (letter.record.offset, letter.record.span, first.stats().pending) == (0, BATCH, BATCH + 1)
    state = first.settle(with_state=True).state
    again = make_intake(state)
    with reading(log, again):
        eventually(lambda: again.stats().resolved.get(Reason.UNREADABLE) == BATCH, "the letter is written")
    settled = again.settle(with_state=True)
    assert settled.state is not None
    assert (settled.state["letters"], again.frontiers()) == ([], {0: BATCH})
    assert settled.resolved.by_reason() == {"unreadable": {"0": [(0, BATCH)]}}


def test_a_letter_that_the_broker_finds_too_large_is_cut_and_taken() -> None:
    """The topic takes less than was promised."""
    log, safe = FakeLog(max_bytes=dead_letters.SMALL_BYTES), list[DeadLetter]()
    log.create_topic(DEAD)
    letters = DeadLetters(FakeProducer(log), DEAD, acknowledged=safe.append, max_bytes=2**24, clock=Clock())
    value = b"v" * 2**20
    letters.add([DeadLetter(LogRecord(TOPIC, 0, 7, b"k", [("h", b"1")], value, 0), Reason.CORRUPT, "why")])
    for _ in range(2):
        letters.send()
    assert [found.record.offset for found in safe] == [7]
    kept = letters_of(log)[f"{TOPIC}[0]@7"]
    assert (kept.key, kept.headers, kept.value, kept.cut["value"]["bytes"]) == (b"k", [("h", b"1")], value[:65536], 2**20)


def test_the_report_counts_the_same_from_the_log_and_the_journal() -> None:
    log = FakeLog()
    log.create_topic(TOPIC)
    log.append_unreadable(TOPIC, 0, BATCH, WHY)
    put(log, member(0, 0))
    odd_headers(log, TOPIC)
    line = {"step": 1, "version": 0, "resolved": {"unreadable": {"0": [[0, 3]]}, "trained": {"0": [[3, 4]]}}}
    line["resolved"]["corrupt"] = {"0": [[4, 5]]}  # type: ignore[index]
    records = list(report.read_topic(FakeReader(log), TOPIC, 1, deadline_s=5.0))
    wrapped = [dead_letter.wrap(records[0], "unreadable", WHY), dead_letter.wrap(records[2], "corrupt", "names")]
    letters = [LogRecord(DEAD, 0, at, key, headers, value, 0) for at, (key, headers, value) in enumerate(wrapped)]
    counts = report.count(RUN_ID, records, letters, report.fates([line]))
    assert counts == report.Counts(5, 1, {}, 4, 0, 0)
    with pytest.raises(CheckpointError, match=rf"{TOPIC}\[0\]@0 was resolved as unreadable, but the dead-letter topic"):
        report.count(RUN_ID, records, letters[1:], report.fates([line]))
    bias = report.DropBias(RUN_ID, report.fates([line]))
    assert len(list(bias.watch(records))) == 3
    assert bias.result()["drop_bias"]["trained"]["test"]["number"] == 1


@pytest.mark.parametrize("role", ["trajectories", "dead_letter", "control", "requests", "heartbeats"])
def test_echo_tail_shows_it_as_what_it_is(role: str) -> None:
    log = FakeLog()
    log.create_topic(role)
    odd_headers(log, role)
    log.append_unreadable(role, 0, BATCH, WHY)
    odd_headers(log, role)
    scan = Scan(FakeReader(log), {(role, 0): BEGINNING}, timeout_s=5.0, stop=threading.Event())
    odd, run, last = [to_json(role, record) for record in scan]
    assert (odd["key"], odd["headers"], "not readable" in odd["problem"]) == ("odd", [], True)
    assert (run["offset"], run["offsets"], WHY in run["problem"], run["record"]) == (1, BATCH, True, None)
    assert last["offset"] == 1 + BATCH
    assert WHY in to_text(run)
    assert run_of(role, log.records(role)[0]) is None


def announcement(version: int) -> Announcement:
    return Announcement(
        run_id=RUN_ID,
        sequence=version,
        version=version,
        step=version,
        manifest_urls=("http://127.0.0.1:1/m",),
        manifest_digest="0" * 64,
        nbytes=1,
        created=0.0,
    )


def surrounded(log: FakeLog, topic: str, key: bytes, value: bytes) -> None:
    """What can't be read before a message and after it."""
    log.append_unreadable(topic, 0, BATCH, WHY)
    odd_headers(log, topic)
    with log.changed:
        log.append(topic, key, value, [])
    log.append_unreadable(topic, 0, BATCH, WHY)


def test_who_follows_the_control_topic_skips_it() -> None:
    log = FakeLog()
    log.create_topic("control")
    surrounded(log, "control", b"k", control.encode(announcement(3)))
    with capture_logs() as said:
        told = read_told(FakeReader(log), topic="control", run_id=RUN_ID, waiting_s=5.0, deadline_s=5.0)
    assert (told.version, told.sequence) == (3, 3)
    assert [entry["event"] for entry in said] == ["control message skipped"] * 3
    listener = PolicyListener(lambda: FakeReader(log), "control", run_id=RUN_ID, incarnation="p0.1").start()
    try:
        eventually(lambda: listener.state.announcement == announcement(3), "the announcement")
        surrounded(log, "control", b"k", control.encode(announcement(4)))
        eventually(lambda: listener.state.announcement == announcement(4), "the next one")
        listener.check()
    finally:
        listener.close()


def test_who_follows_requests_and_heartbeats_skips_it() -> None:
    log, changed = FakeLog(), threading.Condition()
    log.create_topic("requests")
    request = Request(
        run_id=RUN_ID,
        request_id="a",
        producer="p0.1",
        version=1,
        step=1,
        first_prompt=8,
        group_ids=("g",),
        seed=3,
        issue=0,
        created=1.0,
    )
    surrounded(log, "requests", b"p0.1", control.encode(request))
    requests = RequestListener(
        lambda: FakeReader(log), "requests", lambda: 1, run_id=RUN_ID, incarnation="p0.1", changed=changed
    ).start()
    try:
        eventually(lambda: requests.held == (request,), "the request")
        requests.check()
    finally:
        requests.close()
    with listening(log, lambda: 0.0) as fleet:
        log.append_unreadable(HEARTBEATS, 0, BATCH, WHY)
        odd_headers(log, HEARTBEATS)
        tell(log, control.encode(beat("a.1", 0)))
        eventually(lambda: [one.incarnation for one in fleet.alive()] == ["a.1"], "the producer is alive")
        fleet.check()


def test_outcomes_of_offsets_that_can_not_be_read_are_dead_letters() -> None:
    log, intake = FakeLog(), make_intake()
    log.create_topic(TOPIC)
    log.append_unreadable(TOPIC, 0, 1_000_000, WHY)
    reader = FakeReader(log)
    reader.assign({(TOPIC, 0): 0})
    (letter,) = intake.offer(reader.read(10, 0.0))
    intake.dead_lettered(letter)
    assert intake._ledger.count(Outcome.DEAD_LETTERED) == intake.stats().read == 1_000_000
    assert codec.encode(member(0, 0)).key
