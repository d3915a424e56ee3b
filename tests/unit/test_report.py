"""A run is counted from the log: a journal that says more than the log holds is found out."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from echo import codec, dead_letter, report
from echo.demo_view import bias_table
from echo.errors import BrokerError, CheckpointError
from echo.log import LogRecord
from tests.fakes.log import FakeLog, FakeReader
from tests.helpers import RUN_ID, make_trajectory


def record(offset: int, **overrides: Any) -> LogRecord:
    key, headers, value = codec.encode(make_trajectory(sequence_number=offset, **overrides))
    return LogRecord("trajectories", 0, offset, key, [*headers], value, 0)


def line(step: int, version: int = 0, **resolved: list[list[int]]) -> dict[str, Any]:
    return {"step": step, "version": version, "resolved": {reason: {"0": spans} for reason, spans in resolved.items()}}


def test_every_record_is_looked_up_in_the_journal() -> None:
    records = [record(n, spans=((0, n),)) for n in range(6)] + [record(6, run_id="other")]
    lines = [line(1, version=3, trained=[[0, 2]], stale=[[3, 4]]), line(2, version=4, trained=[[2, 3]], foreign_run=[[6, 7]])]
    counts = report.count(RUN_ID, records, [], report.fates(lines))
    assert counts == report.Counts(6, 3, {"stale": 1}, 0, 2, 3)
    assert counts.produced == counts.trained + sum(counts.dropped.values()) + counts.dead_lettered + counts.pending


@pytest.mark.parametrize(
    ("spans", "loss_mask", "staleness"),
    [
        pytest.param(((0, 3), (2, 8)), [1, 1, 1, 1], 1, id="the older span is masked"),
        pytest.param(((0, 3), (1, 5), (2, 8)), [1, 1, 1, 1], 1, id="both older spans are"),
        pytest.param(((0, 2), (1, 9)), [1, 1, 1, 1], 0, id="no token of the bound's version is left"),
        pytest.param(((0, 3), (1, 7), (2, 8)), [1, 0, 1, 1], 1, id="nor one that the policy did not sample"),
        pytest.param(((0, 7), (2, 8)), [1, 1, 1, 1], 2, id="none is masked"),
        pytest.param(((0, 3), (2, 5)), [1, 1, 1, 1], 4, id="no token is left, which still shows"),
    ],
)
def test_masked_tokens_are_not_trained_and_so_not_stale(
    spans: tuple[tuple[int, int], ...], loss_mask: list[int], staleness: int
) -> None:
    masked = {**line(1, version=9, trained=[[0, 1]]), "masked_below": 7}
    one = record(
        0,
        completion_ids=np.arange(4),
        logprobs=np.full(4, -1.0, dtype=np.float32),
        loss_mask=np.array(loss_mask, dtype=bool),
        spans=spans,
    )
    assert report.count(RUN_ID, [one], [], report.fates([masked])).staleness_max == staleness


def test_a_dead_letter_counts_only_where_its_topic_holds_it() -> None:
    broken = record(0)._replace(headers=[], value=b"junk")
    lines = [line(1, corrupt=[[0, 1]])]
    key, headers, value = dead_letter.wrap(broken, "corrupt", "junk")
    letter = LogRecord("dead_letter", 0, 0, key, [*headers], value, 0)
    assert report.count(RUN_ID, [broken], [letter], report.fates(lines)).dead_lettered == 1
    with pytest.raises(CheckpointError, match="dead-letter topic does not hold it"):
        report.count(RUN_ID, [broken], [], report.fates(lines))


def test_a_record_resolved_twice_is_found() -> None:
    with pytest.raises(CheckpointError, match="partition 0 offset 1 twice: as trained at step 1, as stale at step 2"):
        report.fates([line(1, trained=[[0, 2]]), line(2, stale=[[1, 2]])])


def test_a_journal_that_names_a_record_which_the_log_lacks_is_found() -> None:
    with pytest.raises(CheckpointError, match="1 records that the log does not hold, the first at partition 0 offset 1"):
        report.count(RUN_ID, [record(0)], [], report.fates([line(1, trained=[[0, 2]])]))


def test_a_topic_is_read_to_its_end() -> None:
    log = FakeLog()
    log.create_topic("t", 3)
    with log.changed:
        for number in range(50):
            log.append("t", b"%d" % number, b"v", [])
    assert len(list(report.read_topic(FakeReader(log), "t", 3, deadline_s=10))) == 50


class SilentReader(FakeReader):
    """A broker that never answers."""

    def read(self, max_records: int, timeout_s: float) -> list[LogRecord]:
        return []

    def at_end(self) -> bool:
        return False


def test_a_broker_that_does_not_answer_is_an_error_after_the_deadline() -> None:
    log = FakeLog()
    log.create_topic("t")
    with pytest.raises(BrokerError, match=r"topic t was not read to its end within 0\.01 s"):
        list(report.read_topic(SilentReader(log), "t", 1, deadline_s=0.01))


def test_the_summary_takes_the_first_and_last_five_steps(tmp_path: Path) -> None:
    lines = [{"step": n, "reward_mean": n / 10, "staleness": {"0": 3, "2": 1}} for n in range(1, 11)]
    counts = report.Counts(10, 8, {"stale": 1}, 0, 1, 2)
    summary = report.summary(lines=lines, counts=counts, staleness_bound=4, policy_versions=11, pulls=22, seconds=1.26)
    assert (summary["reward_first"], summary["reward_last"], summary["steps"], summary["seconds"]) == (0.3, 0.8, 10, 1.3)
    report.plot(lines, staleness_bound=4, title="t", path=tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as plot:
        assert plot.format == "PNG"


def test_drop_bias_is_decoded_from_the_log() -> None:
    """Per task, trained against dropped; other runs, dead letters and what is pending are in neither."""

    def of(offset: int, task: str, length: int, reward: float, **more: Any) -> LogRecord:
        return record(offset, task=task, completion_ids=np.arange(length), reward=reward, **more)

    records = [
        of(0, "sums", 2, 1.0),
        of(1, "sums", 5, -0.5),
        of(2, "sums", 30, 0.0),
        of(3, "words", 7, 0.25),
        of(4, "sums", 99, 9.0),  # pending
        of(5, "sums", 98, 9.0, run_id="other"),
        of(6, "sums", 97, 9.0)._replace(value=b"junk"),  # dropped as stale from its headers
        of(7, "sums", 96, 9.0)._replace(value=b"junk"),  # dead-lettered
    ]
    lines = [
        line(1, trained=[[0, 2]], foreign_run=[[5, 6]], corrupt=[[7, 8]]),
        line(2, stale=[[2, 3], [6, 7]], deadline=[[3, 4]]),
    ]
    bias = report.DropBias(RUN_ID, report.fates(lines))
    assert list(bias.watch(records)) == records
    assert bias.result() == {
        "drop_bias": {
            "trained": {"sums": {"number": 2, "completion_tokens_mean": 3.5, "reward_mean": 0.25}},
            "dropped": {
                "sums": {"number": 1, "completion_tokens_mean": 30.0, "reward_mean": 0.0},
                "words": {"number": 1, "completion_tokens_mean": 7.0, "reward_mean": 0.25},
            },
        },
        "unreadable": 1,
    }


def test_the_drop_bias_is_shown_as_a_table() -> None:
    bias = {
        "drop_bias": {"trained": {"sums": {"number": 2, "completion_tokens_mean": 3.5, "reward_mean": 0.25}}, "dropped": {}}
    }
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(bias_table(bias))
    assert re.search(r"sums\W+trained\W+2\W+3\.5\W+0\.250", console.export_text())
