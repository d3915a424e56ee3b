"""The data path's benchmark: its records are what it says, and it judges by its targets. Numbers want a quiet machine."""

import json
from pathlib import Path

import numpy as np
import pytest

from echo import codec
from tests.benchmarks import datapath


def test_records_are_of_the_size_and_kind_that_is_promised() -> None:
    groups = datapath.make_groups(16)
    assert [len(group) for group in groups] == [datapath.GROUP] * 2
    ids = np.concatenate([t.completion_ids for group in groups for t in group])
    assert {t.token_count for group in groups for t in group} == {256 + 1024}
    assert {t.logprobs.dtype.name for group in groups for t in group} == {"float32"}
    assert 2**16 < ids.max() < datapath.VOCABULARY
    # Half of the tokens are frequent ones, half are spread over the vocabulary: about 11 bits of entropy.
    shares = np.unique(ids, return_counts=True)[1] / len(ids)
    assert 9 < -(shares * np.log2(shares)).sum() < 13
    assert len({codec.encode(t).value for group in groups for t in group}) == 16


def test_what_falls_short_is_named() -> None:
    good = {"datapath_ratio": 0.85, "stale_drop_us": -1.0, "bytes_per_token": 6.4}
    assert datapath.shortfalls(good) == []
    bad = {"datapath_ratio": 0.84, "stale_drop_us": 2.1, "bytes_per_token": 6.4}
    assert datapath.shortfalls(bad) == [
        "datapath_ratio is 0.84, to be at least 0.85",
        "stale_drop_us is 2.1, to be at most 2.0",
    ]


@pytest.mark.usefixtures("tansu")
def test_it_runs_through_both_ways_and_writes_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    status = datapath.main(["--json", str(out), "--records", "512", "--repetitions", "1", "--broker", "tansu"])
    result = json.loads(out.read_text())
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert (status, last.startswith("falls short: ")) in ((1, True), (0, False))
    assert {"datapath_ratio", "stale_drop_us", "bytes_per_token", "consumer_cpu_s_per_10k"} < result.keys()
    assert 3.2 < result["bytes_per_token"] < 6.4
    assert result["brokers"]["tansu"]["echo_read_s"] > 0
