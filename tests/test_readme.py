"""The READMEs say what is there: figures are those committed, links lead somewhere."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.conftest import run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "loadtest" / "results" / "engine-cpu"
FRONT_RESULTS = ROOT / "loadtest" / "results" / "front-cpu"
HTTP_RESULTS = ROOT / "loadtest" / "results" / "http-cpu"
METRICS = ("output_tokens_per_s", "ttft_p50_ms", "cpu_ms_per_token")

PAGES = run("git", "ls-files", "*README.md").stdout.splitlines()


def read_rates(results, **only):
    return {
        (row["policy"], row["concurrency"]): round(row["output_tokens_per_s"]["median"])
        for row in results["rows"]
        if all(row[name] == value for name, value in only.items())
    }


def write_table(lines):
    table = ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]
    table.insert(1, "|---" * len(lines[0]) + "|")
    return "\n".join(table)


def render_sweeps():
    """Render the load test's tables: the best of a load in bold."""
    engines = json.loads((RESULTS / "small" / "results.json").read_text())
    tables = [render_rates(read_rates(engines))]
    for name in ("smollm2", "smollm2-t1"):
        served = read_served(name)
        rates = {
            (row["arm"], int(row["level"])): round(row["output_tokens_per_s"]["median"])
            for row in served["rows"]
        }
        gains = [["`goodput` over `none`", *gains_of(served)]]
        if name == "smollm2-t1":
            gains.append(["the same since", *gains_of(read_served(f"{name}-probes"))])
        tables.append(render_rates(rates, *gains))
    return tables


def read_served(name):
    return json.loads((HTTP_RESULTS / name / "results.json").read_text())


def gains_of(served):
    for one in served["ratios"]:
        kind = one["arm"], one["against"], one["metric"]
        if kind == ("goodput:6", "none", "output_tokens_per_s"):
            yield "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**one)


def render_rates(rates, *more):
    loads = sorted({load for _, load in rates})
    best = [max(rates[one] for one in rates if one[1] == load) for load in loads]
    lines = [["in flight", *loads]]
    for policy in dict.fromkeys(policy for policy, _ in rates):
        cells = [rates[policy, load] for load in loads]
        bold = [f"**{n}**" if n == m else n for n, m in zip(cells, best, strict=True)]
        lines.append([f"`{policy}`", *bold])
    return write_table([*lines, *more])


def render_first_page():
    results, others, sampled = (
        json.loads((RESULTS / name / "results.json").read_text())
        for name in ("smollm2", "smollm2-tetris", "smollm2-t1")
    )
    rates = read_rates(results)
    loads = sorted({load for _, load in rates})

    def best(kind):
        own = dict.fromkeys(one for one, _ in rates if one.startswith(f"{kind}:"))
        for load in loads:
            policy = max(own, key=lambda one, load=load: rates[one, load])
            yield f"{rates[policy, load]} ({policy.partition(':')[2]})"

    def of(policy):
        return (rates[policy, load] for load in loads)

    def gains(measured):
        form = "{ratio:.2f} ({low:.2f} to {high:.2f})"
        found = [one for one in measured["ratios"] if one["against"] == "none"]
        return (form.format(**one) for one in found if one["concurrency"] in loads)

    table = write_table(
        [
            ["requests in flight", *loads],
            ["no speculation", *of("none")],
            ["the prompt's own words (`ngram`)", *of("ngram:3")],
            ["the best fixed length for each", *best("fixed")],
            ["the best `tetris` for each", *best("tetris")],
            ["`goodput`", *of("goodput:6")],
            ["`goodput` over no speculation", *gains(results)],
            ["the same in an older run", *gains(others)],
            ["the same, sampled at temperature 1", *gains(sampled)],
        ]
    )
    return [table]


def render_http_path():
    """Render what the front costs: ours over `vllm serve`, and CPU time by process."""
    names = ["tokens/s", "time to first token", "CPU time outside the engine"]
    names += ["with Ray's daemons", "ms between chunks"]
    lines = [["", "in flight", *names]]
    for folder, model in (
        ("http", "tiny pair"),
        ("http-float32", "tiny pair, float32"),
        ("http-slow", "SmolLM2"),
    ):
        results = json.loads((FRONT_RESULTS / folder / "results.json").read_text())
        ratios = {
            (one["arm"], one["against"], one["load"], one["metric"]): one
            for one in results["ratios"]
        }
        rows = {(row["arm"], row["load"]): row for row in results["rows"]}
        loads = dict.fromkeys(load for *_, load, _ in ratios)
        for policy, pair in (("none", "ours vllm"), ("fixed:2", "ours2 vllm2")):
            ours, theirs = pair.split()
            for load in loads:
                found = [ratios.get((ours, theirs, load, one)) for one in METRICS]
                if all(found):
                    cells = [
                        "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**one)
                        for one in found
                    ]
                    cells += compare_medians(rows[ours, load], rows[theirs, load])
                    lines.append(
                        [f"{model}, `{policy}`", load.partition(":")[2], *cells]
                    )
    return [f"{write_table(lines)}\n\n{render_processes()}"]


def compare_medians(ours, theirs):
    """Return CPU time with all that runs, over theirs, and both times of chunks."""
    spent = [
        row["cpu_ms_per_token"]["median"] + row["ray_cpu_ms_per_token"]["median"]
        for row in (ours, theirs)
    ]
    chunks = [row["itl_p50_ms"]["median"] for row in (theirs, ours)]
    return f"{spent[0] / spent[1]:.2f}", "{:.0f} to {:.0f}".format(*chunks)


def render_processes():
    results = json.loads((FRONT_RESULTS / "http" / "results.json").read_text())
    by_role = {
        (row["arm"], row["load"]): row["cpu_ms_per_token_by_role"]
        for row in results["rows"]
    }
    loads = dict.fromkeys(load for _, load in by_role)
    lines = [["ms a token", *(load.partition(":")[2] for load in loads)]]
    for arm, roles in (
        ("vllm", ["server"]),
        ("ours", ["front", "replica", "controller", "proxy", "proxy's manager"]),
    ):
        for role in roles:
            cells = [f"{by_role[arm, load][role]:.2f}" for load in loads]
            lines.append([f"{arm}: {role}", *cells])
    rays = {
        row["load"]: row["ray_cpu_ms_per_token"]["median"]
        for row in results["rows"]
        if row["arm"] == "ours"
    }
    lines.append(["ours: Ray's daemons", *(f"{rays[load]:.2f}" for load in loads)])
    return write_table(lines)


@pytest.mark.parametrize(
    ("page", "render"),
    [
        ("README.md", render_first_page),
        ("loadtest/README.md", render_sweeps),
        ("serving/front/README.md", render_http_path),
    ],
)
def test_tables_are_what_was_measured(page, render):
    found = re.findall(
        r"<!-- table:begin -->\n(.*?)\n<!-- table:end -->",
        (ROOT / page).read_text(),
        re.DOTALL,
    )
    assert found == render()


def test_the_first_page_is_one_sitting_and_asks_what_make_serve_serves():
    page, makefile = ((ROOT / name).read_text() for name in ("README.md", "Makefile"))
    assert len(page.splitlines()) <= 150
    default = re.search(r"^CONFIG \?= (\S+)$", makefile, re.MULTILINE)
    request = re.search(r"-d '(.*)'$", page, re.MULTILINE)
    answer = re.search(r"```json\n(.*?)\n```", page, re.DOTALL)
    served = yaml.safe_load((ROOT / default[1]).read_text())["model"]["id"]
    assert json.loads(request[1])["model"] == served
    assert json.loads(answer[1])["model"] == served


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    file = ROOT / page
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", file.read_text())
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (file.parent / link).exists()] == []
