"""The READMEs say what is there: figures are those committed, links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "loadtest" / "results" / "engine-cpu" / "results.json"
LOADS = (1, 8, 32)
ALL_LOADS = (1, 2, 4, 8, 16, 32)

PAGES = [
    ROOT / line
    for line in subprocess.run(
        ["git", "ls-files", "*README.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
]


def rate(rows: dict[tuple[str, int], dict[str, Any]], policy: str, load: int) -> int:
    return round(rows[policy, load]["output_tokens_per_s"]["median"])


def read_rows() -> dict[tuple[str, int], dict[str, Any]]:
    """Return what was measured in the sweep, by policy and load."""
    return {
        (row["policy"], row["concurrency"]): row
        for row in json.loads(RESULTS.read_text())["rows"]
        if row["workload"] == "mixed" and row["temperature"] == 0.0
    }


def render_sweep() -> str:
    """Render the load test's table: tokens per second, the best of a load in bold."""
    rows = read_rows()
    policies = list(dict.fromkeys(policy for policy, _ in rows))
    best = {load: max(rate(rows, one, load) for one in policies) for load in ALL_LOADS}
    lines = ["| in flight | " + " | ".join(map(str, ALL_LOADS)) + " |"]
    lines.append("|---" * (1 + len(ALL_LOADS)) + "|")
    for policy in policies:
        rates = [(load, rate(rows, policy, load)) for load in ALL_LOADS]
        cells = [f"**{one}**" if one == best[load] else str(one) for load, one in rates]
        lines.append(f"| `{policy}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def render() -> str:
    """Render the table of the first page from what was measured."""
    rows = read_rows()
    fixed = []
    for load in LOADS:
        best = max(range(1, 7), key=lambda k: rate(rows, f"fixed:{k}", load))
        fixed.append(f"{rate(rows, f'fixed:{best}', load)} ({best})")
    lines = [
        ("", LOADS),
        ("no speculation", [rate(rows, "none", load) for load in LOADS]),
        ("the best fixed length for each", fixed),
        ("`tetris`, 4 + 2 deeper", [rate(rows, "tetris:4+2", load) for load in LOADS]),
        ("`goodput`", [rate(rows, "goodput:8", load) for load in LOADS]),
    ]
    table = [f"| {name} | {' | '.join(map(str, cells))} |" for name, cells in lines]
    table[0] = table[0].replace("|  |", "| |")
    table.insert(1, "|---|---|---|---|")
    return "\n".join(table)


@pytest.mark.parametrize(
    ("page", "rendered"),
    [("README.md", render), ("loadtest/README.md", render_sweep)],
    ids=["first page", "load test"],
)
def test_the_table_is_what_was_measured(page: str, rendered: Callable[[], str]) -> None:
    found = re.search(
        r"<!-- table:begin -->\n(.*)\n<!-- table:end -->",
        (ROOT / page).read_text(),
        re.DOTALL,
    )
    assert found is not None
    assert found[1] == rendered()


def test_the_first_request_asks_what_make_serve_serves() -> None:
    page, makefile = ((ROOT / name).read_text() for name in ("README.md", "Makefile"))
    default = re.search(r"^CONFIG \?= (\S+)$", makefile, re.MULTILINE)
    request = re.search(r"-d '(.*)'$", page, re.MULTILINE)
    answer = re.search(r"```json\n(.*?)\n```", page, re.DOTALL)
    assert default is not None
    assert request is not None
    assert answer is not None

    served = yaml.safe_load((ROOT / default[1]).read_text())["model"]["id"]
    assert json.loads(request[1])["model"] == served
    assert json.loads(answer[1])["model"] == served


def test_the_first_page_is_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []
