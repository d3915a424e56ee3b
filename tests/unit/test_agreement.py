"""What both sides must have alike: each difference is named by its key, on both sides, and nothing else is one."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from consumers.wiring import trainer_of
from echo import control
from echo.agreement import agreement, differences, model_files
from echo.config import RunConfig
from echo.control import Announcement, EndOfRun, Grant, Progress
from echo.errors import AgreementError
from echo.metrics import TrainerMetrics
from echo.process import StopSignal
from tests.eventually import eventually
from tests.helpers import RUN_ID
from tests.unit.test_fleet import beat
from tests.unit.test_learner import make_model
from tests.unit.test_produce_loop import RUN, Harness, announcement
from tests.unit.test_train_loop import NAMES, Cluster, make_run

BASE: dict[str, Any] = {
    "run_id": RUN,
    "model": {"path": "tiny"},
    "task": {"name": "count", "params": {"a": 1}},
    "sampling": {"group_size": 2, "max_tokens": 8},
}
MODEL = {"model/config.json": "c0ffee", "model/tokenizer.json": "7ea"}
CHANGES: dict[str, dict[str, Any]] = {
    "mode": {"mode": "sequential"},
    "max_staleness": {"max_staleness": 1},
    "learner.publish_every": {"learner": {"publish_every": 2}},
    "sampling.group_size": {"sampling": {"group_size": 4}},
    "sampling.temperature": {"sampling": {"temperature": 0.5}},
    "sampling.top_p": {"sampling": {"top_p": 0.9}},
    "sampling.top_k": {"sampling": {"top_k": 20}},
    "sampling.max_tokens": {"sampling": {"max_tokens": 16}},
}
SEQUENTIAL_CHANGES: dict[str, dict[str, Any]] = {
    "task.name": {"task": {"name": "other"}},
    "task.params": {"task": {"params": {"a": 2}}},
    "task.chat": {"task": {"chat": True}},
    "task.seed": {"task": {"seed": 3}},
}
HARMLESS: list[dict[str, Any]] = [
    {"producer": {"groups_per_call": 3}},
    {"model": {"path": "/elsewhere/tiny"}},
    {"weights": {"port": 1}},
    {"limits": {"waiting_s": 1}},
    {"learner": {"lr": 1.0}},
    {"metrics": {"produce_port": 0}},
]


def run_with(*changes: dict[str, Any]) -> RunConfig:
    data = json.loads(json.dumps(BASE))
    for change in changes:
        for key, value in change.items():
            data[key] = data.get(key, {}) | value if isinstance(value, dict) else value
    return RunConfig.model_validate(data)


def test_every_key_that_both_must_have_is_a_difference_named_with_both_values() -> None:
    ours = agreement(run_with(), MODEL)
    for key, change in CHANGES.items():
        theirs = agreement(run_with(change), MODEL)
        expected = {key, "max_staleness"} if key == "mode" else {key}
        assert {phrase.split(" is ")[0] for phrase in differences(theirs, ours)} == expected
    assert differences(agreement(run_with(CHANGES["sampling.group_size"]), MODEL), ours) == [
        "sampling.group_size is 4 there and 2 here"
    ]
    for change in HARMLESS:
        assert differences(agreement(run_with(change), MODEL), ours) == []


def test_in_sequential_mode_the_task_must_be_the_same_and_in_async_mode_it_may_be_another() -> None:
    sequential = CHANGES["mode"]
    for key, change in SEQUENTIAL_CHANGES.items():
        assert differences(agreement(run_with(change), MODEL), agreement(run_with(), MODEL)) == []
        (phrase,) = differences(agreement(run_with(sequential, change), MODEL), agreement(run_with(sequential), MODEL))
        assert phrase.startswith(f"{key} is ")
    # Its max_staleness is 0, whatever the run file has.
    assert (
        differences(agreement(run_with(sequential, CHANGES["max_staleness"]), MODEL), agreement(run_with(sequential), MODEL))
        == []
    )


def test_a_value_that_is_long_is_told_as_a_digest() -> None:
    long = run_with(CHANGES["mode"], {"task": {"params": {"text": "x" * 10_000}}})
    assert len(agreement(long, MODEL)["task.params"]) < 30


def test_nothing_is_said_against_an_older_side_that_tells_less() -> None:
    ours = agreement(run_with(), MODEL)
    assert differences({}, ours) == differences(ours, {}) == []
    assert differences(agreement(run_with(), {}), ours) == []


def test_messages_of_an_older_version_are_read() -> None:
    raw = json.loads(control.encode(announcement(3)))
    del raw["agreement"]
    read = control.decode_control(json.dumps(raw).encode(), "control[0]@1")
    assert isinstance(read, Announcement)
    assert read.agreement == {}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}
CONFIG = {"model_type": "qwen3", "hidden_size": 8, "transformers_version": "5.19.0", "dtype": "float32"}


def write_model(folder: Path, *, config: dict[str, Any] = CONFIG, tokenizer: dict[str, Any] = TOKENIZER, **files: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, text in files.items():
        (folder / name).write_text(text)
    return str(folder)


def find(path: str, name: str) -> str | None:
    file = Path(path) / name
    return str(file) if file.exists() else None


def test_a_model_is_known_by_what_it_computes_and_not_by_who_saved_it_where(tmp_path: Path) -> None:
    first = model_files(write_model(tmp_path / "a"), find)
    assert set(first) == {"model/config.json", "model/tokenizer.json"}
    resaved = write_model(
        tmp_path / "b",
        config={**dict(reversed(CONFIG.items())), "transformers_version": "6.0.0", "dtype": "bfloat16", "_name_or_path": "x"},
        tokenizer={**TOKENIZER, "truncation": {"max_length": 4}, "model": {**TOKENIZER["model"], "merges": ["a b"]}},
        **{"vocab.json": "{}"},
    )
    assert model_files(resaved, find) == first


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("config.json", {"config": {**CONFIG, "rope_theta": 1e6}}),
        ("tokenizer.json", {"tokenizer": {**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": {"b": 0, "a": 1, "ab": 2}}}}),
        ("chat_template", {"chat_template.jinja": "{{ messages }}"}),
    ],
)
def test_a_model_of_the_same_shapes_that_reads_or_computes_otherwise_is_another(
    tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    base = {"chat_template.jinja": "{{ bos }}"} if name == "chat_template" else {}
    first, other = (model_files(write_model(tmp_path / at, **more), find) for at, more in (("a", base), ("b", fields)))
    assert {key for key in first if first[key] != other[key]} == {f"model/{name}"}


def test_what_can_not_be_read_is_not_told(tmp_path: Path) -> None:
    def absent(path: str, name: str) -> str | None:
        raise OSError("not in the cache")

    assert model_files("hub/name", absent) == {}
    assert model_files(write_model(tmp_path / "a", **{"config.json": "{"}), find).keys() == {"model/tokenizer.json"}


def test_the_transformers_library_finds_the_files_of_a_folder(model_path: str) -> None:
    from transformers.utils.hub import cached_file

    assert "model/config.json" in model_files(model_path, cached_file)


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


def told(h: Harness, version: int, *changes: dict[str, Any], model: dict[str, str] | None = None) -> Announcement:
    """An announcement of a trainer with another run file."""
    run = h.run.model_dump()
    for change in changes:
        for key, value in change.items():
            run[key] = {**run[key], **value} if isinstance(value, dict) else value
    base = announcement(version, grants={h.me: Grant(window=8, resolved=0)})
    values = agreement(RunConfig.model_validate(run), model or {})
    return Announcement(**{name: getattr(base, name) for name in base.__struct_fields__} | {"agreement": values})


@pytest.mark.parametrize("key", CHANGES)
def test_a_producer_ends_with_one_error_that_names_the_key_both_values_and_the_remedy(
    make: Callable[..., Harness], key: str
) -> None:
    h = make().start()
    h.tell(told(h, 0))
    eventually(lambda: len(h.groups()) >= 1, "it samples for a trainer that agrees")
    h.tell(told(h, 1, CHANGES[key]))
    h.join()
    assert isinstance(h.error, AgreementError)
    line = str(h.error)
    assert f"{key} is " in line
    assert "control[0]@" in line
    assert line.endswith("give both the same run file and model, and start this producer again")
    assert h.heartbeats()[-1].leaving


def test_a_producer_with_another_model_of_the_same_shapes_ends(make: Callable[..., Harness]) -> None:
    h = make(model={"model/config.json": "aaaa"}).start()
    h.wait_for_heartbeat(lambda one: one.agreement["model/config.json"] == "aaaa", "its heartbeat tells")
    h.tell(told(h, 0, model={"model/config.json": "bbbb"}))
    h.join()
    assert isinstance(h.error, AgreementError)
    assert "model/config.json is bbbb there and aaaa here" in str(h.error)
    assert h.trajectories() == []


def test_what_an_earlier_trainer_had_is_waited_out_aloud_and_a_living_one_decides(make: Callable[..., Harness]) -> None:
    """Producers may be started before a trainer that goes on with another run file."""
    h = make(run={"limits": {"waiting_s": 0.05}})
    h.tell(told(h, 0, CHANGES["sampling.temperature"]))
    with capture_logs() as said:
        h.start()
        eventually(
            lambda: any(
                "had other values (control[0]@0: sampling.temperature is 0.5 there" in entry["event"] for entry in said
            ),
            "the reason",
        )
    assert h.trajectories() == []
    h.tell(told(h, 1))
    eventually(lambda: h.trajectories(), "it samples for the trainer that agrees")


def test_a_progress_message_of_a_living_trainer_decides_as_well(make: Callable[..., Harness]) -> None:
    """It comes every few seconds, also while the trainer waits for samples."""
    h = make()
    h.tell(told(h, 0, CHANGES["sampling.group_size"]))
    h.start()
    h.wait_until_idle()
    values = told(h, 0, CHANGES["sampling.group_size"]).agreement
    h.tell(Progress(run_id=RUN, sequence=1, version=0, step=0, grants={}, created=1.0, agreement=values))
    h.join()
    assert isinstance(h.error, AgreementError)


def test_the_end_of_a_run_ends_a_producer_well_whatever_its_trainer_had(make: Callable[..., Harness]) -> None:
    h = make()
    h.tell(
        told(h, 0, CHANGES["mode"]), EndOfRun(run_id=RUN, sequence=1, version=0, step=1, reason="all steps done", created=1.0)
    )
    h.start().join()
    assert h.error is None
    assert h.reason == "the run ended: all steps done"


@pytest.mark.usefixtures("own_process")
def test_the_trainer_tells_its_part_and_names_a_producer_that_does_not_agree(model_path: str, tmp_path: Path) -> None:
    cluster = Cluster()
    run = make_run(model_path, tmp_path, steps=1)
    stop = StopSignal()
    values = {"sampling.group_size": "99", "mode": '"async"'}
    with (
        capture_logs() as said,
        trainer_of(run, cluster.clients, metrics=TrainerMetrics(RUN_ID, CollectorRegistry()), stop=stop) as trainer,
    ):
        looks = iter(range(10**6))

        def look() -> None:
            with cluster.log.changed:
                for name in ("a.1", "b.1"):
                    message = beat(name, next(looks), run_id=RUN_ID, agreement=values if name == "a.1" else {})
                    cluster.log.append(NAMES.heartbeats, control.key(message), control.encode(message), ())
            if any("does not agree" in entry["event"] for entry in said):
                stop.request()

        trainer._check_children = look
        trainer.run()
    (line,) = [entry for entry in said if "does not agree" in entry["event"]]
    assert line["log_level"] == "error"
    assert line["producer"] == "a"
    assert line["differences"].startswith("sampling.group_size is 99 there and ")
    first = cluster.messages()[0]
    assert isinstance(first, Announcement)
    assert first.agreement["mode"] == '"async"'
    assert len(first.agreement["model/config.json"]) == 16
