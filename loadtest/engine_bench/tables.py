"""Markdown tables of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .judged_tables import bound_section, calibration_section, verdict_section
from .markdown import format_value, make_table
from .recovery import HOLD_STEPS, WINDOW_STEPS
from .yardstick import OUT_OF_LINE, STOLEN_SHARE

Row = Mapping[str, Any]

_DETAILS: tuple[tuple[str, str, str], ...] = (
    ("verified/step", "verified_per_step", ".1f"),
    ("ITL p50 ms", "itl_p50_ms", ".1f"),
    ("ITL p99 ms", "itl_p99_ms", ".1f"),
    ("ms/token p50", "time_per_token_p50_ms", ".1f"),
    ("step-time error", "step_time_error", ".1%"),
    ("calibration error", "calibration_error", ".3f"),
    ("by chance", "calibration_exact_error", ".3f"),
    ("planning µs/step", "planning_us_per_step", ".0f"),
    ("output tokens", "num_output_tokens", "d"),
    ("differing requests", "num_differing_requests", "d"),
)


def render(results: Mapping[str, Any]) -> str:
    """Render everything that belongs into `results.md`."""
    rows, ratios = results["rows"], results["ratios"]
    parts = ["# Engine benchmark", _describe(results)]
    if results.get("verdicts"):
        parts.append(verdict_section(results["verdicts"]))
    for workload, temperature in _conditions(rows):
        own = _under(rows, workload, temperature)
        parts += [f"## {workload}, temperature {temperature:g}", throughput_table(own)]
        if any("output_tokens_per_s_by_phase" in row for row in own):
            parts += ["Before and after conditions change, tokens/s:", phase_table(own)]
        if any("recovery" in row for row in own):
            parts += [_RECOVERY_HEADING, recovery_table(own)]
        own_ratios = _under(ratios, workload, temperature)
        if own_ratios:
            parts += [_ratio_heading(own_ratios), ratio_table(own_ratios)]
        own_bounds = _under(results.get("bounds", []), workload, temperature)
        if own_bounds:
            parts.append(bound_section(own_bounds))
        parts += ["Details:", detail_table(own)]
    if results.get("calibration"):
        parts.append(calibration_section(results["calibration"]))
    parts.append(_checks(rows))
    return "\n\n".join(parts) + "\n"


def throughput_table(rows: Sequence[Row]) -> str:
    """Render tokens per second by policy and concurrency, the best in bold.

    In brackets acceptance length and verification success rate.
    """
    best = {
        concurrency: max(_speed(row) for row in rows if _at(row, concurrency))
        for concurrency in _concurrencies(rows)
    }

    def cell(row: Row) -> str:
        speed = f"{_speed(row):.0f}"
        if _speed(row) == best[row["concurrency"]]:
            speed = f"**{speed}**"
        if row["verified_per_step"] is None or row["acceptance_length"] is None:
            return speed
        success = row["verification_success_rate"]
        share = "-" if success is None else f"{success:.2f}".removeprefix("0")
        return f"{speed} ({row['acceptance_length']:.2f}, {share})"

    return _by_concurrency(
        "tokens/s (acceptance length, verification success rate)", rows, cell
    )


def phase_table(rows: Sequence[Row]) -> str:
    """Render tokens per second before and after conditions changed."""

    def cell(row: Row) -> str:
        phases = row.get("output_tokens_per_s_by_phase")
        if phases is None:
            return "-"
        before, after = phases["before"]["median"], phases["after"]["median"]
        return f"{before:.0f} → {after:.0f}"

    return _by_concurrency("tokens/s", rows, cell)


def recovery_table(rows: Sequence[Row]) -> str:
    """Render the steps to recovery after conditions changed."""

    def cell(row: Row) -> str:
        recovery = row.get("recovery")
        if recovery is None:
            return "-"
        steps, least = recovery["steps"], recovery["least_steps"]
        seen = f"more than {recovery['steps_seen']}"
        text = seen if steps is None else str(steps)
        if recovery["rounds"] > 1 and least != steps:
            text += f" (at least {seen if least is None else least})"
        return f"{text}, against {recovery['rival']}"

    return _by_concurrency("steps", rows, cell)


def ratio_table(ratios: Sequence[Row]) -> str:
    """Render how the last policy compares with each other one."""
    ours = ratios[-1]["policy"]
    own = [
        {**ratio, "policy": ratio["against"]}
        for ratio in ratios
        if ratio["policy"] == ours
    ]

    def cell(ratio: Row) -> str:
        if ratio["low"] is None:
            return f"{ratio['ratio']:.3f}"
        return f"{ratio['ratio']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"

    return _by_concurrency(f"{ours} over", own, cell)


def detail_table(rows: Sequence[Row]) -> str:
    """Render one line for each cell and policy."""
    header = ["policy", "requests", "tokens/s min-max"]
    header += [title for title, _, _ in _DETAILS]
    lines = []
    for row in rows:
        speed = row["output_tokens_per_s"]
        line = [row["policy"], str(row["concurrency"])]
        line.append(f"{speed['min']:.0f}-{speed['max']:.0f}")
        line += [format_value(row[key], form) for _, key, form in _DETAILS]
        lines.append(line)
    return make_table(header, lines)


def _by_concurrency(
    corner: str, rows: Sequence[Row], cell: Callable[[Row], str]
) -> str:
    concurrencies = _concurrencies(rows)
    header = [corner]
    header += [f"{n} request{'s' if n > 1 else ''}" for n in concurrencies]
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = {row["concurrency"]: row for row in rows if row["policy"] == policy}
        lines.append(
            [policy, *(cell(own[n]) if n in own else "-" for n in concurrencies)]
        )
    return make_table(header, lines)


_RECOVERY_HEADING = (
    "Steps after the change until a policy is, and stays, at .98 of the best *other* "
    f"one or above: speed over the next {WINDOW_STEPS} steps, at every step of the "
    f"next {HOLD_STEPS} or until the end, mean over rounds. In brackets what the 95 % "
    "interval does not rule out."
)


def _describe(results: Mapping[str, Any]) -> str:
    environment, conditions = results["environment"], results["settings"]
    machine, models = environment["machine"], environment["models"]
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
    dates = [piece["started"][:10] for piece in environment["pieces"]]
    # Results of before there was a choice do not name it.
    per_start = conditions.get("rounds_per_start")
    starts = ""
    if per_start:
        each = "round" if per_start == 1 else f"{per_start} rounds"
        starts = f" All engines start anew for every {each}."
    # A GPU's engines are bound to no cores.
    place = machine.get("gpu") or (
        f"{machine['cpu']}, {len(conditions['cpus'])} of {machine['cores']} cores"
    )
    turns = "arms take turns on the same requests, all other engines are stopped"
    turns = f"{turns} meanwhile"
    if "gpu" in machine:
        turns = "one engine at a time goes through all cells, with the same requests"
    return (
        f"{place}; "
        f"target {models['target']['parameters'] / 1e6:.1f} M parameters, "
        f"draft {models['draft']['parameters'] / 1e6:.2f} M, {conditions['dtype']}; "
        f"replies up to {conditions['max_tokens']} tokens; {versions}; "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}.\n\n"
        "Medians over rounds. Requests in flight are constant (closed loop), "
        f"{turns}.{starts} "
        "Ratios are geometric means of the ratios within a round, with 95 % "
        "t-intervals. "
        "Calibration errors are of acceptance as it was predicted in the steady parts, "
        "the outcomes of all rounds in ten equal bins; by chance: what exact "
        "predictions would show over as many outcomes."
    )


def _ratio_heading(ratios: Sequence[Row]) -> str:
    rounds = min(ratio["rounds"] for ratio in ratios)
    return (
        f"Throughput of {ratios[-1]['policy']} over the others, {rounds} "
        f"round{'s' if rounds > 1 else ''}:"
    )


def _checks(rows: Sequence[Row]) -> str:
    lines = ["## Checks"]
    greedy = [row for row in rows if row["temperature"] == 0]
    if greedy:
        differing = sum(row["num_differing_requests"] for row in greedy)
        total = sum(row["num_requests"] for row in greedy)
        lines.append(
            f"- Temperature 0: {differing} of {total} replies differ from the first "
            "policy's (near-ties that bf16 rounds differently in other batch shapes)."
        )
    fallbacks = sorted(
        {f"{row['policy']}: {r}" for row in rows for r in row["fallbacks"]}
    )
    lines.append(f"- Fallbacks of policies: {', '.join(fallbacks) or 'none'}.")
    alone = [row for row in rows if row["workload"] != "drift-neighbour"]
    if alone:
        share = max(row["max_other_cpu_share"] for row in alone)
        lines.append(
            f"- Other processes used at most {share:.1%} of the machine in any round."
        )
    num_turns = sum(row["num_turns"] for row in rows)
    disturbed = sum(row["num_disturbed_turns"] for row in rows)
    lines.append(
        f"- The machine was not itself in {disturbed} of {num_turns} turns (a fixed "
        f"computation before or after took over {OUT_OF_LINE} times its usual time, or "
        f"the host took over {STOLEN_SHARE:.0%} of the machine away); turns waited "
        f"{sum(row['waited_s'] for row in rows):.0f} s for it to be."
    )
    return "\n".join(lines)


def _conditions(rows: Iterable[Row]) -> list[tuple[str, float]]:
    return list(dict.fromkeys((row["workload"], row["temperature"]) for row in rows))


def _under(rows: Iterable[Row], workload: str, temperature: float) -> list[Row]:
    wanted = (workload, temperature)
    return [row for row in rows if (row["workload"], row["temperature"]) == wanted]


def _concurrencies(rows: Iterable[Row]) -> list[int]:
    return sorted({row["concurrency"] for row in rows})


def _at(row: Row, concurrency: int) -> bool:
    return bool(row["concurrency"] == concurrency)


def _speed(row: Row) -> float:
    return float(row["output_tokens_per_s"]["median"])
