"""From measurements to results: one row per cell and policy, and ratios."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .arms import Arm
from .comparison import compare, spread
from .outcome_bins import add_up_bins
from .plan import Cell
from .recovery import Recovery, find_recoveries

Measurement = Mapping[str, Any]


def make_rows(
    measurements: Sequence[Measurement], cells: Iterable[Cell], arms: Iterable[Arm]
) -> list[dict[str, Any]]:
    """Summarise every cell and policy over its rounds.

    Counts, and outcomes of predictions, are added up over rounds before they are
    divided; times and step-time errors are medians over rounds. None where nobody
    counts: `none` runs on vLLM's scheduler.

    `calibration_error` is the expected calibration error of the predictions made in
    the steady parts of this cell, `calibration_exact_error` what exact predictions
    would show by chance.
    """
    rows = []
    for cell in cells:
        recovered = find_recoveries([m for m in measurements if _is_under(m, cell)])
        for arm in arms:
            own = _select(measurements, cell, arm)
            if own:
                rows.append(_make_row(cell, arm, own, recovered))
    return rows


def throughputs(
    measurements: Sequence[Measurement], cell: Cell, arm_name: str
) -> dict[int, float]:
    """Return tokens per second by round of one arm in one cell."""
    return {
        m["round"]: m["output_tokens_per_s"]
        for m in measurements
        if m["policy"] == arm_name and _is_under(m, cell)
    }


def make_ratios(
    measurements: Sequence[Measurement], cells: Iterable[Cell], arms: Sequence[Arm]
) -> list[dict[str, Any]]:
    """Compare the throughput of every policy with every other, paired by round.

    Each pair is listed once, the later policy against the earlier; the other
    direction is the reciprocal.
    """
    ratios = []
    for cell in cells:
        by_arm = {arm: throughputs(measurements, cell, arm.name) for arm in arms}
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
    recovered: Mapping[str, Recovery],
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
        **_calibration(own),
        **_planning(own),
        "num_output_tokens": sum(m["num_output_tokens"] for m in own),
        "num_requests": sum(m["num_requests"] for m in own),
        # Sampled replies differ anyway.
        "num_differing_requests": None
        if cell.temperature > 0
        else sum(m["num_differing_requests"] for m in own),
        "fallbacks": dict(_add_up(own, "num_fallbacks")),
        "cut_tokens": dict(_add_up(own, "num_cut_tokens")),
        "max_other_cpu_share": max(m["other_cpu_share"] for m in own),
        **{
            # Not in measurements of before they were counted.
            name: sum(m.get(name, 0) for m in own)
            for name in ("num_turns", "num_disturbed_turns", "waited_s")
        },
    }
    phases = [m["phases"] for m in own if m["phases"]]
    if phases:
        row["output_tokens_per_s_by_phase"] = {
            phase: asdict(spread([one[phase] for one in phases]))
            for phase in ("before", "after")
        }
    if arm.name in recovered:
        row["recovery"] = asdict(recovered[arm.name])
    return row


def _calibration(own: Sequence[Measurement]) -> dict[str, float | None]:
    """Return the calibration error, and what of it is chance."""
    bins = [m["calibration_bins"] for m in own if m.get("calibration_bins")]
    curve = add_up_bins(bins).curve() if bins else None
    return {
        "calibration_error": None if curve is None else curve.error,
        "calibration_exact_error": None if curve is None else curve.exact_error,
    }


def _planning(own: Sequence[Measurement]) -> dict[str, Any]:
    """Return what planning takes a step, and whether that is all of it.

    Engines that count no more than the selection leave out the choice of the depth and
    what is learnt from a step.
    """
    counters = [m["counters"] for m in own if m["counters"]]
    is_whole = bool(counters) and all(
        "planning_seconds_total" in one for one in counters
    )
    counter = "planning_seconds_total" if is_whole else "selection_seconds_total"
    steps = _total(own, "num_steps")
    if not steps or not all(counter in one for one in counters):
        return {"planning_us_per_step": None, "planning_is_whole": is_whole}
    spent_s = sum(one[counter] for one in counters)
    return {
        "planning_us_per_step": 1e6 * spent_s / steps,
        "planning_is_whole": is_whole,
    }


def _is_under(measurement: Measurement, cell: Cell) -> bool:
    """Tell whether something was measured under a cell's conditions."""
    return all(measurement[key] == value for key, value in cell.as_dict().items())


def _select(
    measurements: Sequence[Measurement], cell: Cell, arm: Arm
) -> list[Measurement]:
    return [m for m in measurements if m["policy"] == arm.name and _is_under(m, cell)]


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
