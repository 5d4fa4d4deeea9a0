"""The tables at the end: one per pair, ratios against the best of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .plan import ARMS, CELLS, LAW_ARM, PAIRS, SMOKE_CELLS
from .results import Key
from .sampling_law import agreement, compare_samples

_OURS = "goodput"
_UPSTREAM = "vllm-adaptive"
_FIXED = tuple(name for name, arm in ARMS.items() if arm.kind == "fixed")

_OUR_PACKAGES = ("serving/", "policies/", "loadtest/")
_SHOWN = 4

SIGNIFICANT = 1e-3
"""Two samples with a smaller p-value are said to follow two laws."""

Measurements = Mapping[Key, Mapping[str, Any]]


def write_report(measurements: Measurements, pair: str | None = None) -> str:
    """Return everything that was measured as Markdown, or what was of one pair."""
    names = PAIRS if pair is None else (pair,)
    parts = [_write_pair(name, measurements) for name in names]
    text = "\n\n".join(part for part in parts if part)
    return (text or "Nothing has been measured yet.") + "\n"


def _write_pair(pair: str, measurements: Measurements) -> str:
    own = {key[1:]: one for key, one in measurements.items() if key[0] == pair}
    if not own:
        return ""
    cells = [cell.name for cell in (*CELLS, *SMOKE_CELLS)]
    names = [c for c in dict.fromkeys(cells) if any(key[1] == c for key in own)]
    blocks = [f"## Pair {pair}", _throughput(names, own)]
    drift = [name for name in names if name.startswith("drift-")]
    if drift:
        blocks.append(_drift(drift, own))
    blocks += [_inner(names, own), _lossless(names, own), _law(own), _waits(own)]
    return "\n\n".join(block for block in blocks if block)


def _throughput(cells: Sequence[str], own: Mapping[Any, Any]) -> str:
    """Tokens per second by arm, and what ours is compared with the others."""

    def rate(arm: str, cell: str) -> float | None:
        one = own.get((arm, cell))
        return None if one is None else float(one["output_tokens_per_s"])

    rows = []
    for cell in cells:
        rates = {arm: rate(arm, cell) for arm in ARMS}
        ours = rates[_OURS]
        fixed = [value for arm in _FIXED if (value := rates[arm]) is not None]
        others = [
            value for arm, value in rates.items() if arm != _OURS and value is not None
        ]
        rows.append(
            [
                cell,
                *(_number(value, "{:.0f}") for value in rates.values()),
                _ratio(ours, rates["none"]),
                _ratio(ours, max(fixed, default=None)),
                _ratio(ours, rates[_UPSTREAM]),
                _ratio(ours, max(others, default=None)),
            ]
        )
    header = [
        "tokens/s",
        *ARMS,
        "ours/none",
        "ours/best fixed",
        "ours/vllm-adaptive",
        "ours/best",
    ]
    return _table(header, rows)


def _drift(cells: Sequence[str], own: Mapping[Any, Any]) -> str:
    rows = []
    for cell in cells:
        for phase in ("before", "after"):
            rates: list[float | None] = []
            for arm in ARMS:
                phases = (own.get((arm, cell)) or {}).get("phases")
                rates.append(None if phases is None else phases[phase])
            by_arm = dict(zip(ARMS, rates, strict=True))
            rows.append(
                [
                    f"{cell}, {phase}",
                    *(_number(value, "{:.0f}") for value in rates),
                    _ratio(by_arm[_OURS], by_arm[_UPSTREAM]),
                ]
            )
    return _table(["tokens/s by phase", *ARMS, "ours/vllm-adaptive"], rows)


def _inner(cells: Sequence[str], own: Mapping[Any, Any]) -> str:
    """What the arms did: acceptance, verified drafts, errors, time to decide."""
    rows = []
    for cell in cells:
        for arm in (*ARMS, LAW_ARM.name):
            one = own.get((arm, cell))
            if one is None or arm == "none":
                continue
            rows.append(
                [
                    cell,
                    arm,
                    _number(one.get("acceptance_length"), "{:.2f}"),
                    _number(one.get("verified_per_step"), "{:.1f}"),
                    _number(one.get("offered_per_step"), "{:.1f}"),
                    _number(one.get("draft_ms"), "{:.2f}"),
                    _percent(one.get("step_time_error")),
                    _number(one.get("selector_us"), "{:.0f}"),
                    _number(one.get("itl_p99_ms"), "{:.1f}"),
                ]
            )
    header = [
        "cell",
        "arm",
        "acceptance length",
        "verified per step",
        "offered per step",
        "draft ms per step",
        "step-time error",
        "selector µs",
        "ITL p99 ms",
    ]
    return _table(header, rows)


def _lossless(cells: Sequence[str], own: Mapping[Any, Any]) -> str:
    """Agreement with `none` at temperature 0, equality of laws at 1."""
    rows = []
    for cell in cells:
        plain = own.get(("none", cell))
        if plain is None or "-t0-" not in cell:
            continue
        shares = []
        for arm in ARMS:
            one = own.get((arm, cell))
            share = one and agreement(one["digests"], plain["digests"])
            shares.append(_percent(share if one else None))
        rows.append([f"{cell}: outputs equal to none's", *shares])
    return _table(["losslessness", *ARMS], rows)


def _law(own: Mapping[Any, Any]) -> str:
    """Whether samples follow the law of an engine that drafts nothing."""
    plain = own.get(("none", "law"))
    if plain is None:
        return ""
    rows = []
    for what, key in (
        (f"{LAW_ARM.name}, drafts drawn", (LAW_ARM.name, "law")),
        ("control: none, hotter", ("none", "law-control")),
    ):
        one = own.get(key)
        if one is None:
            continue
        p_value, num_comparisons = compare_samples(one["tokens"], plain["tokens"])
        is_control = key[1] == "law-control"
        is_told_apart = p_value < SIGNIFICANT
        verdict = "told apart" if is_told_apart else "the same law"
        if is_told_apart != is_control:
            verdict += ": WRONG"
        cut, verified = _count_cut(one)
        if not is_control and not cut:
            verdict += ": NOTHING WAS CUT, which shows nothing"
        rows.append(
            [
                what,
                f"{p_value:.2g}",
                str(num_comparisons),
                _number(verified, "{:.0f}"),
                _number(cut, "{:.0f}"),
                verdict,
            ]
        )
    header = [
        "law of samples against none's",
        "p",
        "comparisons",
        "drafts verified",
        "drafts cut",
        "verdict",
    ]
    return _table(header, rows)


def _count_cut(one: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return the drafts that were left out for want of budget, and those verified."""
    counters = one.get("counters")
    if counters is None:
        return None, None
    return counters["num_cut_tokens"].get("budget", 0), counters["num_verified_tokens"]


def _waits(own: Mapping[Any, Any]) -> str:
    """Where engines waited for the device inside of steps."""
    rows = []
    for arm in (*ARMS, LAW_ARM.name):
        one = own.get((arm, "waits"))
        if one is None:
            continue
        places: Mapping[str, int] = one["places"]
        ours = [place for place in places if place.startswith(_OUR_PACKAGES)]
        shown = [f"{place} ({count})" for place, count in list(places.items())[:_SHOWN]]
        rows.append([arm, str(len(places)), str(len(ours)), ", ".join(shown) or "-"])
    header = ["waits for the device", "places", "in our code", "most often"]
    return _table(header, rows) if rows else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _ratio(value: float | None, other: float | None) -> str:
    return "-" if value is None or not other else f"{value / other:.2f}"
