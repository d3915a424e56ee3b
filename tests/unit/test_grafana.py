"""The committed board: built from code, all of its queries sound, all of its metrics real, all metrics on it."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from echo.metrics import ProducerMetrics, TrainerMetrics, WeightsMetrics
from tests import promql

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "grafana/echo.json").read_text())
TARGETS = [
    (panel["title"], target["expr"], target["legendFormat"]) for panel in promql.panels_in(BOARD) for target in panel["targets"]
]

# Families that no panel draws, each with its reason.
OFF_BOARD: dict[str, str] = {}

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def _exposed() -> dict[str, dict[str, frozenset[str]]]:
    """Family -> sample name -> labels, of all that Echo's processes expose."""
    families: dict[str, dict[str, frozenset[str]]] = {}
    for metrics in (
        TrainerMetrics("r", CollectorRegistry()),
        ProducerMetrics("r", "p", CollectorRegistry()),
        WeightsMetrics(CollectorRegistry()),
    ):
        # A metric has no sample before its labels have values, so its names and labels are asked of itself.
        for collector in set(metrics.registry._names_to_collectors.values()):
            assert isinstance(collector, MetricWrapperBase)
            (family,) = collector.describe()
            labels = frozenset(collector._labelnames)
            families[family.name] = {
                family.name + suffix: labels | ({"le"} if suffix == "_bucket" else set()) for suffix in _SUFFIXES[family.type]
            }
    return families


FAMILIES = _exposed()
SAMPLES = {sample: labels for samples in FAMILIES.values() for sample, labels in samples.items()}
KNOWN = SAMPLES | {metric: frozenset() for metric in promql.OWN_METRICS}


def test_the_committed_board_is_what_the_code_builds() -> None:
    """`python grafana/build.py --check` agrees; whoever edits the JSON by hand, or forgets to build it, is told."""
    check = subprocess.run(
        [sys.executable, "grafana/build.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize(("title", "expr", "legend"), TARGETS)
def test_a_query_is_sound(title: str, expr: str, legend: str) -> None:
    """It parses, reads metrics that exist by labels that they have, and its legend names labels of the result."""
    for selector in promql.selectors(expr):
        assert selector.metric in KNOWN, f"{title}: nothing exposes {selector.metric}"
        unknown = {label for label, _, _ in selector.matchers} - KNOWN[selector.metric] - promql.TARGET_LABELS
        assert not unknown, f"{title}: {selector.metric} has no label {unknown}"
    legend_labels = set(re.findall(r"{{(\w+)}}", legend))
    assert legend_labels <= promql.labels_of(expr, KNOWN), title


@pytest.mark.parametrize(("title", "expr", "legend"), TARGETS)
def test_a_query_reads_the_chosen_run_alone(title: str, expr: str, legend: str) -> None:
    """Every series that carries a run is matched by it; the others are held to it by a join. `up` knows no run."""
    selected = [s for s in promql.selectors(expr) if s.metric not in promql.OWN_METRICS]
    of_run = [("run", "Re", "$run") in s.matchers for s in selected]
    assert all(chosen for s, chosen in zip(selected, of_run, strict=True) if "run" in SAMPLES[s.metric]), title
    assert any(of_run) or not selected, title


def test_every_family_is_on_the_board_or_left_off_with_a_reason() -> None:
    shown = promql.metrics_in(BOARD)
    left_off = {family for family, samples in FAMILIES.items() if not shown & samples.keys()}
    assert left_off == OFF_BOARD.keys()
    assert all(OFF_BOARD.values())


def test_variables_choose_by_labels_that_exist() -> None:
    names = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert names == {"datasource", "run", "producer", "job"}
    for selector, label in promql.variable_queries_in(BOARD):
        assert label in promql.labels_of_all(selector, KNOWN)
    used = set(re.findall(r"\$(\w+)", " ".join(promql.queries_in(BOARD)))) - {"__rate_interval", "__range"}
    assert used == names - {"datasource"}


def test_a_panel_explains_itself() -> None:
    """Its title is its own, its description ends in the names of its metrics, it has a unit and words for no data."""
    panels = list(promql.panels_in(BOARD))
    twice = [title for title, n in Counter(panel["title"] for panel in panels).items() if n > 1]
    assert not twice
    for panel in panels:
        metrics = {s.metric.removesuffix("_bucket") for t in panel["targets"] for s in promql.selectors(t["expr"])}
        _, _, names = panel["description"].rpartition(". ")
        assert set(names.split(", ")) == metrics, panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], panel["title"]
        assert defaults["noValue"] == "no traffic"
        assert [m["options"]["match"] for m in defaults["mappings"]] == ["null+nan"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_no_two_panels_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert taken.setdefault(cell, panel["title"]) == panel["title"]
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_colour_means_a_threshold() -> None:
    """Fixed colours are blues, but for bounds; a stat leaves blue only for a value that is a finding."""
    for panel in promql.panels_in(BOARD):
        for override in panel["fieldConfig"]["overrides"]:
            for setting in override["properties"]:
                if setting["id"] == "color" and "blue" not in setting["value"]["fixedColor"]:
                    assert override["matcher"]["options"] in {"bound S", "limit"}
        if panel["type"] == "stat":
            colours = {step["color"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]}
            assert "blue" in colours
            assert colours == {"blue"} or panel["title"] in {"Producers alive", "Targets down"}


def test_a_broken_query_is_named() -> None:
    with pytest.raises(ValueError, match=r"sum\(rate\(echo_train_step"):
        promql.parse("sum(rate(echo_train_step[1m])")
    with pytest.raises(ValueError, match="groups by"):
        promql.labels_of("sum by (nonsense) (echo_train_step)", KNOWN)


def test_names_are_those_of_an_exposition() -> None:
    """`metrics_in` and `names_of` speak of the same names, so that a live process can be held against the board."""
    metrics = ProducerMetrics("r", "p", registry := CollectorRegistry())
    metrics.pulls.labels("r", "p", "ok").inc()
    metrics.pull_bytes.labels("r", "p", "origin").inc()
    metrics.phase_seconds.labels("r", "p", "wait").inc()
    metrics.scorings.labels("r", "p", "ok").inc()
    metrics.prompts_left_out.labels("r", "p", "too_long").inc()
    metrics.clock_difference.labels("r", "p").set(0.1)
    names = promql.names_of(generate_latest(registry).decode())
    of_producers = {name for name in promql.metrics_in(BOARD) if name.startswith("echo_produce_")}
    assert of_producers - names == set()
