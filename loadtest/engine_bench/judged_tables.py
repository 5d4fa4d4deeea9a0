"""Markdown tables of what results are held against: aims, bounds, calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .markdown import format_value, make_table
from .plan import Cell
from .verdicts import SELECTION_NOTE

Row = Mapping[str, Any]

_BOUNDS_HEADING = (
    "Bounds, tokens/s of decoding alone in the steady part, at prices fitted to the "
    "traces; what an arm does between the passes of the models is charged to it. All "
    "columns up to clairvoyant are played on the same recorded drafts: the policy as "
    "it learns; hindsight, the same policy with calibration and costs fitted to all of "
    "these very steps; clairvoyant, which knows what will be accepted. Then the best "
    "fixed k and the policy by their own traces, and the policy's share of hindsight's "
    "headroom over the best fixed k: by the own traces (95 % interval), and on the "
    "recorded drafts."
)
_CALIBRATION_HEADING = (
    "Expected calibration error in the traced round, load by load. By chance: what "
    "exact predictions would show over as many outcomes."
)


def verdict_section(verdicts: Sequence[Row]) -> str:
    """Render all aims with what was measured."""
    lines = [
        [
            str(one["measure"]),
            one["what"],
            one["where"],
            f"{'≥' if one['is_least'] else '≤'} {_number(one['aim'], one['aim'])}",
            _value(one),
            one["verdict"],
            one["note"],
        ]
        for one in verdicts
    ]
    header = ["nr", "what", "where", "aim", "value", "verdict", "note"]
    return f"## Aims\n\n{make_table(header, lines)}\n\n{SELECTION_NOTE}"


def bound_section(bounds: Sequence[Row]) -> str:
    """Render what selectors of hindsight and of foresight reach, and what arms did."""
    header = ["requests", "none", "best fixed", "policy", "hindsight", "clairvoyant"]
    header += ["headroom", "best fixed, own", "policy, own", "share", "share, replayed"]
    lines = [_bound_line(bound) for bound in bounds]
    return f"{_BOUNDS_HEADING}\n\n{make_table(header, lines)}"


def calibration_section(calibration: Sequence[Row]) -> str:
    """Render calibration errors by load."""
    lines = [
        [
            Cell(one["workload"], one["temperature"], one["concurrency"]).name,
            one["policy"],
            str(one["num_outcomes"]),
            f"{one['error']:.3f}",
            f"{one['exact_error']:.3f}",
            format_value(one["confidence_error"], ".3f"),
        ]
        for one in calibration
    ]
    header = ["load", "policy", "outcomes", "calibrated", "by chance"]
    table = make_table([*header, "drafter's confidence"], lines)
    return f"## Calibration\n\n{_CALIBRATION_HEADING}\n\n{table}"


def _bound_line(bound: Row) -> list[str]:
    fixed = [f"{speed:.0f} ({name})" for name, speed in _fastest(bound["fixed"])]
    best_own = bound.get("best_fixed_achieved")
    achieved = bound["achieved"]
    own_fixed = "-" if best_own is None else f"{achieved[best_own]:.0f} ({best_own})"
    mark = " (saturated)" if bound.get("is_saturated") else ""
    return [
        f"{bound['concurrency']}{mark}",
        f"{bound['none']:.0f}",
        *(fixed or ["-"]),
        format_value(bound.get("replayed"), ".0f"),
        f"{bound['hindsight']:.0f}",
        f"{bound['clairvoyant']:.0f}",
        format_value(bound.get("headroom"), ".1%"),
        own_fixed,
        format_value(achieved.get(bound["policy"]), ".0f"),
        _share(bound, "headroom_share"),
        _share(bound, "headroom_share_replayed"),
    ]


def _fastest(speeds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(speeds.items(), key=lambda item: -item[1])[:1]


def _share(bound: Row, key: str) -> str:
    if key not in bound:
        return "-"
    share = bound[key]
    if share is None:
        return "no headroom"
    return f"{share['value']:.0%} ({share['low']:.0%} to {share['high']:.0%})"


def _value(verdict: Row) -> str:
    if verdict["value"] is None:
        return "-"
    ends = [end for end in (verdict["low"], verdict["high"]) if end is not None]
    text = _number(verdict["value"], verdict["aim"])
    if len(ends) == 2:
        low, high = (_number(end, verdict["aim"]) for end in ends)
        return f"{text} ({low} to {high})"
    return text


def _number(value: float, aim: float) -> str:
    """Format in the unit of the aim: counts, ratios around 1, or shares."""
    if aim >= 10:
        return f"{value:.0f}"
    return f"{value:.3f}"
