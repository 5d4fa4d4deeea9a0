"""Writes results.json and results.md from what a folder holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from loadtest.client.errors import LoadTestError

from .store import Store
from .summary import ALL_LOADS, compare_with_best, make_ratios, make_rows

Row = Mapping[str, Any]

_DETAILS: tuple[tuple[str, str, str], ...] = (
    ("measured s", "window_s", ".0f"),
    ("step ms", "step_ms", ".1f"),
    ("step-time error", "step_time_error", ".1%"),
    ("planning µs/step", "planning_us_per_step", ".0f"),
    ("verified/step", "verified_per_step", ".1f"),
    ("calibration error", "calibration_error", ".3f"),
    ("by chance", "calibration_exact_error", ".3f"),
    ("of confidence", "confidence_error", ".3f"),
    ("ITL p50 ms", "itl_p50_ms", ".1f"),
    ("ITL p99 ms", "itl_p99_ms", ".1f"),
    ("ms/token p50", "time_per_token_p50_ms", ".1f"),
    ("replies", "num_requests", "d"),
    ("differing", "num_differing_requests", "d"),
)


def write_results(store: Store) -> dict[str, Any]:
    """Write results.json and results.md from what has been measured.

    Returns:
        What results.json holds.

    Raises:
        LoadTestError: If nothing has been measured.
    """
    measurements, conditions = store.measurements(), store.conditions()
    if not measurements or conditions is None:
        raise LoadTestError(f"--output {store.folder} holds no measurements to report")
    # Whoever comes last is compared with all others.
    ours = conditions["policies"][-1]
    results = _round(
        {
            "environment": store.environment(),
            "settings": conditions,
            "rows": make_rows(measurements),
            "ratios": make_ratios(measurements),
            "over_best": compare_with_best(measurements, ours),
        }
    )
    store.write("results.json", json.dumps(results, indent=1) + "\n")
    store.write("results.md", render(results))
    return dict(results)


def describe(results: Mapping[str, Any]) -> str:
    """Say where the numbers come from, in a paragraph."""
    environment, conditions = results["environment"], results["settings"]
    machine, models = environment["machine"], environment["models"]
    # A GPU's engines are bound to no cores.
    place = machine.get("gpu") or (
        f"{machine['cpu']}, {len(conditions['cpus'])} of {machine['cores']} cores"
    )
    pair = ", ".join(
        f"{role} {one['name']} ({one['parameters'] / 1e6:.3g} M parameters, "
        f"{one['digest'][:8]})"
        for role, one in models.items()
    )
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
    commits = ", ".join(
        dict.fromkeys(str(piece["commit"])[:8] for piece in environment["pieces"])
    )
    dates = [piece["started"][:10] for piece in environment["pieces"]]
    return (
        f"{place}; {pair}; {conditions['dtype']}; replies up to "
        f"{conditions['max_tokens']} tokens; {versions}; commit {commits}; "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    )


def count_samples(rows: Sequence[Row]) -> str:
    """Say how much was measured: requests of a policy, rounds and engine starts."""
    requests = [row["num_requests"] for row in rows]
    rounds = min(row["rounds"] for row in rows)
    starts = [row.get("engine_starts") for row in rows]
    known = [one for one in starts if one is not None]
    return (
        f"{_range(requests)} requests, {rounds} round{'s' if rounds > 1 else ''}, "
        f"{_range(known) if known else 'unknown'} engine starts a policy"
    )


def render(results: Mapping[str, Any]) -> str:
    """Render everything that belongs into `results.md`."""
    rows, ratios = results["rows"], results["ratios"]
    parts = ["# Engine benchmark", describe(results), _HOW]
    for workload, temperature in loads_of(rows):
        own, own_ratios, best = (
            under(one, workload, temperature)
            for one in (rows, ratios, results["over_best"])
        )
        parts.append(f"## {workload}, temperature {temperature:g}")
        parts.append(f"A number is made of {count_samples(own)}.")
        parts.append(throughput_table(own))
        if own_ratios:
            parts.append(ratio_table(own_ratios, best))
        parts.append(detail_table(own))
    parts.append(_checks(rows))
    return "\n\n".join(parts) + "\n"


_HOW = (
    "Medians over rounds. Requests in flight are constant (closed loop); arms answer "
    "the same requests, a block of them at a time in turn, while the other engines are "
    "idle. Ratios are geometric means of the ratios within a round, with 95 % "
    "t-intervals over rounds; engines start anew for every round, so that what differs "
    "from start to start is in them (older results count one start, or do not tell). "
    "The best other is chosen, for each round, by the other rounds. Calibration errors "
    "are of acceptance as it was predicted, all outcomes in ten equal bins; by chance: "
    "what exact predictions would show over as many outcomes."
)


def throughput_table(rows: Sequence[Row]) -> str:
    """Render tokens per second by policy and concurrency, the best in bold.

    In brackets acceptance length and verification success rate.
    """
    best = {
        concurrency: max(
            _speed(row) for row in rows if row["concurrency"] == concurrency
        )
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


def ratio_table(ratios: Sequence[Row], best: Sequence[Row] = ()) -> str:
    """Render how the last policy compares with each other one, and with the best."""
    ours = ratios[-1]["policy"]
    own = [{**one, "policy": one["against"]} for one in ratios if one["policy"] == ours]
    own += [{**one, "policy": "the best other", "name": one["against"]} for one in best]

    def cell(ratio: Row) -> str:
        text = f"{ratio['ratio']:.3f}"
        if ratio["low"] is not None:
            text += f" ({ratio['low']:.3f}-{ratio['high']:.3f})"
        return f"{text}, {ratio['name']}" if "name" in ratio else text

    return _by_concurrency(f"{ours} over", own, cell)


def detail_table(rows: Sequence[Row]) -> str:
    """Render one line for each cell and policy."""
    header = ["policy", "requests", "tokens/s min-max", "before → after a change"]
    header += [title for title, _, _ in _DETAILS]
    lines = []
    for row in rows:
        speed = row["output_tokens_per_s"]
        line = [row["policy"], str(row["concurrency"])]
        line.append(f"{speed['min']:.0f}-{speed['max']:.0f}")
        phases = row.get("output_tokens_per_s_by_phase", {}).values()
        line.append(" → ".join(f"{one['median']:.0f}" for one in phases) or "-")
        line += [
            "-" if row[key] is None else format(row[key], form)
            for _, key, form in _DETAILS
        ]
        lines.append(line)
    return _make_table(header, lines)


def loads_of(rows: Iterable[Row]) -> list[tuple[str, float]]:
    """Return workloads with temperatures, each once."""
    return list(dict.fromkeys((row["workload"], row["temperature"]) for row in rows))


def under(rows: Iterable[Row], workload: str, temperature: float) -> list[Row]:
    """Return the rows of a workload at a temperature."""
    wanted = (workload, temperature)
    return [row for row in rows if (row["workload"], row["temperature"]) == wanted]


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
            "- Other processes, and a virtual machine's host, used at most "
            f"{share:.1%} of the machine in any block."
        )
    return "\n".join(lines)


def _by_concurrency(
    corner: str, rows: Sequence[Row], cell: Callable[[Row], str]
) -> str:
    concurrencies = _concurrencies(rows)
    header = [corner]
    header += [
        "all loads" if n == ALL_LOADS else f"{n} request{'s' if n > 1 else ''}"
        for n in concurrencies
    ]
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = {row["concurrency"]: row for row in rows if row["policy"] == policy}
        lines.append(
            [policy, *(cell(own[n]) if n in own else "-" for n in concurrencies)]
        )
    return _make_table(header, lines)


def _make_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def _concurrencies(rows: Sequence[Row]) -> list[int]:
    """Return the numbers of requests in flight, all loads together last."""
    found = {row["concurrency"] for row in rows}
    return sorted(found, key=lambda n: (n == ALL_LOADS, n))


def _speed(row: Row) -> float:
    return float(row["output_tokens_per_s"]["median"])


def _range(values: Sequence[int]) -> str:
    return " to ".join(map(str, sorted({min(values), max(values)})))


def _round(value: Any) -> Any:
    """Round numbers to what a reader can use."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _round(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_round(one) for one in value]
    return value
