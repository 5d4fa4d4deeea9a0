"""What a comparison says: tables for a terminal, and all of it as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from loadtest.environment import describe_versions

from .compare import LEVELS, Interval, Plan
from .fleet import WARM_UP_SHARE, find_speed

FOLDER: Final = Path(__file__).parents[1] / "results" / "simulate"
"""Of what is committed."""

Results = Mapping[str, Mapping[str, Any]]
"""Of a plan, by arm."""

HEADERS = {
    "goodput_per_s": "goodput/s",
    "attainment": "attainment",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p99_ms": "TPOT p99 ms",
    "cached_share": "cached",
    "replicas": "replicas",
    "at_limit": "at limit",
    "replica_hours": "replica-hours",
}


def render(plan: Plan, results: Results) -> str:
    """Return the tables."""
    first = plan.arms[0]
    least = f"{plan.growth.least} to " if plan.growth else ""
    duration_s = plan.num_requests / plan.rate_per_s
    lines = [
        f"{least}{plan.num_replicas} replicas of {plan.engine.name}, "
        f"{plan.num_requests} requests at {plan.rate_per_s:.4g}/s for "
        f"{duration_s:.4g} s ({find_utilisation(plan):.0%} of the capacity of all), "
        f"telemetry {plan.staleness_s:g} s old, {len(plan.seeds)} seeds; "
        "95 % intervals",
        "",
        *_table({arm: result["means"] for arm, result in results.items()}),
    ]
    others = {arm: result["ratios"] for arm, result in results.items() if arm != first}
    if others:
        lines += ["", f"over {first}, paired by seed:", *_table(others)]
    return "\n".join(lines) + "\n"


def _table(rows: Mapping[str, Mapping[str, Interval]]) -> list[str]:
    shown = [name for name in HEADERS if any(name in row for row in rows.values())]
    cells = [["arm", *(HEADERS[name] for name in shown)]]
    for arm, values in rows.items():
        cells.append([arm, *(_format(values.get(name)) for name in shown)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        )
        for row in cells
    ]


def _format(one: Interval | None) -> str:
    if one is None:
        return "-"
    ends = "" if one["low"] is None else f" ({one['low']:.4g}, {one['high']:.4g})"
    return f"{one['value']:.4g}{ends}"


def find_utilisation(plan: Plan) -> float:
    """Return the rate over what all replicas finish with all batches full."""
    speed = find_speed(plan.num_replicas, plan.slow)
    return plan.rate_per_s / (speed * plan.engine.capacity_per_s(plan.load))


def describe(
    found: Sequence[tuple[Plan, Results]], files: Mapping[str, str]
) -> dict[str, Any]:
    """Return settings and results as JSON holds them; equal runs give equal ones.

    Args:
        found: Plans of one engine, load and seeds; each is one of the `points`.
        files: That the options came from, by option.
    """
    plan = found[0][0]
    return {
        "files": dict(files),
        "versions": describe_versions(),
        "engine": {
            "name": plan.engine.name,
            "costs": plan.engine.costs._asdict(),
            "tokens_per_step": plan.engine.tokens_per_step.tolist(),
        },
        "load": dataclasses.asdict(plan.load),
        "warm_up_share": WARM_UP_SHARE,
        "slow": list(plan.slow),
        "targets": dataclasses.asdict(plan.targets),
        "seeds": list(plan.seeds),
        "levels": LEVELS,
        "points": [
            {
                "num_replicas": plan.num_replicas,
                "num_requests": plan.num_requests,
                "growth": dataclasses.asdict(plan.growth) if plan.growth else None,
                "rate_per_s": plan.rate_per_s,
                "utilisation": find_utilisation(plan),
                "staleness_s": plan.staleness_s,
                "arms": results,
            }
            for plan, results in found
        ],
    }


def join_parts(*parts: str) -> str:
    """Return paragraphs and tables as they stand between two marks of a README."""
    return "\n" + "\n\n".join(parts) + "\n\n"


def write_json(path: Path, found: Any) -> None:
    """Write what was found."""
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", "utf-8")
