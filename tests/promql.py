"""What a Grafana board asks Prometheus for: its queries, their metrics, their labels.

    missing = metrics_in(json.loads(Path("grafana/echo.json").read_text())) - names_of(exposition)

Refuses a query that is not PromQL (ValueError). Grafana's own macros are replaced by a duration before parsing.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

# What Prometheus itself adds: a metric about its targets, and labels that tell them apart.
OWN_METRICS = frozenset({"up"})
TARGET_LABELS = frozenset({"job", "instance"})

_MACRO = re.compile(r"\$__(rate_interval|interval|range)\b")
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")


class Selector(NamedTuple):
    """A metric as a query names it, and its matchers as (label, operator, value)."""

    metric: str
    matchers: frozenset[tuple[str, str, str]]


def parse(expr: str) -> Any:
    """The syntax tree of an expression of a board. Raises ValueError naming the expression."""
    try:
        return promql.parse(_MACRO.sub("1m", expr))
    except ValueError as error:
        raise ValueError(f"{expr}: {error}") from None


def panels_in(board: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The panels that draw something, those inside collapsed rows too."""
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


def queries_in(board: Mapping[str, Any]) -> list[str]:
    """The expressions of all panels."""
    return [target["expr"] for panel in panels_in(board) for target in panel["targets"]]


def variable_queries_in(board: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(selector, label) of every variable that is filled by label_values."""
    queries = [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    matches = [_LABEL_VALUES.fullmatch(query) for query in queries]
    assert all(matches), f"only label_values(selector, label) is known here: {queries}"
    return [(match["selector"], match["label"]) for match in matches if match]


def selectors(expr: str) -> list[Selector]:
    """Every vector selector of an expression; one that names alternatives counts once for each."""
    found: list[Selector] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql.VectorSelector):
            matchers = {(m.name, str(m.op).rpartition(".")[2], m.value) for m in node.matchers.matchers}
            names = {m for m in matchers if m[0] == "__name__"}
            listed = [node.name] if node.name else [name for m in names for name in m[2].split("|")]
            found.extend(Selector(name, frozenset(matchers - names)) for name in listed)
        return True

    promql.walk(parse(expr), visit)
    return found


def metrics_in(board: Mapping[str, Any]) -> set[str]:
    """Names of the samples that a board reads, as they stand in an exposition (`.._total`, `.._bucket`)."""
    exprs = queries_in(board) + [selector for selector, _ in variable_queries_in(board)]
    return {selector.metric for expr in exprs for selector in selectors(expr)} - OWN_METRICS


def names_of(exposition: str) -> set[str]:
    """Names of the samples of a Prometheus text exposition."""
    return {sample.name for family in text_string_to_metric_families(exposition) for sample in family.samples}


def labels_of(expr: str, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Labels that the result of an expression can carry, from those of each sample name.

    Raises ValueError where the expression groups by a label that is not there.
    """
    return _labels(parse(expr), known)


def labels_of_all(selector: str, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Labels that every metric of a selector has (it may name alternatives)."""
    return frozenset.intersection(*(known[found.metric] | TARGET_LABELS for found in selectors(selector)))


def _labels(node: Any, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    match node:
        case promql.VectorSelector(name=str(name)):
            return known[name] | TARGET_LABELS
        case promql.MatrixSelector():
            return _labels(node.vector_selector, known)
        case promql.NumberLiteral():
            return frozenset()
        case promql.ParenExpr() | promql.UnaryExpr():
            return _labels(node.expr, known)
        case promql.AggregateExpr():
            inner = _labels(node.expr, known)
            if node.modifier is None:
                return frozenset()
            by = frozenset(node.modifier.labels)
            if by - inner:
                raise ValueError(f"{node.prettify()}: groups by {sorted(by - inner)}, but there is only {sorted(inner)}")
            return by
        case promql.Call():
            inner = frozenset().union(*(_labels(argument, known) for argument in node.args))
            if node.func.name == "scalar":
                return frozenset()
            return inner - {"le"} if node.func.name == "histogram_quantile" else inner
        case promql.BinaryExpr():
            left, right = _labels(node.lhs, known), _labels(node.rhs, known)
            return left if str(node.op) == "and" else left | right
    raise TypeError(f"{type(node).__name__} is new here")
