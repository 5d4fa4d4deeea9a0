"""From runs to the paper's figures."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from loadtest.engine.measurement import list_latencies
from loadtest.intervals import (
    Table,
    compare,
    compare_columns,
    compare_with_best,
    estimate_mean,
    pick_best,
)

from .grid import PRESETS, is_baseline

Record = Mapping[str, Any]

CELL = ["dataset", "cap"]
RUN = ["run", "start", *CELL, "arm"]

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
    "draft_step_ms": "drafting, ms a step",
    "select_step_ms": "selection, ms a step",
    "hidden_tokens_per_s": "tokens/s, drafting hidden",
}
"""Figures of a run, and what tables call them."""

PAPER = {"over_best": 1.0525, "over_best_sd": 1.0927, "hidden_over_best": 1.1204}
"""What the paper has at most for TETRIS: over the best baseline, over the best fixed
length, and over the best baseline were drafting hidden."""

_MOST_UNKNOWN = 0.1
"""Share of the time of which no stage may be known, where a figure rests on stages."""


def measure_run(record: Record) -> dict[str, float]:
    """Return the figures of a run, `COLUMNS`; NaN where nobody counted."""
    requests = list_latencies(record)
    latencies = requests.drop(columns="tokens")
    latencies.columns = latencies.columns.str.removesuffix("_ms")
    found = {f"{name}_mean_ms": mean for name, mean in latencies.mean().items()}
    found |= {f"{k}_p99_ms": v for k, v in latencies.quantile(0.99).items()}
    counted, spent = record["counters"] or {}, record["stages_ms"] or {}
    verified, accepted = (
        counted.get(f"num_{what}_tokens", 0) for what in ("verified", "accepted")
    )
    if spent.get("rest", 0.0) > _MOST_UNKNOWN * 1e3 * record["seconds"]:
        spent = {}
    target_ms = spent.get("score", 0.0) + spent.get("verify", 0.0)
    draft_ms, select_ms = (spent.get(name, np.nan) for name in ("draft", "select"))
    total = requests["tokens"].sum()
    # A prompt's own pass puts out a token and verifies nothing. Every later step of a
    # request puts out the drafts accepted, and one token more.
    decoded = total - len(requests)
    rows = decoded - accepted + verified
    found |= {
        "tokens_per_s": total / record["seconds"],
        "vsr": accepted / verified if verified else np.nan,
        "ter": 1e3 * total / target_ms if target_ms else np.nan,
        "system_efficiency": decoded / rows if counted else np.nan,
        "draft_step_ms": draft_ms / record["num_steps"],
        "select_step_ms": select_ms / record["num_steps"],
        "hidden_tokens_per_s": total
        / (record["seconds"] - min(draft_ms, target_ms) / 1e3),
    }
    return {name: float(found[name]) for name in COLUMNS}


def summarise(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row for each dataset, cap and arm: figures, stages, ratios.

    Ratios are paired by start: arms that were up at the same time. `over_best` is over
    the best of none, fixed lengths and DSD, `over_best_sd` over the best fixed length,
    each chosen by the other starts.
    """
    rows = []
    for cell, own in _measure(records).groupby(CELL, sort=False):
        speeds = own.pivot(index="start", columns="arm", values="tokens_per_s")
        rivals, fixed = _find_rivals(speeds)
        # Arms are measured in another order each time.
        own = own.assign(place=own["arm"].map(_place_of))
        for arm, runs in own.sort_values("place").groupby("arm", sort=False):
            stages = pd.DataFrame([one or {} for one in runs["stages_ms"]]).sum()
            windows = pd.DataFrame(map(_count_windows, runs["counters"])).sum()
            over_best = over_sd = None
            if not is_baseline(arm):
                over_best = compare_with_best(speeds, arm, rivals)
                over_sd = compare_with_best(speeds, arm, fixed)
            rows.append(
                dict(zip(CELL, cell, strict=True))
                | {"arm": arm, "runs": len(runs)}
                | {name: estimate_mean(runs[name]) for name in COLUMNS}
                | {"over_none": compare_columns(speeds, arm, "none")}
                | {"over_best": over_best, "over_best_sd": over_sd}
                | {"stages": (stages / stages.sum()).to_dict() or None}
                | {"windows": windows.astype(int).tolist()}
            )
    return rows


def judge(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Hold the best TETRIS of each dataset and cap against the paper's `PAPER`.

    It is chosen by the other runs, as its rivals are: the best of many is partly the
    luckiest. Arms that were not up at the same time meet by their ratios over the
    baselines of their own start.
    """
    found = []
    for cell, own in _measure(records).groupby(CELL, sort=False):
        one = dict(zip(CELL, cell, strict=True))
        for name, figure in (("", "tokens_per_s"), ("hidden_", "hidden_tokens_per_s")):
            table = _level(own, figure)
            rivals, fixed = _find_rivals(table)
            ours = [arm for arm in table if arm.startswith("TETRIS ")]
            if not ours or not fixed or table.empty:
                continue
            best = pick_best(table[ours])
            one |= {f"{name}arm": table[ours].median().idxmax()}
            one |= {f"{name}over_best": compare(best, pick_best(table[rivals]))}
            one |= {f"{name}over_best_sd": compare(best, pick_best(table[fixed]))}
        if "arm" in one:
            found.append(one)
    return found


def list_missing(settings: Mapping[str, Any]) -> list[str]:
    """Say what of the paper's grid and material was not run under these settings."""
    whole, missing = PRESETS["full"], []
    names = {"draft_tokens": "k", "extra": "E", "caps": "batch caps"}
    for key, name in names.items():
        left = [str(n) for n in whole[key] if n not in settings[key]]
        missing += [f"{name} {', '.join(left)}"] if left else []
    if settings["requests"] < whole["requests"]:
        missing.append(f"{whole['requests']} requests at once")
    datasets = ("sharegpt", "arena", "tough", "sonnet", "mix", "all_mix")
    left = [name for name in datasets if name not in settings["datasets"]]
    missing += [f"datasets {', '.join(left)}"] if left else []
    if "mix" in left:
        missing.append("mixed difficulty")
    if not settings["gpu"]:
        missing.append("the paper's own pairs, and fixed acceptance rates (GPUs)")
    return missing


def _measure(records: Sequence[Record]) -> Table:
    figures = pd.DataFrame(map(measure_run, records))
    return pd.DataFrame(records)[[*RUN, "counters", "stages_ms"]].join(figures)


def _find_rivals(table: Table) -> tuple[list[str], list[str]]:
    """Return the baselines, and those with a fixed length."""
    rivals = [arm for arm in table if is_baseline(arm)]
    return rivals, [arm for arm in rivals if arm.startswith("SD ")]


def _level(own: Table, figure: str) -> Table:
    """Return arms by run, as ratios over the mean baseline of their start.

    `none` drafts nothing, so that what is hidden of its drafting is nothing.
    """
    own = own.assign(value=own[figure].fillna(own["tokens_per_s"]))
    table = np.log(own.pivot(index="start", columns="arm", values="value"))
    rivals = _find_rivals(table)[0]
    table = table.sub(table[rivals].mean(axis=1), axis=0)
    runs = own.drop_duplicates("start").set_index("start")["run"]
    return np.exp(table.groupby(runs).mean()).dropna()


def _place_of(arm: str) -> tuple[int, list[int]]:
    """Return where an arm stands in tables: as in `make_arms`, by its numbers."""
    kinds = ("none", "SD", "DSD", "TETRIS", "DSD+TETRIS", "ours")
    kind, *_ = arm.split()
    return kinds.index(kind), [int(number) for number in re.findall(r"\d+", arm)]


def _count_windows(counted: Record | None) -> list[int]:
    """Return how many drafts had 0, 1, ... tokens accepted."""
    counted = counted or {}
    reached = counted.get("num_accepted_tokens_per_pos", [])
    reached = [counted.get("num_drafts", 0), *reached, 0]
    return [a - b for a, b in itertools.pairwise(reached)]
