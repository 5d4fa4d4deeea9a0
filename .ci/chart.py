"""What the Helm chart takes from elsewhere.

The schema of its `config` is that of serving.settings.model; everything else in
values.schema.json is written by hand and kept. VALUES.md is values.yaml as a table.
Grafana's JSON says little in many lines, so the panels of the dashboards are kept in
dashboards.yaml beside this file. Tests try every query on a Prometheus that has scraped
a real deployment.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

PANELS = Path(__file__).with_name("dashboards.yaml")

# Definitions whose names begin so are ours to replace.
PREFIX = "config."

FILTER = '{ray_io_cluster=~"$Cluster"'
WIDTH, HEIGHT, GRID_WIDTH = 8, 8, 24


def files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield every file of the project's chart with what belongs into it."""
    folder = root / "helm" / "tetris-serve"
    schema_file = folder / "values.schema.json"
    schema = merged(json.loads(schema_file.read_text("utf-8")))
    yield schema_file, json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    values = (folder / "values.yaml").read_text("utf-8")
    yield folder / "VALUES.md", "\n".join(values_table(values))
    content = yaml.safe_load(PANELS.read_text("utf-8"))
    for name, one in content["dashboards"].items():
        made = dashboard(content["skeletons"], name, **one)
        yield folder / "dashboards" / f"{name}.json", json.dumps(made, indent=1) + "\n"


def values_table(text: str) -> Iterator[str]:
    """Yield the lines of the table of values: their paths, defaults and comments."""
    lines = text.splitlines()
    yield "# Values"
    yield ""
    yield "Of [values.yaml](values.yaml), written by `make generated`."
    yield ""
    yield "| value | default | what it is |"
    yield "|---|---|---|"

    def comment_above(line: int) -> str:
        first = line
        while first and lines[first - 1].strip().startswith("#"):
            first -= 1
        words = [one.strip().lstrip("#").strip() for one in lines[first:line]]
        # What stands before the mark is for readers of the file alone.
        marked = [n for n, one in enumerate(words) if one.startswith("--")]
        said = " ".join(words[marked[-1] :])[2:].strip() if marked else ""
        return said.replace("|", "\\|")

    def rows(node: yaml.MappingNode, path: str) -> Iterator[str]:
        for key, value in node.value:
            name, said = f"{path}{key.value}", comment_above(key.start_mark.line)
            if isinstance(value, yaml.MappingNode) and value.value:
                if said:
                    yield f"| `{name}` | | {said} |"
                yield from rows(value, f"{name}.")
                continue
            default = json.dumps(yaml.safe_load(yaml.serialize(value)))
            yield f"| `{name}` | `{default.replace('|', chr(92) + '|')}` | {said} |"

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from rows(root, "")
    yield ""


def merged(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the chart's schema with the present settings in it."""
    from serving.settings.model import Settings

    settings = Settings.model_json_schema(ref_template=f"#/$defs/{PREFIX}{{model}}")
    generated = {PREFIX + name: part for name, part in settings.pop("$defs").items()}
    kept = {n: p for n, p in schema["$defs"].items() if not n.startswith(PREFIX)}
    schema["$defs"] = {**kept, **without_titles(generated)}
    # Without one, the chart serves its demo.
    settings["type"] = [settings["type"], "null"]
    schema["properties"]["config"] = without_titles(settings)
    return schema


def without_titles(part: Any) -> Any:
    """Leave out the titles, which only repeat the settings' names.

    A default beside a reference goes too: JSON Schema draft 7 would ignore it.
    """
    if isinstance(part, list):
        return [without_titles(item) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return {"$ref": part["$ref"]}
    return {
        name: without_titles(item)
        for name, item in part.items()
        if not (name == "title" and isinstance(item, str))
    }


def dashboard(
    skeletons: dict[str, Any], uid: str, title: str, rows: dict[str, list[Any]]
) -> dict[str, Any]:
    """Lay the panels out, row by row."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row_title, row in rows.items():
        own = {"title": row_title, "id": len(panels) + 1}
        place = {"h": 1, "w": GRID_WIDTH, "x": 0, "y": top}
        panels.append(skeletons["row"] | own | {"gridPos": place})
        top += 1
        for index, panel in enumerate(row):
            below, left = divmod(index * WIDTH, GRID_WIDTH)
            place = {"h": HEIGHT, "w": WIDTH, "x": left, "y": top + below * HEIGHT}
            panels.append(graph(skeletons, panel, len(panels) + 1, place))
        top += -(-len(row) * WIDTH // GRID_WIDTH) * HEIGHT
    return {"uid": uid, "title": title, **skeletons["dashboard"], "panels": panels}


def graph(
    skeletons: dict[str, Any], panel: dict[str, Any], number: int, place: dict[str, int]
) -> dict[str, Any]:
    """One time series panel."""
    targets = [
        {
            **skeletons["target"],
            "expr": query.replace("{...", FILTER).replace(
                "[...]", "[$__rate_interval]"
            ),
            "legendFormat": legend,
            "refId": chr(ord("A") + index),
        }
        for index, (legend, query) in enumerate(panel["queries"].items())
    ]
    defaults = skeletons["defaults"] | {"unit": panel["unit"]}
    return {
        **skeletons["graph"],
        "id": number,
        "title": panel["title"],
        "description": panel["about"],
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }
