"""What is committed of fleets under load is what was measured."""

import json
from itertools import groupby

from loadtest.environment import REPO
from loadtest.page import make_environment

FOLDER = REPO / "loadtest" / "results" / "cluster-cpu"
PARTS = ("scale", "idle", "mix", "overload", "keys", "neighbour")


def follow(timeline):
    running = (point["running"] for point in timeline if "running" in point)
    return " → ".join(f"{number:.0f}" for number, _ in groupby(running))


def test_what_is_committed_is_what_was_measured():
    environment = make_environment(FOLDER)
    environment.filters["follow"] = follow
    template = environment.get_template("results.md.jinja")
    for folder in (FOLDER, FOLDER / "smollm2"):
        found = json.loads((folder / "results.json").read_text())
        results = {part: found[part] for part in PARTS if part in found}
        assert (folder / "results.md").read_text() == template.render(results=results)
    results = json.loads((FOLDER / "results.json").read_text())
    # Whose client was ended with the run is no failure of the server's.
    for name in ("scale", "idle"):
        assert set(results[name]["failures"]) <= {"unfinished"}
    # The same rate needs more replicas where less is accepted.
    wanted = results["mix"]["wanted"]
    assert wanted["2"] > 1.5 * wanted["0"]
