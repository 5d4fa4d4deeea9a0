"""The simulated fleet beside recorded runs of a real one, over HTTP.

``python -m loadtest.simulate.fidelity FOLDER --fit LOAD,LOAD`` takes the folder of a
`tetris-serve bench http` of `none` and `fixed:K` under open loads, fits one model of a
step to the runs named, and simulates each of the others: the same arrivals, prompts,
reply lengths and number of replicas.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize

from loadtest.client.records import read_records
from loadtest.page import to_table
from loadtest.result_folder import ResultFolder

from .compare import find_half_width
from .drawn import KINDS, Drawn
from .engine import Engine, make_drafts
from .fleet import run_fleet
from .output import join_parts, write_json
from .state import Costs, Floats

TERMS = (
    *("base_ms", "request_ms", "token_ms", "draft_pass_ms", "draft_token_ms"),
    *("http_ms", "contention"),
)
"""What is fitted, >= 0: a step's costs, what HTTP adds to the first token, and how much
longer steps take while the other replica, on the same cores, runs too."""

_MAX_NUM_SEQS = 16
"""Of `configs/smollm2.yaml`."""

_STALENESS_S = 0.02
"""Replicas tell with every step."""


class _Folder(ResultFolder):
    records_file = "runs.jsonl"


_GUESS = (10.0, 1.0, 0.2, 2.0, 0.2, 5.0, 0.2)
_QUANTILES = (0.25, 0.5, 0.75)
_TOLERANCE = 0.1
_FIGURES = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
_HELD = ("tokens_per_s", "ttft_p50_ms", "tpot_p50_ms")
"""What must agree; 99th percentiles are shown."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run, as it was measured or simulated; arrays are `[num_requests]`."""

    arm: str  # `none` or `fixed:K`
    load: str
    num_replicas: int  # that served it
    num_drafts: int  # K
    drawn: Drawn  # what arrived; prompt tokens are those that no cache held
    ttft_ms: Floats
    tpot_ms: Floats  # NaN for replies of one token
    finish_s: Floats
    tokens_per_draft: float  # accepted on average, of K


def read_run(folder: Path, run: Mapping[str, Any]) -> Recorded:
    """Read one of the runs of a folder.

    Raises:
        ValueError: If it is no run in open loop of `none` or `fixed:K`, or lost
            requests.
    """
    name, _, depth = str(run["arm"]).partition(":")
    place = f"{run['arm']} {run['load']}"
    if name not in ("none", "fixed") or not run["is_open"]:
        raise ValueError(f"{place}: only none and fixed:K in open loop are simulated")
    outcomes = read_records(folder / run["records"]).outcomes
    if not outcomes or not all(one.is_ok for one in outcomes):
        raise ValueError(f"{place}: requests were lost")
    outcomes = sorted(outcomes, key=lambda one: one.scheduled_s)
    prompt = [(one.prompt_tokens or 1) - (one.cached_tokens or 0) for one in outcomes]
    tpot = [np.nan if one.tpot_ms is None else one.tpot_ms for one in outcomes]
    length = run["server"]["acceptance_length"]
    return Recorded(
        arm=run["arm"],
        load=run["load"],
        num_replicas=int(run["server"]["replicas_max"]),
        num_drafts=int(depth or 0),
        drawn=Drawn(
            np.array([one.scheduled_s for one in outcomes]),
            np.maximum(np.array(prompt), 1),
            np.array([one.output_tokens for one in outcomes]),
            np.zeros(len(outcomes), np.int64),
        ),
        ttft_ms=np.array([one.ttft_ms for one in outcomes], dtype=np.float64),
        tpot_ms=np.array(tpot, dtype=np.float64),
        finish_s=np.array([one.last_s for one in outcomes], dtype=np.float64),
        tokens_per_draft=0.0 if length is None else length - 1.0,
    )


def simulate(run: Recorded, terms: Sequence[float], chance: float) -> Recorded:
    """Return what the simulated fleet makes of the requests of a run.

    Args:
        run: A run.
        terms: As `TERMS`, ms.
        chance: Of a draft to be accepted where the one before was.
    """
    named: dict[str, Any] = dict(zip(TERMS, map(float, terms), strict=True))
    http_ms = named.pop("http_ms")
    costs = Costs(
        **named,
        floor_ms=0.0,
        kv_token_ms=0.0,
        num_drafts=run.num_drafts,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=2048,
        draft_slots=min(run.num_drafts, 1),
    )
    positions = np.arange(1, run.num_drafts + 1)
    drafts = make_drafts(np.tile(chance**positions, (len(KINDS), 1)))
    engine = Engine("fitted", costs, drafts)
    fixed = run.num_replicas, "ours", _STALENESS_S, 0
    done = run_fleet(engine, run.drawn, *fixed).requests
    first_s, further = done.first_token_s, done.num_output_tokens - 1.0
    further[further == 0] = np.nan
    return replace(
        run,
        ttft_ms=1e3 * (first_s - done.arrival_s) + http_ms,
        tpot_ms=1e3 * (done.finish_s - first_s) / further,
        finish_s=done.finish_s,
    )


def fit(runs: Sequence[Recorded]) -> tuple[list[float], float]:
    """Fit terms and acceptance: quartiles of both latencies, by relative error.

    Returns:
        Values of `TERMS`, and the chance of a draft.
    """
    drafting = [run for run in runs if run.num_drafts]
    chance = 0.0
    if drafting:
        accepted = sum(run.tokens_per_draft for run in drafting)

        def excess(chance: float) -> float:
            depths = (np.arange(1, run.num_drafts + 1) for run in drafting)
            return float(sum((chance**depth).sum() for depth in depths)) - accepted

        chance = float(optimize.brentq(excess, 0.0, 1.0))

    def error(logs: Floats) -> float:
        errors = [_errors(run, np.exp(logs), chance) for run in runs]
        return float(np.abs(np.concatenate(errors)).sum())

    # By simplex: requests change places with any term, so there is no slope to follow.
    begin = np.log(_GUESS)
    corners = np.vstack([begin, begin + np.eye(begin.size)])
    options = {"initial_simplex": corners, "xatol": 0.01, "fatol": 0.01}
    found = optimize.minimize(error, begin, method="Nelder-Mead", options=options)
    return [float(term) for term in np.exp(found.x)], chance


def _errors(run: Recorded, terms: Floats, chance: float) -> Floats:
    ours = simulate(run, [*terms], chance)
    ratios = [
        np.nanquantile(computed, _QUANTILES) / np.nanquantile(real, _QUANTILES)
        for computed, real in ((ours.ttft_ms, run.ttft_ms), (ours.tpot_ms, run.tpot_ms))
    ]
    return np.asarray(np.log(np.concatenate(ratios)))


def figures(run: Recorded) -> dict[str, float]:
    """Return throughput, from the first arrival to the last token, and latencies."""
    span_s = run.finish_s.max() - run.drawn.arrival_s[0]
    found = {"tokens_per_s": run.drawn.num_output_tokens.sum() / span_s}
    for name, values in (("ttft", run.ttft_ms), ("tpot", run.tpot_ms)):
        for percent in (50, 99):
            found[f"{name}_p{percent}_ms"] = np.nanquantile(values, percent / 100)
    return {name: float(value) for name, value in found.items()}


def judge(error: float, half_width: float | None) -> str:
    """Return whether a figure `agrees`, is `off`, or `undecided`.

    Args:
        error: Of the simulated one, over the real one.
        half_width: Of its 95 % interval; None if that is not known.
    """
    if half_width is not None and abs(error) + half_width <= _TOLERANCE:
        return "agrees"
    if half_width is not None and abs(error) - half_width > _TOLERANCE:
        return "off"
    return "undecided"


def compare(
    runs: Iterable[Recorded], terms: Sequence[float], chance: float
) -> list[dict[str, Any]]:
    """Return a row for each arm and load: real and simulated figures over rounds.

    A figure agrees if the 95 % t-interval of its error, from what real runs differ by,
    lies within 10 %, and is off if all of it lies outside. One run has no interval.
    """
    cells: dict[tuple[str, str], list[Recorded]] = {}
    for run in runs:
        cells.setdefault((run.arm, run.load), []).append(run)
    rows = []
    for (arm, load), own in cells.items():
        row: dict[str, Any] = {"arm": arm, "load": load, "runs": len(own)}
        row["requests"] = sum(one.ttft_ms.size for one in own)
        real = [figures(one) for one in own]
        ours = [figures(simulate(one, terms, chance)) for one in own]
        for name in _FIGURES:
            measured = [one[name] for one in real]
            mean, computed = (
                float(np.mean([one[name] for one in some])) for some in (real, ours)
            )
            half = find_half_width(measured) if len(own) > 1 else None
            error = computed / mean - 1.0
            row[name] = {
                "real": mean,
                "half_width": half,
                "simulated": computed,
                "error": error,
                "verdict": judge(error, None if half is None else half / mean),
            }
        rows.append(row)
    return rows


def render_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown table: real, simulated and the relative error."""
    lines = [["arm", "load", "requests", *_FIGURES]]
    for row in rows:
        cells = [row["arm"], row["load"], f"{row['requests']:,}"]
        for name in _FIGURES:
            cell = row[name]
            text = f"{cell['real']:.1f} / {cell['simulated']:.1f}"
            verdict = cell["verdict"] if name in _HELD else ""
            doubt = " ?" if verdict == "undecided" else ""
            text += f" ({100 * cell['error']:+.0f} %{doubt})"
            cells.append(f"**{text}**" if verdict == "off" else text)
        lines.append(cells)
    return to_table(lines)


def count_verdicts(rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return how many of the figures that must agree do, are off, or undecided."""
    return Counter(row[name]["verdict"] for row in rows for name in _HELD)


def render(result: Mapping[str, Any]) -> str:
    """Return what was fitted and both tables as Markdown."""
    terms = ", ".join(f"{name} {value:.2f}" for name, value in result["terms"].items())
    verdicts = count_verdicts(result["held_out"])
    return join_parts(
        f"Fitted: {terms}; acceptance of a draft {result['acceptance']:.2f}.",
        render_rows(result["fitted"]),
        "Not fitted:",
        render_rows(result["held_out"]),
        f"Of {verdicts.total()} such figures: agree {verdicts['agrees']}, "
        f"off {verdicts['off']}, undecided {verdicts['undecided']}.",
    )


def main(words: Sequence[str] | None = None) -> int:
    """Fit, compare, print the table; 1 if a figure that was not fitted is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of tetris-serve bench http")
    parser.add_argument(
        "--fit", required=True, help="LOAD,LOAD whose runs are fitted, not the others"
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args(words)
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is no folder")
    folder, wanted = _Folder(options.folder), set(options.fit.split(","))
    try:
        runs = [read_run(options.folder, run) for run in folder.records()]
    except (KeyError, OSError, ValueError) as error:
        parser.error(f"{options.folder}: {error}")
    fitted = [run for run in runs if run.load in wanted]
    held_out = [run for run in runs if run.load not in wanted]
    if not fitted or not held_out:
        names = ", ".join(sorted({run.load for run in runs}))
        parser.error(f"--fit must name some, not all, of the loads {names}")
    terms, chance = fit(fitted)
    result: dict[str, Any] = {
        "environment": folder.environment(),
        "fitted_to": sorted(wanted),
        "terms": dict(zip(TERMS, (round(term, 4) for term in terms), strict=True)),
        "acceptance": round(chance, 4),
        "fitted": compare(fitted, terms, chance),
        "held_out": compare(held_out, terms, chance),
    }
    if options.json:
        write_json(options.json, result)
    sys.stdout.write(render(result))
    return int(count_verdicts(result["held_out"])["off"] > 0)


if __name__ == "__main__":
    sys.exit(main())
