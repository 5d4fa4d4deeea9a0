"""Write the Grafana dashboards that the Helm chart ships (`make chart`).

Grafana's JSON says little in many lines, so the panels are kept in dashboards.yaml
beside this file. Every query is checked by tests against a Prometheus that has scraped
a real deployment.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PANELS = Path(__file__).with_name("dashboards.yaml")
FOLDER = ROOT / "helm" / "tetris-serve" / "dashboards"

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
FILTER = 'ray_io_cluster=~"$Cluster"'
WIDTH, HEIGHT, GRID_WIDTH = 8, 8, 24


def main() -> int:
    """Write the dashboards, or with --check only tell whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    status = 0
    for name, content in yaml.safe_load(PANELS.read_text("utf-8")).items():
        file = FOLDER / f"{name}.json"
        wanted = json.dumps(dashboard(name, **content), indent=1) + "\n"
        if file.is_file() and file.read_text("utf-8") == wanted:
            continue
        if arguments.check:
            print(f"{file.relative_to(ROOT)} is out of date: run `make chart`")
            status = 1
        else:
            FOLDER.mkdir(parents=True, exist_ok=True)
            file.write_text(wanted, "utf-8")
            print(f"wrote {file.relative_to(ROOT)}")
    return status


def dashboard(uid: str, title: str, rows: dict[str, list[Any]]) -> dict[str, Any]:
    """Lay the panels out, row by row."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row_title, row in rows.items():
        panels.append(
            {
                "type": "row",
                "title": row_title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": GRID_WIDTH, "x": 0, "y": top},
                "id": len(panels) + 1,
                "panels": [],
            }
        )
        top += 1
        for index, panel in enumerate(row):
            left = index * WIDTH % GRID_WIDTH
            below = top + index * WIDTH // GRID_WIDTH * HEIGHT
            panels.append(graph(panel, len(panels) + 1, left, below))
        top += -(-len(row) * WIDTH // GRID_WIDTH) * HEIGHT
    return {
        "uid": uid,
        "title": title,
        "tags": ["tetris-serve", "ray", "vllm"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "Tetris Serve",
                "tags": ["tetris-serve"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def variables() -> list[dict[str, Any]]:
    """The data source, and the Ray cluster as KubeRay's scrape labels name it."""
    query = "label_values(ray_node_cpu_utilization, ray_io_cluster)"
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {},
        },
        {
            # Ray's dashboard, when it embeds one of these, sets it by this name.
            "name": "Cluster",
            "label": "Ray cluster",
            "type": "query",
            "datasource": SOURCE,
            "definition": query,
            "query": {"query": query, "refId": "Cluster"},
            "refresh": 2,
            "includeAll": True,
            # Outside Kubernetes there is no such label, which this matches too.
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def graph(panel: dict[str, Any], number: int, left: int, top: int) -> dict[str, Any]:
    """One time series panel."""
    targets = [
        {
            "datasource": SOURCE,
            "expr": expression(query),
            "legendFormat": legend,
            "refId": chr(ord("A") + index),
            "range": True,
        }
        for index, (legend, query) in enumerate(panel["queries"].items())
    ]
    return {
        "type": "timeseries",
        "id": number,
        "title": panel["title"],
        "description": panel["about"],
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": left, "y": top},
        "fieldConfig": {
            "defaults": {
                "unit": panel["unit"],
                "min": 0,
                "custom": {"lineWidth": 2, "fillOpacity": 8, "showPoints": "never"},
            },
            "overrides": [],
        },
        "options": {
            "legend": {
                "displayMode": "table",
                "placement": "bottom",
                "calcs": ["lastNotNull"],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def expression(query: str) -> str:
    """Fill in what every query has in common."""
    return query.replace("{...}", f"{{{FILTER}}}").replace(
        "[...]", "[$__rate_interval]"
    )


if __name__ == "__main__":
    sys.exit(main())
