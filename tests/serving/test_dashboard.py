"""docs/grafana-dashboard.json asks only for what /metrics of a running API offers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from api_kit import Site
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana-dashboard.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
# Labels that a sample has only once something has happened.
LABELS = {
    "preread_kv_not_reused": {"reason"},
    "preread_object_store": {"event"},
    "preread_site_tombstones_pending": {"site"},
    "preread_stage_ms": {"stage", "le"},
}


@pytest.fixture
def offered(site: Site) -> dict[str, set[str]]:
    """Labels by metric family, after an answer."""
    corpus = site.corpus_of("c", {"a.txt": "zebra crossing"})
    with site.http() as http:
        body = {"model": f"{site.engine.model_id}@{corpus}", "messages": [{"role": "user", "content": "zebra?"}]}
        http.post("/v1/chat/completions", json=body).raise_for_status()
        families = list(text_string_to_metric_families(http.get("/metrics").text))
    return {
        family.name: LABELS.get(family.name, set()).union(*(sample.labels for sample in family.samples)) for family in families
    }


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_panel_asks_for_metrics_and_labels_that_there_are(offered: dict[str, set[str]], expression: str) -> None:
    names = re.findall(r"preread_\w+", expression)
    assert names
    families = [re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names]
    assert set(families) <= set(offered)
    asked = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    assert asked <= set.union(*(offered[family] for family in families))


def test_panels_do_not_overlap_and_no_id_is_there_twice() -> None:
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) == len(set(places))
    assert all(x + w <= 24 for _, w, x, _ in places)


def test_requests_under_way_are_counted_and_leave(site: Site) -> None:
    def under_way() -> float:
        with site.http() as http:
            text = http.get("/metrics").text
        return float(re.search(r"^preread_http_in_progress (.*)$", text, re.M)[1])  # type: ignore[index]

    assert under_way() == 1  # the one that asks
    with site.http() as http:
        http.get("/v1/models")
    assert under_way() == 1
