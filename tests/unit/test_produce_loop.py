"""The producer's loop with fakes around it: what it samples, under which version, and how it ends."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from echo import codec, control
from echo.config import RunConfig
from echo.control import Announcement, ControlMessage, EndOfRun, Grant, Heartbeat, Progress, Request
from echo.errors import BrokerError, EchoError, EngineError
from echo.log import Delivery, Headers, OnDelivery
from echo.metrics import ProducerMetrics
from echo.topic_spec import TopicNames
from echo.trajectory import Trajectory, incarnation_of
from producers.collaborators import Collaborators
from producers.fetch import PullClient
from producers.produce import ProduceLoop
from producers.tasks.base import Task
from tests.eventually import eventually
from tests.fakes.engine import FakeEngine, FakeScorer, FakeTask, FakeTokenizer, FakeWeights
from tests.fakes.log import FakeAdmin, FakeLog, FakeProducer, FakeReader

RUN = "loop-run"
NAMES = TopicNames.with_prefix("")
MANY = Grant(window=10**6, resolved=0)


def announcement(version: int, *, run_id: str = RUN, grants: dict[str, Grant] | None = None) -> Announcement:
    return Announcement(
        run_id=run_id,
        sequence=0,
        version=version,
        step=version,
        manifest_urls=(f"http://127.0.0.1:1/{version}",),
        manifest_digest="0" * 64,
        nbytes=4,
        grants=grants or {},
        created=time.time(),
    )


def end_of_run(run_id: str = RUN) -> EndOfRun:
    return EndOfRun(run_id=run_id, sequence=0, version=0, step=1, reason="all steps done", created=time.time())


class MoodyProducer(FakeProducer):
    """Reports every record as refused once `refusal` is set; keeps all reports back from `hold` to `release`."""

    def __init__(self, log: FakeLog) -> None:
        super().__init__(log)
        self.refusal = ""
        self._kept: list[Callable[[], None]] | None = None

    def send(
        self, topic: str, *, key: bytes, value: bytes, headers: Headers = (), on_delivery: OnDelivery | None = None
    ) -> bool:
        def report(delivery: Delivery) -> None:
            if on_delivery is None:
                return
            if self._kept is not None:
                self._kept.append(lambda: on_delivery(delivery))
            else:
                on_delivery(delivery._replace(error=self.refusal or delivery.error))

        return super().send(topic, key=key, value=value, headers=headers, on_delivery=report)

    def hold(self) -> None:
        self._kept = []

    def release(self) -> None:
        kept, self._kept = self._kept or [], None
        for report in kept:
            report()


class Harness:
    """A loop in a thread, and both ends of everything around it.

    puller: pulls instead of the fake `weights`. stop: asks for the end. task: gives the prompts. model: digests of
    the model's files.
    """

    def __init__(
        self,
        *,
        max_staleness: int = 4,
        group_size: int = 2,
        groups_per_call: int = 4,
        run: Any = None,
        puller: PullClient | None = None,
        stop: threading.Event | None = None,
        task: Task | None = None,
        model: Mapping[str, str] | None = None,
        **engine: Any,
    ) -> None:
        self.run = RunConfig.model_validate(
            {
                "run_id": RUN,
                "max_staleness": max_staleness,
                "model": {"path": "tiny"},
                "sampling": {"group_size": group_size, "max_tokens": 8},
                "producer": {"groups_per_call": groups_per_call, "heartbeat_s": 0.03, "seed": 7, "flush_timeout_s": 5},
                **(run or {}),
            }
        )
        self.log = FakeLog(markers=True)
        for name in NAMES:
            self.log.create_topic(name)
        self.engine = FakeEngine(**engine)
        self.weights = FakeWeights()
        self.scorer = FakeScorer()
        self.stop = stop if stop is not None else threading.Event()
        self.metrics = ProducerMetrics(RUN, "p0", CollectorRegistry())
        self.producer = MoodyProducer(self.log)
        made = Collaborators(
            topics=NAMES,
            topic_states=FakeAdmin(self.log).topics,
            producer=self.producer,
            open_reader=lambda: FakeReader(self.log),
            weights=puller if puller is not None else self.weights,
            engine=self.engine,
            tokenizer=FakeTokenizer(),
            task=task if task is not None else FakeTask(),
            scorer=self.scorer,
            model=model or {},
        )
        self.loop = ProduceLoop(self.run, "p0", made, metrics=self.metrics, stop=self.stop, metrics_url="http://m")
        self.me = self.loop.incarnation
        self.reason: str | None = None
        self.error: EchoError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.reason = self.loop.run()
        except EchoError as error:
            self.error = error

    def start(self) -> "Harness":
        self._thread.start()
        return self

    def tell(self, *messages: ControlMessage) -> None:
        for message in messages:
            self.append(control.key(message), control.encode(message))

    def append(self, key: bytes, value: bytes) -> None:
        with self.log.changed:
            self.log.append(NAMES.control, key, value, ())

    def grant(self, grant: Grant) -> None:
        self.tell(Progress(run_id=RUN, sequence=0, version=0, step=0, grants={self.me: grant}, created=time.time()))

    def ask(self, *requests: Request) -> None:
        with self.log.changed:
            for request in requests:
                self.log.append(NAMES.requests, control.key(request), control.encode(request), ())

    def trajectories(self) -> list[Trajectory]:
        return [codec.decode(record.value) for record in self.log.records(NAMES.trajectories)]

    def heartbeats(self) -> list[Heartbeat]:
        return [control.decode_heartbeat(r.value, r.where) for r in self.log.records(NAMES.heartbeats)]

    def wait_for_heartbeat(self, what: Callable[[Heartbeat], bool], name: str, *, new: bool = False) -> Heartbeat:
        """The first heartbeat like that; with `new`, the first of those that are sent from now on."""
        after = len(self.heartbeats()) if new else 0

        def find() -> Heartbeat | None:
            return next((one for one in self.heartbeats()[after:] if what(one)), None)

        found = eventually(find, f"a heartbeat: {name}; last {self.heartbeats()[-1:]}; error {self.error}")
        assert found is not None
        return found

    def wait_until_idle(self) -> None:
        """Two heartbeats in a row that are begun from now on say that the loop waits, with the same totals."""
        last: Heartbeat | None = None
        while True:
            beat = self.wait_for_heartbeat(lambda one: True, "any", new=True)
            same = last is not None and (last.groups_started, last.state) == (beat.groups_started, beat.state)
            if same and beat.state.startswith("waiting"):
                return
            last = beat

    def ends_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def join(self) -> "Harness":
        assert self.ends_within(20), "the loop does not end"
        return self

    def groups(self) -> list[str]:
        return list(dict.fromkeys(one.group_id for one in self.trajectories()))


@pytest.fixture
def make() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def build(**options: Any) -> Harness:
        made.append(Harness(**options))
        return made[-1]

    yield build
    for harness in made:
        harness.stop.set()
        harness.join()


def test_a_trajectory_carries_what_it_was_made_of(make: Callable[..., Harness]) -> None:
    h = make().start()
    h.tell(announcement(0))
    eventually(lambda: len(h.trajectories()) == 2, "the one group that an unknown producer may begin")
    first, second = h.trajectories()
    assert first.group_id == second.group_id
    assert incarnation_of(first.group_id) == h.me
    assert (first.group_index, second.group_index) == (0, 1)
    assert [one.sequence_number for one in (first, second)] == [0, 1]
    assert bytes(first.prompt_ids.astype("u1")).decode() == first.prompt_id.removeprefix("count-")
    text, reference = h.scorer.asked[0]
    assert text == "".join(map(chr, first.completion_ids))
    assert reference == {"n": int(first.prompt_id.removeprefix("count-"))}
    assert first.reward == int(first.completion_ids[0]) % 2 == first.reward_components["odd"]
    assert (first.engine, first.model, first.producer_id) == ("fake 1.0", "tiny", "p0")
    assert first.sampling.seed is not None
    assert first.started_at <= first.finished_at


def test_prompts_differ_between_incarnations_and_seeds_between_calls(make: Callable[..., Harness]) -> None:
    one, other = make(), make()
    for h in (one, other):
        h.start().tell(announcement(0, grants={h.me: Grant(window=8, resolved=0)}))
        eventually(lambda h=h: len(h.groups()) == 8, "a whole window")
    assert not {t.prompt_id for t in one.trajectories()} & {t.prompt_id for t in other.trajectories()}
    seeds = [[call[2].seed for call in h.engine.calls] for h in (one, other)]
    assert seeds[0] == seeds[1], "the same producer id and seed sample alike"
    assert len(set(seeds[0])) == len(seeds[0]) > 1


def test_spans_are_right_when_the_weights_change_in_mid_generation(make: Callable[..., Harness]) -> None:
    h: Harness

    def at_token(index: int) -> None:
        if index == 2:
            h.tell(announcement(1))
            h.wait_for_heartbeat(lambda one: one.pulls == 2, "version 1 was pulled")

    h = make(tokens=4, before_token=at_token)
    h.start().tell(announcement(0))
    eventually(lambda: h.trajectories(), "a record")
    assert {one.spans for one in h.trajectories()} == {((0, 0), (2, 1))}
    assert h.wait_for_heartbeat(lambda one: one.serving == 1, "version 1 serves").announced == 1


def test_a_failed_pull_never_advances_what_is_served(make: Callable[..., Harness]) -> None:
    h = make()
    h.weights.fails.add(1)
    h.start().tell(announcement(0))
    h.wait_for_heartbeat(lambda one: one.serving == 0, "version 0 serves")
    h.tell(announcement(1, grants={h.me: Grant(window=6, resolved=1)}))
    failed = h.wait_for_heartbeat(lambda one: one.failed_pulls > 0, "the failed pull")
    assert "version 1 could not be pulled" in failed.last_pull_error
    assert (failed.serving, failed.announced) == (0, 1)
    eventually(lambda: len(h.groups()) > 1, "sampling goes on under the old version")
    assert {one.spans for one in h.trajectories()} == {((0, 0),)}
    h.weights.fails.clear()
    healed = h.wait_for_heartbeat(lambda one: one.serving == 1, "a later try succeeds")
    assert healed.last_pull_error == ""
    assert h.weights.had == [None, 0], "the second stands on the first"


def test_weights_that_the_engine_refuses_leave_the_old_ones_serving(make: Callable[..., Harness]) -> None:
    h: Harness

    def at_token(index: int) -> None:
        if index == 1 and len(h.engine.calls) == 1:
            h.tell(announcement(1, grants={h.me: Grant(window=4, resolved=0)}))
            h.wait_for_heartbeat(lambda one: one.pulls == 2, "version 1 was pulled")

    h = make(before_token=at_token)
    h.engine.refuses.add(1)
    h.start().tell(announcement(0))
    refused = h.wait_for_heartbeat(lambda one: one.failed_pulls > 0, "the refusal")
    assert "refused version 1" in refused.last_pull_error
    assert refused.serving == 0
    # The group that was given up holds no room.
    eventually(lambda: len(h.groups()) >= 3, "the window is used under the old version")
    assert {one.spans for one in h.trajectories()} == {((0, 0),)}
    assert h.weights.asked == [0, 1], "what the engine refused is not pulled again"
    h.tell(announcement(2))
    h.wait_for_heartbeat(lambda one: one.serving == 2 and not one.last_pull_error, "the next version serves")


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_engine_that_serves_nothing_any_more_ends_the_producer(make: Callable[..., Harness], in_flight: bool) -> None:
    """A load that broke off half-way. To wait for a newer policy may be to wait for ever: the trainer may lack our samples."""
    h: Harness

    def at_token(index: int) -> None:
        if in_flight and index == 1:
            h.tell(announcement(1))
            h.wait_for_heartbeat(lambda one: one.pulls == 2, "version 1 was pulled")

    h = make(before_token=at_token)
    h.engine.breaks.add(1)
    h.start().tell(announcement(0))
    if not in_flight:
        h.wait_for_heartbeat(lambda one: one.groups_published == 1, "the first group")
        h.tell(announcement(1))
    h.join()
    assert isinstance(h.error, EngineError)
    assert "broke off half-way" in str(h.error)
    assert h.heartbeats()[-1].leaving


def test_an_engine_that_fails_ends_the_producer(make: Callable[..., Harness]) -> None:
    def at_token(index: int) -> None:
        raise EngineError("the device is gone")

    h = make(before_token=at_token).start()
    h.tell(announcement(0))
    h.join()
    assert isinstance(h.error, EngineError)
    assert h.heartbeats()[-1].leaving


def test_nothing_begins_above_the_window(make: Callable[..., Harness]) -> None:
    h = make(groups_per_call=2).start()
    h.tell(announcement(0))
    h.wait_until_idle()
    assert len(h.groups()) == 1, "one group until the trainer knows us"
    h.grant(Grant(window=5, resolved=1))
    eventually(lambda: len(h.groups()) >= 6, "the granted window")
    h.wait_until_idle()
    assert len(h.groups()) == 6
    assert [prompts for _, prompts, _ in h.engine.calls] == [2, 4, 4, 2], "groups of 2, at most 2 groups a call"
    assert h.heartbeats()[-1].groups_started == 6
    assert h.heartbeats()[-1].groups_published == 6


def test_grants_for_others_and_of_other_runs_are_not_ours(make: Callable[..., Harness]) -> None:
    h = make().start()
    h.tell(announcement(0, grants={"p0-other": MANY}))
    h.tell(Progress(run_id="foreign", sequence=0, version=0, step=0, grants={h.me: MANY}, created=time.time()))
    h.wait_until_idle()
    assert len(h.groups()) == 1


def test_nothing_is_sampled_that_would_be_stale_at_birth(make: Callable[..., Harness]) -> None:
    h = make(max_staleness=0)
    h.weights.hold(1)
    h.start().tell(announcement(0))
    h.wait_for_heartbeat(lambda one: one.groups_published == 1, "the first group")
    h.tell(announcement(1, grants={h.me: Grant(window=3, resolved=1)}))
    h.wait_for_heartbeat(lambda one: one.announced == 1, "version 1 was heard of")
    h.wait_until_idle()
    assert len(h.groups()) == 1, "version 0 would be stale"
    h.weights.release(1)
    eventually(lambda: len(h.groups()) == 4, "staleness 0 makes progress")
    assert [one.min_policy_version for one in h.trajectories()] == [0] * 2 + [1] * 6


def test_of_several_pending_announcements_only_the_newest_is_pulled(make: Callable[..., Harness]) -> None:
    h = make()
    h.tell(*(announcement(version) for version in range(6)))
    h.start()
    eventually(lambda: h.trajectories(), "a record")
    assert h.weights.asked == [5]
    assert h.engine.loads == [5]


def test_a_lower_version_changes_nothing(make: Callable[..., Harness]) -> None:
    h = make()
    h.tell(announcement(3), announcement(2))
    h.start()
    h.wait_for_heartbeat(lambda one: one.serving == 3, "version 3 serves")
    assert h.weights.asked == [3]


def test_a_newer_announcement_cancels_a_pull_but_never_starves_the_engine(make: Callable[..., Harness]) -> None:
    h = make(max_staleness=4).start()
    h.tell(announcement(0))
    h.wait_for_heartbeat(lambda one: one.serving == 0, "version 0 serves")
    for version in (1, 2):
        h.weights.hold(version)
        h.tell(announcement(version))
        eventually(lambda version=version: version in h.weights.asked, f"the pull of version {version}")
    assert h.weights.cancelled == [1]
    h.tell(announcement(3))
    h.wait_for_heartbeat(lambda one: one.announced == 3, "version 3 was heard of")
    h.weights.release(2)
    h.wait_for_heartbeat(lambda one: one.serving == 3, "version 3 serves")
    assert h.weights.asked == [0, 1, 2, 3]
    assert h.weights.cancelled == [1], "the second pull in a row was finished"


def test_a_pull_that_could_not_be_sampled_from_is_always_cancelled(make: Callable[..., Harness]) -> None:
    h = make(max_staleness=0).start()
    h.tell(announcement(0))
    h.wait_for_heartbeat(lambda one: one.serving == 0, "version 0 serves")
    for version in (1, 2, 3):
        h.weights.hold(version)
        h.tell(announcement(version))
        eventually(lambda version=version: version in h.weights.asked, f"the pull of version {version}")
    assert h.weights.cancelled == [1, 2]


def test_foreign_runs_are_ignored(make: Callable[..., Harness]) -> None:
    h = make().start()
    h.tell(announcement(9, run_id="foreign"), end_of_run("foreign"))
    h.append(b"junk", b"\x80not json")
    h.tell(announcement(0))
    eventually(lambda: h.trajectories(), "a record")
    assert h.weights.asked == [0]
    assert {one.min_policy_version for one in h.trajectories()} == {0}
    assert h.reason is None


def test_the_end_of_the_run_ends_it_with_everything_acknowledged(make: Callable[..., Harness]) -> None:
    h: Harness

    def at_token(index: int) -> None:
        if len(h.engine.calls) == 2:
            h.tell(end_of_run())

    h = make(before_token=at_token)
    h.start().tell(announcement(0, grants={h.me: MANY}))
    h.join()
    assert h.error is None
    assert "all steps done" in (h.reason or "")
    sampled = sum(prompts for _, prompts, _ in h.engine.calls)
    assert len(h.trajectories()) == sampled > 0, "what was sampled is published"
    last = h.heartbeats()[-1]
    assert last.leaving
    assert last.groups_published == sampled // 2
    assert last.queued_bytes == 0


def test_a_producer_does_not_end_before_the_last_acknowledgement(make: Callable[..., Harness]) -> None:
    h: Harness

    def at_token(index: int) -> None:
        h.producer.hold()
        h.tell(end_of_run())

    h = make(tokens=1, before_token=at_token)
    h.start().tell(announcement(0))
    eventually(lambda: h.loop.state == "draining", "it waits for the broker")
    eventually(lambda: len(h.trajectories()) == 2, "both records are in the log")
    assert h.ends_within(1.5) is False
    h.producer.release()
    h.join()
    assert h.error is None
    assert h.heartbeats()[-1].groups_published == 1


def test_a_run_that_was_resumed_after_its_end_goes_on(make: Callable[..., Harness]) -> None:
    h = make()
    h.tell(announcement(0), end_of_run(), announcement(1))
    h.start()
    eventually(lambda: h.trajectories(), "a record")
    assert h.reason is None


def test_a_producer_that_comes_after_the_end_leaves_without_sampling(make: Callable[..., Harness]) -> None:
    h = make()
    h.tell(announcement(0), end_of_run())
    h.start().join()
    assert h.error is None
    assert h.engine.calls == []


def test_a_stop_finishes_and_publishes_the_running_batch(make: Callable[..., Harness]) -> None:
    h: Harness
    h = make(before_token=lambda index: h.stop.set())
    h.start().tell(announcement(0, grants={h.me: MANY}))
    h.join()
    assert h.reason == "a stop was asked for"
    assert [prompts for _, prompts, _ in h.engine.calls] == [8]
    assert len(h.trajectories()) == 8
    assert h.heartbeats()[-1].leaving


def test_a_stop_while_nothing_is_announced_ends_at_once(make: Callable[..., Harness]) -> None:
    h = make().start()
    h.wait_for_heartbeat(lambda one: one.state == "waiting for a policy", "it waits")
    h.stop.set()
    h.join()
    assert h.reason == "a stop was asked for"


def test_a_broker_that_refuses_a_record_ends_the_producer_with_its_words(make: Callable[..., Harness]) -> None:
    h = make()
    h.producer.refusal = "MSG_SIZE_TOO_LARGE: too large"
    h.start().tell(announcement(0))
    h.join()
    assert isinstance(h.error, BrokerError)
    assert "MSG_SIZE_TOO_LARGE" in str(h.error)


def test_a_given_up_group_leaves_no_gap_and_no_phantom(make: Callable[..., Harness]) -> None:
    h = make(groups_per_call=1)
    real, lied = h.engine.generate, []

    def generate(*args: Any, **options: Any) -> Any:
        completions = real(*args, **options)
        if len(lied) < 1:
            lied.append(True)
            return [one._replace(logprobs=[float("nan")] * len(one.logprobs)) for one in completions]
        return completions

    h.engine.generate = generate  # type: ignore[method-assign]
    h.start().tell(announcement(0))
    eventually(lambda: h.trajectories(), "the next group takes its place in a window of 1")
    h.wait_until_idle()
    assert [one.sequence_number for one in h.trajectories()] == [0, 1]
    assert h.heartbeats()[-1].groups_started == 1
