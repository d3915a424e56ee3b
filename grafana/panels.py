"""How a panel of Echo's boards looks, and the pieces of PromQL that they share.

Refuses to know what is on a board, and a panel that does not say which metrics it draws. Blue for numbers, shades of it
where series share a panel; another colour only where a threshold is real.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import common as draw
from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common, units
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
RUN = 'run=~"$run"'
PRODUCER = f'{RUN}, producer=~"$producer"'
# The server's own series carry no run, since one store may hold several: keep the servers that hold this one.
HOLDS_RUN = f"and on (job, instance) echo_weights_newest_version{{{RUN}}}"

BLUE, RED, ORANGE = "blue", "red", "orange"
QUANTILES = {"p50": "super-light-blue", "p95": "blue", "p99": "dark-blue"}
# Steps of a large model are minutes apart: join their points, but show a longer silence as a gap.
JOIN_MS = 10 * 60 * 1000
METRIC = re.compile(r"\b(?:echo_[a-z0-9_]+|up)\b")

Panel = timeseries.Panel | stat.Panel | heatmap.Panel


class Query(NamedTuple):
    """A PromQL expression and the name of its series, which may hold {{label}}s."""

    expr: str
    legend: str


def trainer(metric: str, *matchers: str) -> str:
    return f"{metric}{{{', '.join((RUN, *matchers))}}}"


def producer(metric: str) -> str:
    return f"{metric}{{{PRODUCER}}}"


def rate(selector: str) -> str:
    return f"rate({selector}[$__rate_interval])"


def quantiles(bucket: str, by: str = "", names: Sequence[str] = tuple(QUANTILES)) -> list[Query]:
    """p50, p95, p99 of a `_bucket` selector, `by` one more label if given."""
    labels, legend = (f"le, {by}", f"{{{{{by}}}}} ") if by else ("le", "")
    return [Query(f"histogram_quantile(0.{name[1:]}, sum by ({labels}) ({rate(bucket)}))", f"{legend}{name}") for name in names]


def shares(selector: str) -> Query:
    """The share of each phase in the time that is accounted for."""
    return Query(f"sum by (phase) ({rate(selector)}) / scalar(sum({rate(selector)}))", "{{phase}}")


def targets(queries: Sequence[Query], form: PromQueryFormat = PromQueryFormat.TIME_SERIES) -> list[Builder[Dataquery]]:
    return [
        prometheus.Dataquery().expr(q.expr).legend_format(q.legend).ref_id(chr(ord("A") + i)).format(form).range()
        for i, q in enumerate(queries)
    ]


def explain(text: str, queries: Sequence[Query]) -> str:
    """What the panel shows, ending in the names of its metrics."""
    names = dict.fromkeys(name.removesuffix("_bucket") for q in queries for name in METRIC.findall(q.expr))
    return f"{text} {', '.join(names)}"


def no_traffic() -> list[model.ValueMapping]:
    result = model.ValueMappingResult(text="no traffic", color="text")
    options = model.DashboardSpecialValueMapOptions(match=model.SpecialValueMatch.NULL_AND_NAN, result=result)
    return [model.SpecialValueMap(options=options)]


def steps(*above: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    """Colours from a value on; None is minus infinity."""
    listed = [model.Threshold(value=value, color=color) for value, color in above]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(listed)


def set_to(property_id: str, value: object) -> model.DynamicConfigValue:
    return model.DynamicConfigValue(id_val=property_id, value=value)


def number(
    title: str,
    text: str,
    unit: str,
    query: Query,
    *,
    thresholds: dashboard.ThresholdsConfig | None = None,
    decimals: int | None = None,
) -> stat.Panel:
    """The newest value in large; blue unless it has thresholds."""
    panel = (
        stat.Panel()
        .title(title)
        .description(explain(text, [query]))
        .datasource(DATASOURCE)
        .targets(targets([query]))
        .unit(unit)
        .thresholds(thresholds or steps((None, BLUE)))
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(draw.ReduceDataOptions().calcs(["lastNotNull"]))
        .mappings(no_traffic())
        .no_value("no traffic")
        .height(4)
    )
    return panel if decimals is None else panel.decimals(decimals)


def graph(
    title: str,
    text: str,
    unit: str,
    queries: Sequence[Query],
    *,
    bound: str | None = None,
    stacked: bool = False,
    largest: float | None = None,
) -> timeseries.Panel:
    """Series over time in shades of blue. `bound`: the legend of the series that is a limit, drawn as a red dashed line."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(explain(text, queries))
        .datasource(DATASOURCE)
        .targets(targets(queries))
        .unit(unit)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.SHADES).fixed_color(BLUE))
        .line_width(1)
        .fill_opacity(40 if stacked else 0)
        .span_nulls(JOIN_MS)
        .legend(
            draw.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
        .tooltip(draw.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
        .mappings(no_traffic())
        .no_value("no traffic")
        .height(8)
    )
    for name, color in QUANTILES.items():
        if any(q.legend == name for q in queries):
            panel.override_by_name(name, [set_to("color", {"mode": "fixed", "fixedColor": color})])
    if bound is not None:
        line = {"fill": "dash", "dash": [10, 10]}
        panel.override_by_name(
            bound,
            [
                set_to("color", {"mode": "fixed", "fixedColor": RED}),
                set_to("custom.lineStyle", line),
                set_to("custom.fillOpacity", 0),
                set_to("custom.stacking", {"mode": "none", "group": "A"}),
            ],
        )
    if stacked:
        panel.stacking(draw.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if largest is not None:
        panel.min(0).max(largest)
    return panel


def cells(title: str, text: str, bucket: str) -> heatmap.Panel:
    """A histogram over time: how many fell into each bucket."""
    query = Query(f"sum by (le) (increase({bucket}[$__rate_interval]))", "{{le}}")
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(64)
    return (
        heatmap.Panel()
        .title(title)
        .description(explain(text, [query]))
        .datasource(DATASOURCE)
        .targets(targets([query], PromQueryFormat.HEATMAP))
        .unit(units.Short)
        .calculate(False)
        .color(color)
        .y_axis(heatmap.YAxisConfig().unit(units.Short).decimals(0))
        .mode(common.TooltipDisplayMode.SINGLE)
        .mappings(no_traffic())
        .no_value("no traffic")
        .height(8)
    )
