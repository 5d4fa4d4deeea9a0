"""Write the settings into configs/README.md (`make settings`).

Everything between the two marks there is generated from the settings' own models.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "configs" / "README.md"
BEGIN, END = "<!-- settings:begin -->", "<!-- settings:end -->"


def main() -> int:
    """Write the tables, or with --check only tell whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    present = README.read_text("utf-8")
    head, rest = present.split(BEGIN)
    wanted = f"{head}{BEGIN}\n{reference()}\n{END}{rest.split(END)[1]}"
    if present == wanted:
        return 0
    if arguments.check:
        print(f"{README.relative_to(ROOT)} is out of date: run `make settings`")
        return 1
    README.write_text(wanted, "utf-8")
    print(f"wrote {README.relative_to(ROOT)}")
    return 0


def reference() -> str:
    """Return a table for each section, and one of Ray's and vLLM's names."""
    # Run as a script, this file's own folder is the first that imports are taken from.
    sys.path.insert(0, str(ROOT))
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


if __name__ == "__main__":
    sys.exit(main())
