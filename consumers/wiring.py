"""The real collaborators of the trainer's loop, from a run file: broker, topics, checkpoint, learner, weight server.

Refuses to start on a broker that does not answer or topics that do not fit, and to go on from a checkpoint of another run or
another cluster.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from transformers.utils.hub import cached_file

from consumers.checkpoint import CheckpointStore, Loaded
from consumers.dispatcher import Dispatcher
from consumers.fleet import Fleet
from consumers.fleet_listener import FleetListener
from consumers.intake import Intake
from consumers.learner import Learner
from consumers.ledger import Ledger
from consumers.lineage import abandoned
from consumers.parallel import Team
from consumers.policy import ControlWriter, PolicyPublisher, Told, read_told
from consumers.positions import Beginning, beginning, refuse_losses
from consumers.reader import TrajectoryReader
from consumers.requester import Requester
from consumers.train import Trainer
from echo import dead_letter
from echo.agreement import agreement, model_files
from echo.asking import ask_again
from echo.config import RunConfig
from echo.errors import CheckpointError
from echo.journal import Journal
from echo.kafka import KafkaGroupOffsets, KafkaLogAdmin, KafkaLogProducer, KafkaLogReader, TransactionalProducer
from echo.log import LogGroupOffsets, LogProducer, LogReader, LogTransactions
from echo.metrics import TrainerMetrics
from echo.preflight import check_cluster
from echo.process import StopSignal
from echo.staleness import total_window
from echo.topic_spec import TopicNames
from echo.topic_watch import Ask, TopicWatch
from echo.weights.spawn import KeptWeightServer
from echo.weights.store import WeightStore

log = structlog.get_logger("train")

_DEAD_LETTER_QUEUE_BYTES = 64 * 2**20
# The control topic is small where it is compacted; where it is not, a long run leaves some ten thousand messages.
_READ_CONTROL_S = 120.0
# A question about where partitions begin, each.
_ASK_S = 10.0
# A run that ends waits so long for its last positions to be shown.
_SHOW_S = 5.0


class Clients(NamedTuple):
    """How to open the log, and what the cluster is: Kafka in a real run, a fake in tests."""

    cluster_id: str
    topics: TopicNames
    topic_states: Ask
    """Which of the named topics exist, as they are now."""
    open_reader: Callable[[], LogReader]
    """For topics that no transaction of ours writes: a stranger's open one holds up nothing."""
    open_committed: Callable[[], LogReader]
    """For the control topic."""
    open_dead_letters: Callable[[], LogProducer]
    open_control: Callable[[], LogTransactions]
    """Its transactional id is the run id, so that opening it fences an older trainer of the run."""
    open_shown: Callable[[], LogGroupOffsets]
    """Where lag tools look: the group `echo-<run_id>`."""


def kafka_clients(run: RunConfig, *, stop: StopSignal) -> Clients:
    """Check the cluster and its topics, and say how to open them. Raises ConfigError, BrokerError, TopicError."""
    client_id = f"echo-train-{run.run_id}"
    spec, actual = check_cluster(run, client_id=client_id, stopping=stop.is_set)
    common: dict[str, Any] = {"settings": run.broker.settings, "client_id": client_id}
    open_reader = partial(KafkaLogReader, **common, max_record_bytes=run.limits.record_bytes, cluster_id=actual.cluster_id)
    return Clients(
        cluster_id=actual.cluster_id,
        topics=spec.names,
        topic_states=KafkaLogAdmin(run.broker.settings, client_id=client_id).topics,
        open_reader=partial(open_reader, committed=False),
        open_committed=partial(open_reader, committed=True),
        open_dead_letters=partial(
            KafkaLogProducer,
            **common,
            max_record_bytes=run.limits.record_bytes + dead_letter.OVERHEAD_BYTES,
            queue_bytes=_DEAD_LETTER_QUEUE_BYTES,
            cluster_id=actual.cluster_id,
        ),
        open_control=partial(TransactionalProducer, **common, transactional_id=run.run_id),
        open_shown=partial(KafkaGroupOffsets, **common, group=f"echo-{run.run_id}"),
    )


@contextmanager
def trainer_of(
    run: RunConfig, clients: Clients, *, metrics: TrainerMetrics, stop: StopSignal, team: Team | None = None
) -> Iterator[Trainer]:
    """Open everything that the run file names; close it in reverse. team: the ranks that it leads. Raises EchoError."""
    names = clients.topics
    checkpoints = CheckpointStore(run.checkpoint.dir, run.run_id, run.checkpoint.keep)
    # What is wrong with us must show before we end an older trainer.
    checkpoints.check(run.checkpoint.resume)
    learner = Learner(run, team)
    with ExitStack() as opened:
        asked = ("requests",) if run.mode == "sequential" else ()
        roles = ("trajectories", "control", "heartbeats", "dead_letter", *asked)
        patience: dict[str, Any] = {"patience_s": run.broker.timeout_s, "waiting_s": run.limits.waiting_s}
        topics = TopicWatch(clients.topic_states, names, roles, **patience).start()
        opened.callback(topics.close)
        server_url, check_children = _weight_server(run, opened)
        # From here on an older trainer of this run is fenced, so what it announced can be read to the end; once it has left
        # its folder, what it saved last is what we go on from.
        writer = ControlWriter(clients.open_control(), names.control, waiting_s=run.limits.waiting_s, check_topics=topics.check)
        opened.callback(writer.close)
        opened.enter_context(checkpoints.held(stopping=stop.is_set, waiting_s=run.limits.waiting_s))
        loaded = _loaded(checkpoints, run.checkpoint.resume)
        restored: Mapping[str, Any] = {}
        if loaded is not None:
            _refuse_other_cluster(loaded, clients.cluster_id)
            log.info("resuming", checkpoint=str(loaded.path), step=loaded.step)
            learner.load_state(loaded.tensors, loaded.meta)
            restored = loaded.reader
        # Before anything is announced: a start that fails changes nothing for producers.
        log_reader = clients.open_reader()
        opened.callback(log_reader.close)
        trajectories = topics.state(names.trajectories)
        asked_first = partial(_first_offsets, log_reader, names.trajectories, trajectories.partitions)
        firsts = ask_again(asked_first, f"the first offsets of {names.trajectories}", **patience)
        start = beginning(restored.get("ledger", {}), restored.get("topic_id"), trajectories, firsts)
        if loaded is not None and not run.checkpoint.accept_lost:
            refuse_losses(start, str(loaded.path), names.trajectories)
        told = _read_told(run, clients)
        # A control topic that was made anew has forgotten which versions there were, and producers sampled from them.
        newest = max(told.version, loaded.policy_version if loaded is not None else -1)
        writer.go_on_after(told.sequence)
        intake = Intake(
            run_id=run.run_id,
            max_staleness=run.staleness_bound,
            on_stale=run.on_stale,
            groups_per_step=run.batch.groups_per_step,
            buffer_bytes=run.batch.buffer_bytes,
            group_deadline_s=run.batch.group_deadline_s,
            min_group_size=run.batch.min_group_size,
            ledger=Ledger(range(trajectories.partitions), start.state),
            state=start.state,
            newest_version=newest,
            vocabulary=learner.vocabulary,
            max_tokens=run.batch.max_tokens or learner.positions,
        )
        agreed = agreement(run, model_files(run.model.path, cached_file))
        publisher = PolicyPublisher(
            run_id=run.run_id,
            agreement=agreed,
            store=WeightStore(run.weights.dir),
            writer=writer,
            server_url=server_url,
            chunk_bytes=run.weights.chunk_bytes,
            keep=run.versions_kept,
            delta_chain=run.weights.delta_chain,
            newest=newest,
        )
        _take_losses(intake, start, firsts, names.trajectories)
        dead_letters = clients.open_dead_letters()
        opened.callback(dead_letters.close)
        reader = TrajectoryReader(
            intake=intake,
            reader=log_reader,
            producer=dead_letters,
            topic=names.trajectories,
            partitions=partial(topics.partitions, names.trajectories),
            frontiers=intake.frontiers(),
            dead_letter_topic=names.dead_letter,
            max_letter_bytes=run.limits.record_bytes + dead_letter.OVERHEAD_BYTES,
        )
        opened.callback(reader.close)
        fleet = FleetListener(
            fleet=Fleet(
                run_id=run.run_id,
                total_window=_total_window(run),
                dead_after_s=run.batch.producer_dead_s,
                clock=time.monotonic,
                resolved=restored.get("groups_resolved"),
            ),
            reader=clients.open_reader(),
            topic=names.heartbeats,
            agreement=agreed,
            send_progress=lambda grants: publisher.progress(step=trainer.step, grants=grants),
            partitions=partial(topics.partitions, names.heartbeats),
            topic_id=partial(topics.topic_id, names.heartbeats),
            waiting_s=run.limits.waiting_s,
        )
        opened.callback(fleet.close)
        requester = None
        if run.mode == "sequential":
            send = partial(writer.ask, names.requests)
            requester = Requester(_dispatcher(run), intake=intake, alive=fleet.alive, send=send, given_up=fleet.take_given_up)
        shown = clients.open_shown()
        opened.callback(shown.close, _SHOW_S)
        checkpoints.supersede(loaded.step if loaded is not None else None)
        journal = Journal(run.checkpoint.dir, lines=loaded.reader["journal_lines"] if loaded is not None else 0)
        opened.callback(journal.close)
        if start.former is not None:
            journal.append({"step": loaded.step if loaded is not None else 0, "resolved": {}, "topic_anew": start.former})
        trainer = Trainer(
            run,
            learner=learner,
            intake=intake,
            reader=reader,
            fleet=fleet,
            publisher=publisher,
            checkpoints=checkpoints,
            journal=journal,
            metrics=metrics,
            stop=stop,
            check_children=check_children,
            cluster_id=clients.cluster_id,
            shown=shown,
            topics=topics,
            requester=requester,
            abandoned=partial(
                abandoned,
                restored.get("abandoned", ()),
                restored=loaded.policy_version if loaded is not None else -1,
            ),
            step=loaded.step if loaded is not None else 0,
        )
        yield trainer


def _first_offsets(reader: LogReader, topic: str, partitions: int) -> dict[int, int]:
    asked = [(topic, number) for number in range(partitions)]
    return {number: first for (_, number), first in reader.first_offsets(asked, _ASK_S).items()}


def _take_losses(intake: Intake, start: Beginning, firsts: Mapping[int, int], topic: str) -> None:
    """What was deleted before it was read is counted and named, and reading begins after it."""
    intake.begin_at(firsts)
    if start.former is not None:
        log.warning(
            "the topic was made anew: what was not read of the former one is lost", topic=topic, from_offsets=start.former
        )
    for number, intervals in intake.lose(start.losses).items():
        for first, end in intervals:
            log.warning("records are lost", topic=topic, partition=number, first=first, last=end - 1, count=end - first)


def _total_window(run: RunConfig) -> int | None:
    if run.mode == "sequential":
        return None
    return total_window(run.max_staleness, run.batch.groups_per_step, run.learner.publish_every)


def _dispatcher(run: RunConfig) -> Dispatcher:
    return Dispatcher(
        run_id=run.run_id,
        groups_per_step=run.batch.groups_per_step,
        groups_per_call=run.producer.groups_per_call,
        seed=run.seed,
        deadline_s=run.batch.request_deadline_s,
        clock=time.monotonic,
    )


def _loaded(checkpoints: CheckpointStore, resume: Path | str) -> Loaded | None:
    """The checkpoint to go on from, as `checkpoint.resume` says."""
    if isinstance(resume, Path):
        return checkpoints.load(resume)
    return checkpoints.newest() if resume == "auto" else None


def _refuse_other_cluster(loaded: Loaded, cluster_id: str) -> None:
    known = loaded.reader.get("cluster_id")
    if known != cluster_id:
        raise CheckpointError(
            f"{loaded.path}: its offsets are of cluster {known}, this is cluster {cluster_id}. Point broker.settings at the "
            "former cluster, or start a new run (another run_id and checkpoint.dir) with model.path on the trained weights"
        )


def _weight_server(run: RunConfig, opened: ExitStack) -> tuple[str, Callable[[], None]]:
    """Where producers reach the weights, and a check that the server, if it is ours, did not die too often."""
    if not run.weights.serve:
        return run.weights_url, lambda: None
    log_path = run.weights.dir.parent / f"{run.weights.dir.name}-server.log"
    server = KeptWeightServer.start(run, log_path)
    opened.callback(server.stop)
    log.info("weight server ready", url=server.url, log=str(log_path))
    return server.url, server.check


def _read_told(run: RunConfig, clients: Clients) -> Told:
    reader = clients.open_committed()
    try:
        return read_told(
            reader,
            topic=clients.topics.control,
            run_id=run.run_id,
            waiting_s=run.limits.waiting_s,
            deadline_s=_READ_CONTROL_S,
        )
    finally:
        reader.close()
