"""The checkpoint store: atomic under kill -9, verified on load, of one run, pruned."""

import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from consumers import checkpoint
from consumers.checkpoint import META, TENSORS, CheckpointStore
from echo.errors import CheckpointError, StoppedError
from tests.helpers import full_disk

READER = {"frontier": {"0": 12, "1": 7}, "resolved": {"0": [[14, 16], [20, 21]]}}


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.full((3, 5), float(step)),
        "model.b": torch.arange(7, dtype=torch.bfloat16) + step,
        "rng.torch": torch.tensor([step % 256], dtype=torch.uint8),
    }


def save(store: CheckpointStore, step: int) -> Path:
    return store.save(step, tensors_of(step), {"name": f"m{step}"}, policy_version=step + 100, reader=READER)


def assert_is_step(found: checkpoint.Loaded | None, step: int) -> None:
    assert found is not None
    assert (found.step, found.policy_version, found.meta, found.reader) == (step, step + 100, {"name": f"m{step}"}, READER)
    expected = tensors_of(step)
    assert found.tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert found.tensors[name].dtype == value.dtype
        assert torch.equal(found.tensors[name], value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(file: Path, place: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[place] ^= 0x01
    file.write_bytes(raw)


def test_what_is_saved_comes_back(tmp_path):
    """Tensors bit for bit in their dtypes, meta and reader part as given; nothing found in an empty or absent folder."""
    store = CheckpointStore(tmp_path / "deep" / "checkpoints", "run-1", keep=2)
    assert store.newest() is None
    path = save(store, 12)
    assert path.name == "step-0000012"
    assert names(path) == [META, TENSORS]
    assert_is_step(CheckpointStore(store.dir, "run-1", keep=2).newest(), 12)


def test_meta_is_readable_by_anything(tmp_path):
    """meta.json is plain JSON that names run, step, version, digest and read positions."""
    path = save(CheckpointStore(tmp_path, "run-1", keep=2), 3)
    meta = json.loads((path / META).read_text())
    assert (meta["run_id"], meta["step"], meta["policy_version"], meta["reader"]) == ("run-1", 3, 103, READER)
    assert len(meta["tensors_digest"]) == 64


def test_prune_keeps_the_newest_and_the_loaded_one(tmp_path):
    """The last `keep` stay; so does the one this process started from."""
    store = CheckpointStore(tmp_path, "run-1", keep=2)
    for step in (1, 2, 3):
        save(store, step)
    assert names(tmp_path) == ["step-0000002", "step-0000003"]
    later = CheckpointStore(tmp_path, "run-1", keep=2)
    assert_is_step(later.newest(), 3)
    for step in (4, 5, 6):
        save(later, step)
    assert names(tmp_path) == ["step-0000003", "step-0000005", "step-0000006"]


def test_the_same_step_is_replaced(tmp_path):
    """A second save of a step (more records resolved meanwhile) takes the first one's place."""
    store = CheckpointStore(tmp_path, "run-1", keep=1)
    save(store, 5)
    store.save(5, tensors_of(6), {}, policy_version=7, reader={"frontier": {"0": 99}})
    found = store.newest()
    assert found is not None
    assert (found.policy_version, found.reader) == (7, {"frontier": {"0": 99}})
    assert names(tmp_path) == ["step-0000005"]


def test_killed_while_replacing_a_step_the_old_one_is_found(tmp_path):
    """Between the two renames of a replacement the folder holds only `.previous`: it is loaded, and counted when pruning."""
    store = CheckpointStore(tmp_path, "run-1", keep=2)
    save(store, 5).rename(tmp_path / "step-0000005.previous")
    assert_is_step(store.newest(), 5)
    save(store, 6)
    assert names(tmp_path) == ["step-0000005.previous", "step-0000006"]
    save(store, 5)
    assert names(tmp_path) == ["step-0000005", "step-0000006"]


def test_a_start_supersedes_later_steps_and_a_save_does_not(tmp_path):
    """Starting over from an earlier step abandons the later ones: they must not win the next resume. Who only saves may be a
    trainer that another took over from: the later ones are the other's."""
    store = CheckpointStore(tmp_path, "run-1", keep=2)
    save(store, 50)
    save(store, 10)
    assert names(tmp_path) == ["step-0000010", "step-0000050"]
    with capture_logs() as logs:
        store.supersede(10)
    assert names(tmp_path) == ["step-0000010"]
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert_is_step(store.newest(), 10)


def test_a_folder_is_held_by_one_trainer_at_a_time(tmp_path):
    """Who comes second waits, says for whom, and has it once the first is gone, killed or not."""
    store = CheckpointStore(tmp_path / "checkpoints", "run-1", keep=2)
    looks = 0

    def stopping():
        nonlocal looks
        looks += 1
        if looks == 3:
            holder.kill()
            holder.wait()
        return False

    code = (
        "import sys, pathlib; from consumers.checkpoint import CheckpointStore\n"
        "with CheckpointStore(pathlib.Path(sys.argv[1]), 'run-1', 2).held(stopping=lambda: False, waiting_s=30):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(store.dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with capture_logs() as logs, store.held(stopping=stopping, waiting_s=0.0):
        assert looks >= 3
    assert any(f"process {holder.pid}" in entry["event"] for entry in logs)
    holder.stdin.close()
    holder.stdout.close()


def test_a_stop_ends_the_wait_for_a_folder(tmp_path):
    store = CheckpointStore(tmp_path, "run-1", keep=2)
    with store.held(stopping=lambda: False, waiting_s=30):
        with pytest.raises(StoppedError, match=rf"stopped while waiting.*process {os.getpid()}"):
            with store.held(stopping=lambda: True, waiting_s=30):
                raise AssertionError("it was held twice")


def test_a_folder_that_can_not_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    store = CheckpointStore(tmp_path / "file" / "checkpoints", "run-1", keep=2)
    with pytest.raises(CheckpointError, match=r"checkpoint\.dir: .*file/checkpoints can't be written.*choose another folder"):
        with store.held(stopping=lambda: False, waiting_s=30):
            raise AssertionError("it was held")


@pytest.mark.parametrize("file", [TENSORS, META])
def test_one_wrong_byte_anywhere_is_noticed(tmp_path, file):
    """Whichever byte of the newest is damaged: a warning, and the previous checkpoint, intact."""
    store = CheckpointStore(tmp_path, "run-1", keep=2)
    save(store, 1)
    damaged = save(store, 2) / file
    whole = damaged.read_bytes()
    # Every byte of meta.json that carries a value, a sample of the tensors'. Blanks of the layout may change: nothing is lost.
    places = range(0, len(whole), 7) if file == TENSORS else [i for i in range(len(whole)) if whole[i] not in b" \n"]
    for place in places:
        flip(damaged, place)
        with capture_logs() as logs:
            assert_is_step(store.newest(), 1)
        assert [entry["log_level"] for entry in logs] == ["warning"]
        damaged.write_bytes(whole)
    assert_is_step(store.newest(), 2)


def test_truncated_and_missing_files_are_noticed(tmp_path):
    store = CheckpointStore(tmp_path, "run-1", keep=4)
    for step in (1, 2, 3, 4):
        save(store, step)
    os.truncate(tmp_path / "step-0000004" / TENSORS, 20)
    (tmp_path / "step-0000003" / TENSORS).unlink()
    (tmp_path / "step-0000002" / META).unlink()
    assert_is_step(store.newest(), 1)


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path):
    store = CheckpointStore(tmp_path, "run-1", keep=2)
    for step in (1, 2):
        flip(save(store, step) / TENSORS, -1)
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole.*step-0000002.*step-0000001"):
        store.newest()


def test_a_foreign_run_is_refused_on_load_and_on_save(tmp_path):
    """Another run's folder is neither resumed from nor written into (its checkpoints would be pruned)."""
    save(CheckpointStore(tmp_path, "run-1", keep=2), 1)
    other = CheckpointStore(tmp_path, "run-2", keep=1)
    with pytest.raises(CheckpointError, match=r"belongs to run 'run-1', not 'run-2'"):
        other.newest()
    with pytest.raises(CheckpointError, match=r"belongs to run 'run-1'"):
        save(other, 2)
    assert names(tmp_path) == ["step-0000001"]


def test_unfinished_folders_are_passed_over_and_cleaned_up(tmp_path):
    """A temporary folder, however complete, is no checkpoint; the next save removes it."""
    store = CheckpointStore(tmp_path, "run-1", keep=2)
    save(store, 1)
    save(store, 9).rename(tmp_path / ".tmp-step-0000009-0badcafe")
    assert_is_step(store.newest(), 1)
    save(store, 2)
    assert names(tmp_path) == ["step-0000001", "step-0000002"]


def test_a_disk_that_refuses_is_a_clear_error(tmp_path):
    """The error names the checkpoint; nothing is left behind and the one before still loads."""
    store = CheckpointStore(tmp_path, "run-1", keep=2)
    save(store, 1)
    blocked = CheckpointStore(tmp_path / "step-0000001" / META / "below-a-file", "run-1", keep=2)
    with pytest.raises(CheckpointError, match=r"step-0000002: can't be written"):
        save(blocked, 2)
    assert_is_step(store.newest(), 1)


def test_a_full_disk_is_one_error_and_the_checkpoint_before_stands(tmp_path):
    store = CheckpointStore(tmp_path, "run-1", keep=2)
    save(store, 1)
    size = (tmp_path / "step-0000001" / "state.safetensors").stat().st_size
    with full_disk(size - 1), pytest.raises(CheckpointError, match=r"step-0000002: can't be written: .*free space on its disk"):
        save(store, 2)
    assert names(tmp_path) == ["step-0000001"]
    assert_is_step(store.newest(), 1)


def test_a_folder_is_held_on_a_full_disk_too(tmp_path):
    with full_disk(0), CheckpointStore(tmp_path, "run-1", keep=2).held(stopping=lambda: False, waiting_s=1):
        assert (tmp_path / ".lock").exists()


def _save_for_ever(folder: str, first: int, reports: Connection) -> None:
    store = CheckpointStore(Path(folder), "run-1", keep=1)
    for step in itertools.count(first):
        save(store, step)
        reports.send(step)


def _save_and_die(folder: str, step: int, operation: int) -> None:
    """Save, but be killed just before the `operation`-th change to the file system."""
    seen = itertools.count()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and next(seen) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    store = CheckpointStore(Path(folder), "run-1", keep=1)
    sys.addaudithook(hook)
    save(store, step)


@pytest.fixture(scope="module")
def fork() -> multiprocessing.context.ForkServerContext:
    """Starts real processes that have the imports behind them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.test_checkpoint"])
    return context


@pytest.mark.parametrize("step", [4, 5, 6], ids=["starting over", "replacing a step", "a new step"])
def test_kill_9_before_every_operation_of_a_save(fork, tmp_path, step):
    """Wherever a save is cut off, the checkpoint before it or the new one loads, without a warning."""
    for operation in itertools.count():
        folder = tmp_path / str(operation)
        store = CheckpointStore(folder, "run-1", keep=1)
        save(store, 5)
        process = fork.Process(target=_save_and_die, args=(str(folder), step, operation))
        process.start()
        process.join(60)
        with capture_logs() as logs:
            found = store.newest()
        assert found is not None
        assert_is_step(found, found.step)
        assert found.step in (5, step)
        assert logs == []
        save(store, 7)
        assert names(folder) == sorted([found.path.name, "step-0000007"])  # Nothing half-done stays behind.
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert operation > 8


def test_kill_9_at_random_moments_leaves_the_newest_whole(fork, tmp_path):
    """A real process saves without pause and is killed: what it reported as saved, or the one after it, loads."""
    moments = random.Random(1)
    store = CheckpointStore(tmp_path, "run-1", keep=1)
    reported = 0
    for _ in range(20):
        receive, send = fork.Pipe(duplex=False)
        process = fork.Process(target=_save_for_ever, args=(str(tmp_path), reported + 1, send))
        process.start()
        send.close()
        assert receive.poll(60), "the saving process reports nothing"
        process.join(timeout=moments.uniform(0, 0.03))  # The random moment; it never ends by itself.
        process.kill()
        process.join()
        while True:
            try:
                reported = receive.recv()
            except EOFError:
                break
        with capture_logs() as logs:
            found = store.newest()
        assert found is not None
        assert found.step in (reported, reported + 1)
        assert_is_step(found, found.step)
        assert logs == []
        reported = found.step
