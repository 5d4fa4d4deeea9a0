"""From measurements to results: one row per cell and policy, and ratios."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .arms import Arm
from .comparison import compare, spread
from .plan import Cell
from .recovery import median_recovery, recoveries

Measurement = Mapping[str, Any]


def make_rows(
    measurements: Sequence[Measurement], cells: Iterable[Cell], arms: Iterable[Arm]
) -> list[dict[str, Any]]:
    """Summarise every cell and policy over its rounds.

    Counts are added up over rounds before they are divided; times and errors are
    medians over rounds. None where nobody counts: `none` runs on vLLM's scheduler.
    """
    rows = []
    for cell in cells:
        recovered = _recoveries(measurements, cell)
        for arm in arms:
            own = _select(measurements, cell, arm)
            if own:
                rows.append(_make_row(cell, arm, own, recovered))
    return rows


def make_ratios(
    measurements: Sequence[Measurement], cells: Iterable[Cell], arms: Sequence[Arm]
) -> list[dict[str, Any]]:
    """Compare the throughput of every policy with every other, paired by round.

    Each pair is listed once, the later policy against the earlier; the other
    direction is the reciprocal.
    """
    ratios = []
    for cell in cells:
        by_arm = {arm: _throughputs(measurements, cell, arm) for arm in arms}
        for number, ours in enumerate(arms):
            for theirs in arms[:number]:
                ratio = compare(by_arm[ours], by_arm[theirs])
                if ratio is not None:
                    ratios.append(
                        {"policy": ours.name, "against": theirs.name}
                        | cell.as_dict()
                        | asdict(ratio)
                    )
    return ratios


def find_differing(group: Sequence[Measurement]) -> dict[str, int]:
    """Count for each arm of a group the requests whose output is not the first arm's.

    At temperature 0 all arms must agree, but for near-ties of the target's two largest
    logits, which bf16 rounds differently for batches of different shapes.
    """
    reference = group[0]["digests"]
    return {
        one["policy"]: sum(
            a != b for a, b in zip(one["digests"], reference, strict=True)
        )
        for one in group
    }


def _make_row(
    cell: Cell,
    arm: Arm,
    own: Sequence[Measurement],
    recovered: Mapping[int, Mapping[str, int | None]],
) -> dict[str, Any]:
    verified = _total(own, "num_verified_tokens")
    accepted = _total(own, "num_accepted_tokens")
    steps = _total(own, "num_steps")
    row: dict[str, Any] = {"policy": arm.name} | cell.as_dict()
    row |= {
        "rounds": len(own),
        "output_tokens_per_s": asdict(spread([m["output_tokens_per_s"] for m in own])),
        "acceptance_length": _median(own, "acceptance_length"),
        "verification_success_rate": _divide(accepted, verified),
        "verified_per_step": _divide(verified, steps),
        "itl_p50_ms": _median(own, "itl_p50_ms"),
        "itl_p99_ms": _median(own, "itl_p99_ms"),
        "time_per_token_p50_ms": _median(own, "time_per_token_p50_ms"),
        "step_time_error": _median(own, "step_time_error"),
        "calibration_error": _median(own, "calibration_error"),
        "num_output_tokens": sum(m["num_output_tokens"] for m in own),
        "num_requests": sum(m["num_requests"] for m in own),
        # Sampled replies differ anyway.
        "num_differing_requests": None
        if cell.temperature > 0
        else sum(m["num_differing_requests"] for m in own),
        "fallbacks": dict(_add_up(own, "num_fallbacks")),
        "cut_tokens": dict(_add_up(own, "num_cut_tokens")),
        "max_other_cpu_share": max(m["other_cpu_share"] for m in own),
    }
    phases = [m["phases"] for m in own if m["phases"]]
    if phases:
        row["output_tokens_per_s_by_phase"] = {
            phase: asdict(spread([one[phase] for one in phases]))
            for phase in ("before", "after")
        }
        own_recoveries = [recovered[m["round"]].get(arm.name) for m in own]
        row["recovery_steps"] = median_recovery(own_recoveries)
        row["recovery_steps_by_round"] = own_recoveries
    return row


def _recoveries(
    measurements: Sequence[Measurement], cell: Cell
) -> dict[int, dict[str, int | None]]:
    """Return steps to recovery by round and policy."""
    groups: dict[int, list[Measurement]] = {}
    for one in measurements:
        if _is_under(one, cell):
            groups.setdefault(one["round"], []).append(one)
    return {number: recoveries(group) for number, group in groups.items()}


def _is_under(measurement: Measurement, cell: Cell) -> bool:
    """Tell whether something was measured under a cell's conditions."""
    return all(measurement[key] == value for key, value in cell.as_dict().items())


def _select(
    measurements: Sequence[Measurement], cell: Cell, arm: Arm
) -> list[Measurement]:
    return [m for m in measurements if m["policy"] == arm.name and _is_under(m, cell)]


def _throughputs(
    measurements: Sequence[Measurement], cell: Cell, arm: Arm
) -> dict[int, float]:
    own = _select(measurements, cell, arm)
    return {m["round"]: m["output_tokens_per_s"] for m in own}


def _median(own: Sequence[Measurement], key: str) -> float | None:
    values = [m[key] for m in own if m[key] is not None]
    return statistics.median(values) if values else None


def _total(own: Sequence[Measurement], counter: str) -> int | None:
    values = [m["counters"][counter] for m in own if m["counters"]]
    return sum(values) if values else None


def _add_up(own: Sequence[Measurement], counter: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for measurement in own:
        if measurement["counters"]:
            total.update(measurement["counters"].get(counter, {}))
    return total


def _divide(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None
