"""Writes results.json and results.md from what a folder holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from loadtest.client.errors import LoadTestError

from .store import Store
from .summary import ALL_LOADS, compare_with_others, find_ceilings, make_rows

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
    results["ceilings"] = find_ceilings(results["rows"])
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
    """Return rows, ratios and ceilings by workload with temperature."""
    kinds = ("rows", "ratios", "over_best", "ceilings")
    found: dict[str, dict[str, list[Row]]] = {}
    for kind in kinds:
        # Older results know no ceilings.
        for one in results.get(kind, ()):
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
            "ceilings": _tabulate_ceilings(load["ceilings"]),
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
    medians = pd.Series([row["output_tokens_per_s"]["median"] for row in rows])
    best = medians.groupby([row["concurrency"] for row in rows]).transform("max")
    cells = []
    for row, median, is_best in zip(rows, medians, medians == best, strict=True):
        text = f"**{median:.0f}**" if is_best else f"{median:.0f}"
        if (
            row["verified_per_step"] is not None
            and row["acceptance_length"] is not None
        ):
            success = row["verification_success_rate"]
            share = "-" if success is None else f"{success:.2f}".removeprefix("0")
            text += f" ({row['acceptance_length']:.2f}, {share})"
        cells.append((row["policy"], row["concurrency"], text))
    title = "tokens/s (acceptance length, verification success rate)"
    return _by_concurrency(title, cells)


def _tabulate_ratios(ratios: Sequence[Row], over_best: Sequence[Row]) -> Lines:
    """Tabulate how the last policy compares with each other one, and with the best."""
    if not ratios:
        return []

    def show(one: Row) -> str:
        interval = f" ({one['low']:.3f}-{one['high']:.3f})" if one["low"] else ""
        return f"{one['ratio']:.3f}{interval}"

    cells = [(one["against"], one["concurrency"], show(one)) for one in ratios]
    cells += [
        ("the best other", one["concurrency"], f"{show(one)}, {one['against']}")
        for one in over_best
    ]
    return _by_concurrency(f"{ratios[0]['policy']} over", cells)


def _tabulate_ceilings(ceilings: Sequence[Row]) -> Lines:
    if not ceilings:
        return []
    cells = [
        (one["policy"], one["concurrency"], f"{one['ratio']:.2f}") for one in ceilings
    ]
    return _by_concurrency("over none, were all drafts accepted", cells)


def _by_concurrency(corner: str, cells: Sequence[tuple[str, int, str]]) -> Lines:
    """Return texts by name and load; all loads together come last."""
    table = pd.DataFrame(cells, columns=["name", "load", "text"])
    loads = sorted(table["load"].unique(), key=lambda load: load or math.inf)
    table = table.pivot(index="name", columns="load", values="text")
    table = table.reindex(
        index=dict.fromkeys(name for name, *_ in cells), columns=loads
    )
    names = {1: "1 request", ALL_LOADS: "all loads"}
    head = [corner, *(names.get(load, f"{load} requests") for load in loads)]
    return [head, *map(list, table.fillna("-").reset_index().itertuples(index=False))]
