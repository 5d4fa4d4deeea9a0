"""Dashboards are what their panels say, importable, and shipped as they are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.conftest import CHART, DEMO, ROOT, of_kind, render, render_example

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))

dashboards = pytest.mark.parametrize("file", DASHBOARDS, ids=lambda path: path.stem)


def graphs(file: Path) -> list[dict[str, Any]]:
    """Return the panels with queries."""
    panels = json.loads(file.read_text("utf-8"))["panels"]
    return [panel for panel in panels if panel["type"] != "row"]


@dashboards
def test_panels_neither_overlap_nor_stick_out(file):
    taken = set()
    for panel in json.loads(file.read_text("utf-8"))["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in graphs(file)]
    assert len(set(numbers)) == len(numbers)


@dashboards
def test_every_panel_is_explained_and_filtered_by_cluster(file):
    for panel in graphs(file):
        assert panel["description"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            metrics = re.findall(r"\b(?:ray_(?!io_)|tetris:)\w+", target["expr"])
            assert metrics, target["expr"]
            filters = target["expr"].count('{ray_io_cluster=~"$Cluster"}')
            assert filters == len(metrics), target["expr"]


def test_speculation_panels_read_metrics_that_we_export():
    source = (ROOT / "serving" / "replica" / "metrics.py").read_text("utf-8")
    known = set(re.findall(r'"(tetris_\w+)"', source))
    text = (CHART / "dashboards" / "tetris-speculation.json").read_text("utf-8")
    read = set(re.findall(r"ray_(tetris_\w+)", text))
    assert len(read) > 15
    assert read <= known


def test_config_maps_carry_the_dashboards_for_grafana_s_sidecar():
    given = {"enabled": "true", "namespace": "grafana"}
    values = [f"monitoring.dashboards.{name}={value}" for name, value in given.items()]
    maps = of_kind(render_example(DEMO, *values), "ConfigMap")
    assert len(maps) == len(DASHBOARDS)
    for config_map, file in zip(maps, DASHBOARDS, strict=True):
        assert config_map["metadata"]["namespace"] == "grafana"
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        (text,) = config_map["data"].values()
        shipped, written = json.loads(text), json.loads(file.read_text())
        own = {"uid", "title"}
        assert shipped.keys() == written.keys()
        assert all(shipped[name] == written[name] for name in written.keys() - own)
        # A ConfigMap holds at most a mebibyte.
        assert len(yaml.safe_dump(config_map)) < 1 << 20


def test_the_dashboards_of_two_releases_live_side_by_side():
    """Grafana has an id and a title once; its sidecar has one folder of files."""
    shared = (
        "monitoring.dashboards.enabled=true,monitoring.dashboards.namespace=grafana"
    )
    maps = [
        config_map
        for name, namespace in (("one", "a"), ("one", "b"), ("two", "b"))
        for config_map in of_kind(
            render("--namespace", namespace, "--set", shared, name=name), "ConfigMap"
        )
    ]
    texts = [json.loads(text) for one in maps for text in one["data"].values()]
    for names in (
        [one["metadata"]["name"] for one in maps],
        [file for one in maps for file in one["data"]],
        [text["uid"] for text in texts],
        [text["title"] for text in texts],
    ):
        assert len(set(names)) == 3 * len(DASHBOARDS)
    # Grafana's own limit.
    assert max(len(text["uid"]) for text in texts) <= 40
