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
FOLDER = ROOT / "loadtest" / "results"
SWEEP = FOLDER / "engine-cpu" / "results.json"
SMOLLM2 = FOLDER / "engine-cpu" / "smollm2" / "results.json"
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


def read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def rate(row: dict[str, Any]) -> int:
    return round(row["output_tokens_per_s"]["median"])


def render_sweep() -> str:
    """Render the load test's table: tokens per second, the best of a load in bold."""
    rows = {
        (row["policy"], row["concurrency"]): rate(row)
        for row in read(SWEEP)["rows"]
        if row["workload"] == "mixed" and row["temperature"] == 0.0
    }
    best = {
        load: max(rows[one, at] for one, at in rows if at == load) for load in ALL_LOADS
    }
    lines = ["| in flight | " + " | ".join(map(str, ALL_LOADS)) + " |"]
    lines.append("|---" * (1 + len(ALL_LOADS)) + "|")
    for policy in dict.fromkeys(policy for policy, _ in rows):
        cells = [
            f"**{rows[policy, load]}**"
            if rows[policy, load] == best[load]
            else str(rows[policy, load])
            for load in ALL_LOADS
        ]
        lines.append(f"| `{policy}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def render() -> str:
    """Render the table of the first page from what was measured."""
    results = read(SMOLLM2)
    rows = {(row["policy"], row["concurrency"]): rate(row) for row in results["rows"]}
    loads = sorted({load for _, load in rows})
    policies = list(dict.fromkeys(policy for policy, _ in rows))

    def find_best(kind: str) -> list[str]:
        own = [policy for policy in policies if policy.startswith(f"{kind}:")]
        found = []
        for load in loads:
            best = max(own, key=lambda one: rows[one, load])
            found.append(f"{rows[best, load]} ({best.partition(':')[2]})")
        return found

    def compare(one: dict[str, Any]) -> str:
        return f"{one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})"

    gains = {
        one["concurrency"]: compare(one)
        for one in results["ratios"]
        if one["against"] == "none"
    }
    lines: list[tuple[str, list[Any]]] = [
        ("requests in flight", loads),
        ("no speculation", [rows["none", load] for load in loads]),
        ("the prompt's own words (`ngram`)", [rows["ngram:3", load] for load in loads]),
        ("the best fixed length for each", find_best("fixed")),
        ("the best `tetris` for each", find_best("tetris")),
        ("`goodput`", [rows["goodput:6", load] for load in loads]),
        ("`goodput` over no speculation", [gains[load] for load in loads]),
    ]
    table = [f"| {name} | {' | '.join(map(str, cells))} |" for name, cells in lines]
    table.insert(1, "|---" * (1 + len(loads)) + "|")
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
