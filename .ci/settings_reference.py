"""The reference of the settings: between two marks in configs/README.md."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- settings:begin -->", "<!-- settings:end -->"


def files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the README of the project's configs with what belongs into it."""
    file = root / "configs" / "README.md"
    head, rest = file.read_text("utf-8").split(BEGIN)
    _, tail = rest.split(END)
    yield file, f"{head}{BEGIN}\n{reference()}\n{END}{tail}"


def reference() -> str:
    """Return a table for each section, and one of Ray's and vLLM's names."""
    from serving.settings.model import Settings
    from serving.settings.names import FOREIGN_NAMES

    root = Settings.model_json_schema()
    places = dict(places_of(root, root["$defs"], ""))
    parts = []
    for place, section in places.items():
        header = ("setting", "meaning", "values", "default")
        rows = [
            (
                f"`{name}`",
                part["description"],
                values_of(part),
                default_of(name, section),
            )
            for name, part in section["properties"].items()
            if "description" in part and not part.get("deprecated")
        ]
        parts += [f"## {place}", section["description"], table(header, *rows)]
    names = sorted(
        (f"`{theirs}`", whose, f"`{place}.{name}`")
        for place, section in places.items()
        for name in section["properties"]
        for theirs, whose in FOREIGN_NAMES.get(name, {}).items()
    )
    return "\n\n".join(
        [
            *parts,
            "## Ray's and vLLM's names",
            "They are read as ours; both at once are an error. Those that are not "
            "listed are the same here. Of vLLM's `speculative_config`, `model` is "
            "`model.draft` and the rest is `policy`.",
            table(("theirs", "whose", "ours"), *names),
        ]
    )


def places_of(part: Any, definitions: Any, place: str) -> Any:
    """Yield every section with its place, e.g. `policy.classes.NAME`."""
    for name, inner in part["properties"].items():
        below = f"{place}.{name}".lstrip(".")
        values = inner.get("additionalProperties")
        if isinstance(values, dict) and "$ref" in values:
            inner, below = values, f"{below}.NAME"
        if "$ref" in inner:
            section = definitions[inner["$ref"].rpartition("/")[2]]
            yield below, section
            yield from places_of(section, definitions, below)


def values_of(part: dict[str, Any]) -> str:
    """Say in words what a setting may be."""
    if "anyOf" in part:
        others = [one for one in part["anyOf"] if one.get("type") != "null"]
        return " or ".join(one.get("description") or values_of(one) for one in others)
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    bounds = [
        f"{sign} {part[key]:.10g}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
        if key in part
    ]
    return ", ".join([{"object": "mapping"}.get(part["type"], part["type"]), *bounds])


def default_of(name: str, section: dict[str, Any]) -> str:
    """Write the default as YAML would."""
    if name in section.get("required", ()):
        return "required"
    default = section["properties"][name].get("default")
    if name.endswith("_bytes") and default is not None:
        from serving.settings.sizes import show_size

        return f"`{show_size(default)}`"
    text = default if isinstance(default, str) else json.dumps(default)
    return "" if default is None else f"`{text}`"


def table(*rows: tuple[str, ...]) -> str:
    """Draw a table; the first row is its header."""
    header, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([header, "|---" * len(rows[0]) + "|", *body])
