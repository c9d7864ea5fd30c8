"""The dashboard asks for metrics and labels that there are, and the page on metrics is fresh."""

import json
import re

from tests.k8s.rendering import CHART, find, matrix
from tools import document_metrics

DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
FAMILIES = document_metrics.families()
# Labels that Prometheus adds to whatever it scrapes.
TARGET_LABELS = {"namespace", "pod", "le"}


def queries():
    return [target for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def test_every_query_names_metrics_that_are_exported():
    samples = {sample: family for family in FAMILIES for sample in family.samples}
    assert queries()
    for query in queries():
        names = re.findall(r"headrace_[a-z_]+", query["expr"])
        assert names and set(names) <= samples.keys(), query["expr"]
        labels = {label for name in names for label in samples[name].labels} | TARGET_LABELS
        used = {word.strip() for by in re.findall(r"by \(([^)]*)\)", query["expr"]) for word in by.split(",")}
        shown = set(re.findall(r"{{(\w+)}}", query["legendFormat"]))
        assert used | shown <= labels, query
        assert query["expr"].count("(") == query["expr"].count(")")


def test_counters_are_drawn_as_rates():
    kinds = {sample: family.kind for family in FAMILIES for sample in family.samples}
    for query in queries():
        for name in re.findall(r"headrace_[a-z_]+", query["expr"]):
            rated = re.search(rf"rate\({name}[{{\[]", query["expr"]) is not None
            assert rated == (kinds[name] != "gauge"), query["expr"]


def test_panels_do_not_overlap():
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))


def test_the_chart_carries_it():
    item = find(matrix("hpa"), "ConfigMap", "-dashboard")
    assert item["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(item["data"]["headrace.json"]) == DASHBOARD


def test_the_page_on_metrics_is_fresh():
    assert document_metrics.PAGE.read_text() == document_metrics.page(), "run make metrics"
