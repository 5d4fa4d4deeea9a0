"""Put the schema of our settings into the Helm chart's (`make chart`).

The chart's `config` is a deployment file, so its part of values.schema.json is
generated from serving.settings.model; everything else there is written by hand and
kept.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "helm" / "tetris-serve" / "values.schema.json"

# Definitions whose names begin so are ours to replace.
PREFIX = "config."


def main() -> int:
    """Write the schema, or with --check only tell whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    present = SCHEMA.read_text("utf-8")
    wanted = merged(json.loads(present))
    if present == wanted:
        return 0
    if arguments.check:
        print(f"{SCHEMA.relative_to(ROOT)} is out of date: run `make chart`")
        return 1
    SCHEMA.write_text(wanted, "utf-8")
    print(f"wrote {SCHEMA.relative_to(ROOT)}")
    return 0


def merged(schema: dict[str, Any]) -> str:
    """Return the chart's schema with the present settings in it."""
    # Run as a script, this file's own folder is the first that imports are taken from.
    sys.path.insert(0, str(ROOT))
    from serving.settings.model import Settings

    settings = Settings.model_json_schema(ref_template=f"#/$defs/{PREFIX}{{model}}")
    generated = {PREFIX + name: part for name, part in settings.pop("$defs").items()}
    kept = {n: p for n, p in schema["$defs"].items() if not n.startswith(PREFIX)}
    schema["$defs"] = {**kept, **without_titles(generated)}
    schema["properties"]["config"] = without_titles(settings)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


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


if __name__ == "__main__":
    sys.exit(main())
