"""Writes Echo's Grafana board, echo.json, from code: `python grafana/build.py`. With `--check` it only compares.

Says which rows there are. Refuses to say what a row shows (rows_learning.py, rows_flow.py) and how a panel looks
(panels.py). Exits 1 with `--check` where the committed file differs from what the code builds.
"""

import argparse
import json
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model
from panels import DATASOURCE, RUN
from rows_flow import lag, memory, throughput, versions, weights
from rows_learning import learner, overview, resolution, staleness

BOARD = Path(__file__).resolve().with_name("echo.json")

# Title, panels, and the widths that its panels take in turn (24 make a line).
ROWS = (
    ("Overview", overview, (4, 4, 4, 4, 4, 4, 12, 12)),
    ("Staleness", staleness, (7, 5, 7, 5)),
    ("Lag", lag, (6, 6, 6, 6)),
    ("Versions", versions, (7, 7, 5, 5)),
    ("Throughput", throughput, (8,) * 6),
    ("Resolution", resolution, (6, 6, 6, 6, 8, 8, 8)),
    ("Weights", weights, (8,) * 9),
    ("Memory and back-pressure", memory, (6, 6, 6, 6)),
    ("Learner", learner, (6,) * 12),
)


def variables() -> list[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    def choose(name: str, label: str, query: str) -> dashboard.QueryVariable:
        return (
            dashboard.QueryVariable(name)
            .label(label)
            .datasource(DATASOURCE)
            .query(query)
            .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(model.VariableSort.NATURAL_ASC)
        )

    every = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    seen = '{__name__=~"echo_train_step|echo_produce_serving_version|echo_weights_newest_version"}'
    return [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        # One run at a time: sums over runs mean nothing.
        choose("run", "Run", f"label_values({seen}, run)"),
        choose("producer", "Producer", f"label_values(echo_produce_serving_version{{{RUN}}}, producer)")
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(every),
        choose("job", "Job", "label_values(up, job)")
        .regex("/echo/")
        .multi(True)
        .include_all(True)
        .all_value(".*echo.*")
        .current(every),
    ]


def build() -> model.Dashboard:
    board = (
        dashboard.Dashboard("Echo")
        .uid("echo")
        .description("One run of Echo: is it learning, how stale is what it learns from, and who waits for whom.")
        .tags(["echo", "reinforcement-learning"])
        .editable()
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("10s")
    )
    for variable in variables():
        board.with_variable(variable)
    number_of = iter(range(1, 1000))
    for title, panels, widths in ROWS:
        board.with_row(dashboard.Row(title).id(next(number_of)))
        for panel, width in zip(panels(), widths, strict=True):
            board.with_panel(panel.id(next(number_of)).span(width))
    return board.build()


def main() -> int:
    parser = argparse.ArgumentParser(description="Write Echo's Grafana board from code.")
    parser.add_argument("--check", action="store_true", help="compare with the committed board, change nothing")
    check = parser.parse_args().check
    text = json.dumps(build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
    if not check:
        BOARD.write_text(text)
        return 0
    if BOARD.is_file() and BOARD.read_text() == text:
        return 0
    sys.stderr.write(f"{BOARD}: differs from what the code builds; run `python grafana/build.py` and commit the result\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
