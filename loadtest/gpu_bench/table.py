"""The tables at the end: one per pair, ratios against the best of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .plan import ARMS, CELLS, PAIRS, SMOKE_CELLS
from .results import Key
from .sampling_law import agreement, compare_laws

_OURS = "goodput"
_UPSTREAM = "vllm-adaptive"
_FIXED = tuple(name for name, arm in ARMS.items() if arm.kind == "fixed")

Measurements = Mapping[Key, Mapping[str, Any]]


def write_report(measurements: Measurements) -> str:
    """Return everything that was measured as Markdown."""
    parts = [_write_pair(name, measurements) for name in PAIRS]
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
    blocks += [_inner(names, own), _lossless(names, own)]
    return "\n\n".join(blocks)


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
        for arm in ARMS:
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
    plain = own.get(("none", "law"))
    if plain is not None:
        values = []
        for arm in ARMS:
            one = own.get((arm, "law"))
            if one is None:
                values.append("-")
                continue
            p_value, num_kinds = compare_laws(one["digests"], plain["digests"])
            values.append(f"p={p_value:.3f} ({num_kinds} kinds)")
        rows.append(["temperature 1: law equal to none's", *values])
    return _table(["losslessness", *ARMS], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _ratio(value: float | None, other: float | None) -> str:
    return "-" if value is None or not other else f"{value / other:.2f}"
