"""Writes results.json and results.md from what a folder holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from loadtest.client.errors import LoadTestError

from .store import Store
from .summary import ALL_LOADS, compare_with_others, make_rows

Row = Mapping[str, Any]
Lines = list[list[str]]
"""A table, the header first."""


def write_results(store: Store) -> dict[str, Any]:
    """Write results.json and results.md from what has been measured.

    Returns:
        What results.json holds.

    Raises:
        LoadTestError: If nothing has been measured.
    """
    measurements, conditions = store.measurements(), store.conditions()
    if not measurements or conditions is None:
        raise LoadTestError(f"--output {store.folder} holds no measurements to report")
    # Whoever comes last is compared with all others.
    ratios, over_best = compare_with_others(measurements, conditions["policies"][-1])
    results: dict[str, Any] = {
        "environment": store.environment(),
        "settings": conditions,
        "rows": make_rows(measurements),
        "ratios": ratios,
        "over_best": over_best,
    }
    # As many digits as a reader can use.
    text = json.dumps(results, default=lambda number: number.item())
    results = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}"))
    store.write("results.json", json.dumps(results, indent=1) + "\n")
    store.write("results.md", render(results))
    return results


def describe(results: Mapping[str, Any]) -> str:
    """Say on which machine, and of which models."""
    machine, models = (results["environment"][name] for name in ("machine", "models"))
    pair = ", ".join(
        f"{role} {one['name']} ({one['parameters'] / 1e6:.3g} M parameters, "
        f"{one['digest'][:8]})"
        for role, one in models.items()
    )
    return f"{machine.get('gpu') or machine['cpu']}; {pair}"


def count_samples(rows: Sequence[Row]) -> str:
    """Say how much was measured: requests of a policy, rounds and engine starts."""
    requests = [row["num_requests"] for row in rows]
    starts = min(row["engine_starts"] or 0 for row in rows)
    return (
        f"{min(requests)} to {max(requests)} requests, "
        f"{min(row['rounds'] for row in rows)} rounds, "
        f"{starts or 'unknown'} engine starts a policy"
    )


def by_load(results: Mapping[str, Any]) -> dict[str, dict[str, list[Row]]]:
    """Return `rows`, `ratios` and `over_best` by workload with temperature."""
    kinds = ("rows", "ratios", "over_best")
    found: dict[str, dict[str, list[Row]]] = {}
    for kind in kinds:
        for one in results[kind]:
            name = f"{one['workload']}, temperature {one['temperature']:g}"
            found.setdefault(name, {kind: [] for kind in kinds})[kind].append(one)
    return found


def render(results: Mapping[str, Any]) -> str:
    """Render `results.md`."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, undefined=StrictUndefined, keep_trailing_newline=True
    )
    loads = [
        {
            "name": name,
            "samples": count_samples(load["rows"]),
            "speeds": _tabulate_speeds(load["rows"]),
            "ratios": _tabulate_ratios(load["ratios"], load["over_best"]),
            "rows": load["rows"],
        }
        for name, load in by_load(results).items()
    ]
    fallbacks = {
        f"{row['policy']}: {why}" for row in results["rows"] for why in row["fallbacks"]
    }
    return environment.get_template("results.md.jinja").render(
        results, source=describe(results), loads=loads, fallbacks=sorted(fallbacks)
    )


def _tabulate_speeds(rows: Sequence[Row]) -> Lines:
    """Tabulate tokens per second by policy and concurrency, the best in bold.

    In brackets acceptance length and verification success rate.
    """
    best: dict[int, float] = {}
    for row in rows:
        median = row["output_tokens_per_s"]["median"]
        best[row["concurrency"]] = max(best.get(row["concurrency"], 0.0), median)

    def cell(row: Row) -> str:
        median = row["output_tokens_per_s"]["median"]
        speed = f"{median:.0f}"
        if median == best[row["concurrency"]]:
            speed = f"**{speed}**"
        if row["verified_per_step"] is None or row["acceptance_length"] is None:
            return speed
        success = row["verification_success_rate"]
        share = "-" if success is None else f"{success:.2f}".removeprefix("0")
        return f"{speed} ({row['acceptance_length']:.2f}, {share})"

    title = "tokens/s (acceptance length, verification success rate)"
    return _by_concurrency(title, rows, "policy", cell)


def _tabulate_ratios(ratios: Sequence[Row], over_best: Sequence[Row]) -> Lines:
    """Tabulate how the last policy compares with each other one, and with the best."""
    if not ratios:
        return []

    def cell(ratio: Row) -> str:
        text = f"{ratio['ratio']:.3f}"
        if ratio["low"] is not None:
            text += f" ({ratio['low']:.3f}-{ratio['high']:.3f})"
        return f"{text}, {ratio['name']}" if "name" in ratio else text

    name = "the best other"
    best = [{**one, "against": name, "name": one["against"]} for one in over_best]
    title = f"{ratios[0]['policy']} over"
    return _by_concurrency(title, [*ratios, *best], "against", cell)


def _by_concurrency(
    corner: str, rows: Sequence[Row], by: str, cell: Callable[[Row], str]
) -> Lines:
    # All loads together come last.
    loads = sorted({row["concurrency"] for row in rows}, key=lambda n: n or 1e9)
    names = {1: "1 request", ALL_LOADS: "all loads"}
    lines = [[corner, *(names.get(load, f"{load} requests") for load in loads)]]
    for policy in dict.fromkeys(row[by] for row in rows):
        own = {row["concurrency"]: cell(row) for row in rows if row[by] == policy}
        lines.append([policy, *(own.get(load, "-") for load in loads)])
    return lines
