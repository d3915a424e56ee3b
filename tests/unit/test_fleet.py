"""Who lives, what each may have outstanding: windows follow throughput, a dead producer's share returns to the others."""

from collections import deque
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.fleet import Fleet, GivenUp
from echo.control import Grant, Heartbeat
from producers.window import Window


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def beat(name: str, sequence: int, *, published: int = 0, created: float | None = None, **overrides: object) -> Heartbeat:
    values: dict[str, object] = {
        "run_id": "r",
        "producer_id": name.partition(".")[0],
        "incarnation": name,
        "sequence": sequence,
        "state": "sampling",
        "serving": 1,
        "announced": 1,
        "control_sequence": -1,
        "granted_limit": 1,
        "groups_started": published,
        "groups_published": published,
        "trajectories": 0,
        "tokens": 0,
        "busy_seconds": 2.0 * sequence,
        "pulls": 1,
        "failed_pulls": 0,
        "created": float(sequence) if created is None else created,
    }
    return Heartbeat(**(values | overrides))  # type: ignore[arg-type]


def test_what_producers_gave_up_is_told_once_also_of_those_that_leave_with_it_and_of_no_other_run() -> None:
    fleet = make_fleet(Clock())
    fleet.hear(beat("a.1", 0))
    fleet.hear(beat("a.1", 1, given_up={"r/v1/s1/c0/0": "too large"}))
    fleet.hear(beat("b.1", 0, given_up={"r/v1/s1/c1/0": "no prompt"}, leaving=True))
    fleet.hear(beat("c.1", 0, given_up={"x/v1/s1/c1/0": "foreign"}, run_id="x"))
    assert fleet.take_given_up() == {
        "r/v1/s1/c0/0": GivenUp("a.1", "too large"),
        "r/v1/s1/c1/0": GivenUp("b.1", "no prompt"),
    }
    assert fleet.take_given_up() == {}


def make_fleet(clock: Clock, total: int = 12) -> Fleet:
    return Fleet(run_id="r", total_window=total, dead_after_s=30, clock=clock)


def test_windows_follow_measured_throughput() -> None:
    clock = Clock()
    fleet = make_fleet(clock)
    for name, rate in (("a.1", 3), ("b.1", 1)):
        for sequence in range(3):
            fleet.hear(beat(name, sequence, published=rate * sequence))
    assert fleet.grants() == {"a.1": Grant(window=9, resolved=0), "b.1": Grant(window=3, resolved=0)}


def test_a_producer_that_its_window_holds_back_keeps_its_share() -> None:
    """Throughput counts busy time: else who waits would be granted less, and wait the more."""
    clock = Clock()
    fleet = make_fleet(clock)
    for name, wait in (("a.1", 0.0), ("b.1", 50.0)):
        for sequence in range(3):
            fleet.hear(beat(name, sequence, published=4 * sequence, created=sequence * (2.0 + wait)))
    assert fleet.grants() == {"a.1": Grant(window=6, resolved=0), "b.1": Grant(window=6, resolved=0)}


def test_a_producer_whose_count_goes_back_has_no_throughput_below_0() -> None:
    fleet = make_fleet(Clock())
    fleet.hear(beat("a.1", 0, published=9))
    fleet.hear(beat("a.1", 1, published=3))
    assert fleet.alive()[0].throughput == 0


def test_a_silent_producer_dies_and_its_window_returns_to_the_others() -> None:
    clock = Clock()
    fleet = make_fleet(clock)
    fleet.hear(beat("a.1", 0))
    fleet.hear(beat("b.1", 0))
    clock.now = 31
    fleet.hear(beat("b.1", 1))
    assert fleet.grants() == {"b.1": Grant(window=12, resolved=0)}
    fleet.hear(beat("a.1", 1))
    assert fleet.grants().keys() == {"a.1", "b.1"}


def test_a_leaving_producer_is_gone_at_once() -> None:
    fleet = make_fleet(Clock())
    fleet.hear(beat("a.1", 0))
    fleet.hear(beat("a.1", 1, leaving=True))
    assert fleet.alive() == []


def test_a_restarted_producer_replaces_its_former_incarnation() -> None:
    fleet = make_fleet(Clock())
    fleet.hear(beat("a.1", 7))
    fleet.hear(beat("a.2", 0, created=9.0))
    assert fleet.grants().keys() == {"a.2"}


def test_what_was_under_way_from_a_replaced_incarnation_does_not_revive_it() -> None:
    clock = Clock()
    fleet = make_fleet(clock)
    fleet.hear(beat("a.1", 7, created=7.0))
    fleet.hear(beat("a.2", 0, created=8.0))
    fleet.hear(beat("a.1", 7, created=7.0))
    assert [one.incarnation for one in fleet.alive()] == ["a.2"]
    clock.now += 1e6
    fleet.hear(beat("a.3", 0, created=9.0))
    assert [one.incarnation for one in fleet.alive()] == ["a.3"]
    assert not fleet._replaced, "what is dead is forgotten"


def test_two_that_live_under_one_id_do_not_make_each_other_dead() -> None:
    """A process is drained while its successor has begun, or one --id was given to two: both have room, within the total."""
    fleet = make_fleet(Clock(), total=12)
    fleet.hear(beat("a.1", 7, created=7.0))
    for sequence in range(3):
        fleet.hear(beat("a.2", sequence, created=8.0 + sequence))
        fleet.hear(beat("a.1", 8 + sequence, created=8.5 + sequence))
        assert [one.incarnation for one in fleet.alive()] == ["a.1", "a.2"]
        assert sum(grant.window for grant in fleet.grants().values()) <= 12
    fleet.hear(beat("a.1", 20, created=12.0, leaving=True))
    assert fleet.grants().keys() == {"a.2"}
    fleet.hear(beat("a.2", 4, created=13.0))
    assert fleet.grants() == {"a.2": Grant(window=12, resolved=0)}


def test_a_late_heartbeat_changes_nothing() -> None:
    fleet = make_fleet(Clock())
    fleet.hear(beat("a.1", 5, serving=4))
    fleet.hear(beat("a.1", 4, serving=3))
    assert fleet.alive()[0].serving == 4


def test_heartbeats_of_another_run_are_ignored() -> None:
    fleet = make_fleet(Clock())
    fleet.hear(beat("a.1", 0, run_id="other"))
    assert fleet.grants() == {}


def test_resolved_groups_are_told_and_survive_a_restart() -> None:
    fleet = make_fleet(Clock())
    fleet.hear(beat("a.1", 0, published=5))
    fleet.group_resolved("a.1", 3)
    assert fleet.alive()[0].outstanding == 2
    again = Fleet(run_id="r", total_window=12, dead_after_s=30, clock=Clock(), resolved=fleet.resolved())
    again.hear(beat("a.1", 1, published=5))
    assert again.grants() == {"a.1": Grant(window=12, resolved=3)}


def test_room_changes_hands_only_when_its_holder_can_not_use_it_any_more() -> None:
    """One producer was granted all; a second joins, and gets what the first has shown to be free."""
    fleet = make_fleet(Clock(), total=12)
    fleet.hear(beat("a.1", 0))
    first = fleet.grants()
    assert first["a.1"].window == 12
    fleet.granted(0, first)
    fleet.hear(beat("b.1", 0))
    second = fleet.grants()
    assert (second["a.1"].window, second["b.1"].window) == (6, 1)
    fleet.granted(1, second)
    # It had begun 4 groups when the new grant came into force: 6 is its limit now, and 6 are free.
    fleet.hear(beat("a.1", 1, groups_started=4, control_sequence=1, granted_limit=6))
    assert fleet.grants()["b.1"].window == 6


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_outstanding_groups_stay_within_the_window_whatever_is_late(random: Random) -> None:
    """Producers join at any time, take all the room that they are told of, and are as fast as they like; messages and
    heartbeats are as late as they like, in order. A life is long enough for one's room to go to another that joins late."""
    total = random.randint(1, 12)
    fleet = make_fleet(Clock(), total)
    windows: dict[str, Window] = {}
    read: dict[str, int] = {}
    log: list[dict[str, Grant]] = []
    beats: deque[Heartbeat] = deque()
    resolved: dict[str, int] = {}
    sequences: dict[str, int] = {}
    actions = ["join", "tell", "hear", "resolve", "begin", "tell", "beat", "listen", "beat", "begin", "listen", "listen"]
    for _ in range(160):
        action = random.choice(actions)
        if action == "join" and len(windows) < 4:
            name = f"p{len(windows)}.1"
            windows[name], read[name], resolved[name], sequences[name] = Window(0), 0, 0, 0
        elif action == "tell":
            grants = fleet.grants()
            fleet.granted(len(log), grants)
            log.append(grants)
        elif action == "hear":
            for _ in range(random.randint(0, len(beats))):
                fleet.hear(beats.popleft())
        elif windows:
            name = random.choice(sorted(windows))
            window = windows[name]
            if action == "begin":
                window.begin(window.room(0, 0))
            elif action == "listen":
                # Of several messages the newest counts, as in the producer's loop.
                heard = random.randint(read[name], len(log))
                if heard > read[name]:
                    window.granted(log[heard - 1].get(name), heard - 1)
                read[name] = heard
                window.begin(window.room(0, 0))
            elif action == "beat":
                sequences[name] += 1
                state = {"control_sequence": window.sequence, "granted_limit": window.limit, "groups_started": window.started}
                published = random.randint(resolved[name], window.started)
                beats.append(beat(name, sequences[name], **{**state, "groups_published": published}))  # type: ignore[arg-type]
            elif action == "resolve":
                groups = random.randint(0, window.started - resolved[name])
                resolved[name] += groups
                fleet.group_resolved(name, groups)
        outstanding = sum(windows[name].started - resolved[name] for name in windows)
        assert outstanding <= total + len(windows)


def settled(fleet: Fleet, clock: Clock, heartbeat: Heartbeat) -> None:
    """A producer that reports the same for so long that all it published was read."""
    for later in range(3):
        fleet.hear(beat(heartbeat.incarnation, heartbeat.sequence + later, published=heartbeat.groups_published))
        clock.now += 4.0


def test_groups_that_will_never_be_read_hold_no_room() -> None:
    """Their records were deleted before a trainer that started over could read them; those that wait here still hold theirs."""
    clock = Clock()
    fleet = make_fleet(clock)
    settled(fleet, clock, beat("a.1", 1, published=12))
    fleet.group_resolved("a.1", 3)
    assert fleet.grants()["a.1"] == Grant(window=12, resolved=3)
    assert fleet.write_off({"a.1": 2}, idle_s=8.0) == {"a.1": 7}
    assert fleet.grants()["a.1"] == Grant(window=12, resolved=10)
    assert fleet.alive()[0].outstanding == 2
    assert fleet.write_off({"a.1": 2}, idle_s=8.0) == {}
    # A restart from a checkpoint knows of them.
    again = Fleet(run_id="r", total_window=12, dead_after_s=30, clock=clock, resolved=fleet.resolved())
    again.hear(beat("a.1", 9, published=12))
    assert again.grants()["a.1"].resolved == 10


def test_groups_that_may_still_be_read_are_not_written_off() -> None:
    """Neither while something is read, nor soon after their producer published more."""
    clock = Clock()
    fleet = make_fleet(clock)
    settled(fleet, clock, beat("a.1", 1, published=12))
    assert fleet.write_off({}, idle_s=4.9) == {}
    fleet.hear(beat("a.1", 9, published=13))
    clock.now += 4.9
    assert fleet.write_off({}, idle_s=60.0) == {}
    clock.now += 0.2
    assert fleet.write_off({}, idle_s=60.0) == {"a.1": 13}


def test_what_was_written_off_and_comes_after_all_is_counted_once() -> None:
    clock = Clock()
    fleet = make_fleet(clock)
    settled(fleet, clock, beat("a.1", 1, published=5))
    fleet.write_off({}, idle_s=9.0)
    fleet.group_resolved("a.1", 2)
    fleet.write_off({"a.1": 1}, idle_s=9.0)
    assert fleet.grants()["a.1"].resolved == 4


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_what_is_read_is_never_written_off(published: int, held: int, resolved: int) -> None:
    """Where everything that was published is held or resolved, nothing is."""
    clock = Clock()
    fleet = make_fleet(clock)
    settled(fleet, clock, beat("a.1", 1, published=published))
    fleet.group_resolved("a.1", resolved)
    off = sum(fleet.write_off({"a.1": held}, idle_s=9.0).values())
    assert off == max(0, published - held - resolved)
    assert fleet.resolved().get("a.1", 0) == resolved + off
