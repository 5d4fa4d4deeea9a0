"""What the benchmark is meant to show, line by line: aim, value, verdict."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .arms import Arm
from .comparison import BestRatio, compare, compare_with_best
from .estimates import judge_estimates
from .plan import Cell, is_sweep
from .rows import Measurement, throughputs
from .saturation import find_saturated
from .verdict import MET, MISSED, NO_HEADROOM, NOT_DECIDED, Verdict, judge_interval
from .workloads import is_drifting

LEAST_OF_BEST = 0.98
MAX_HALF_WIDTH = 0.02
"""A point whose interval reaches further on either side decides nothing."""

LEAST_OVER_FIXED, LEAST_OVER_TETRIS = 1.10, 1.05
LEAST_HEADROOM_SHARE = 0.8
MOST_RECOVERY_STEPS = 50
LEAST_WHILE_COLD = 0.99
"""Of an engine without speculation: all that cold depth 0 may cost is a per cent."""

SELECTION_NOTE = (
    "The best rival of a point is chosen, for each round, by its median in the other "
    "rounds: the fastest of many policies is partly the luckiest, and would be harder "
    "to beat in the very rounds it was chosen by. Few rounds choose wrongly now and "
    "then, and a rival that is not the best is easier to beat: so the value errs a "
    "little in the policy's favour. Where others than the best of all rounds were "
    "chosen, the note adds the plain ratio to that one, which errs the other way."
)


def judge_all(
    measurements: Sequence[Measurement],
    rows: Sequence[Mapping[str, Any]],
    bounds: Sequence[Mapping[str, Any]],
    calibration: Sequence[Mapping[str, Any]],
    cells: Sequence[Cell],
    arms: Sequence[Arm],
) -> list[dict[str, Any]]:
    """Judge the deepest `goodput` policy, and engines that are held at depth 0.

    Args:
        measurements: All of them.
        rows: Made from them.
        bounds: Of the traced cells.
        calibration: Of the traced cells.
        cells: What was measured.
        arms: In the order of the tables.
    """
    own = [arm for arm in arms if arm.policy == "goodput"]
    verdicts: list[Verdict] = []
    if own:
        ours = max(own, key=lambda arm: arm.max_depth)
        rivals = [arm for arm in arms if arm.is_rival]
        ours_rows = [row for row in rows if row["policy"] == ours.name]
        verdicts += [
            *_judge_points(measurements, ours, rivals, cells),
            *_judge_sweep(measurements, ours, rivals, cells),
            *_judge_headroom(find_saturated(rows), bounds),
            *_judge_recovery(ours_rows),
            *judge_estimates(ours_rows, calibration),
        ]
    verdicts += _judge_cold(measurements, arms, cells)
    return [asdict(verdict) for verdict in verdicts]


def _judge_points(
    measurements: Sequence[Measurement],
    ours: Arm,
    rivals: Sequence[Arm],
    cells: Iterable[Cell],
) -> Iterable[Verdict]:
    for cell in cells:
        by_arm = {
            arm.name: speeds
            for arm in rivals
            if (speeds := throughputs(measurements, cell, arm.name))
        }
        best = compare_with_best(throughputs(measurements, cell, ours.name), by_arm)
        if best is None:
            continue
        ratio = best.ratio
        verdict = NOT_DECIDED
        if ratio.high is not None and ratio.high < LEAST_OF_BEST:
            verdict = MISSED
        elif ratio.ratio >= LEAST_OF_BEST and (
            ratio.half_width is not None and ratio.half_width <= MAX_HALF_WIDTH
        ):
            verdict = MET
        yield _from_best(
            1, "over the best other", cell.name, LEAST_OF_BEST, best, verdict
        )


def _judge_sweep(
    measurements: Sequence[Measurement],
    ours: Arm,
    rivals: Sequence[Arm],
    cells: Iterable[Cell],
) -> Iterable[Verdict]:
    sweep = [cell for cell in cells if is_sweep(cell)]
    if not sweep:
        return
    our_means = geometric_means(measurements, sweep, ours)
    where = f"mixed, temperature 0, {len(sweep)} loads"
    for policy, aim in (("fixed", LEAST_OVER_FIXED), ("tetris", LEAST_OVER_TETRIS)):
        means = {
            arm.name: own
            for arm in rivals
            if arm.policy == policy
            and (own := geometric_means(measurements, sweep, arm))
        }
        best = compare_with_best(our_means, means)
        if best is None:
            continue
        ratio = best.ratio
        verdict = judge_interval(aim, ratio.low, ratio.high)
        what = f"geometric mean over the best single {policy}"
        yield _from_best(2, what, where, aim, best, verdict)


def geometric_means(
    measurements: Sequence[Measurement], cells: Sequence[Cell], arm: Arm
) -> dict[int, float]:
    """Return the geometric mean over cells by round, of rounds with all cells."""
    by_cell = [throughputs(measurements, cell, arm.name) for cell in cells]
    complete = set(by_cell[0]).intersection(*by_cell[1:]) if by_cell else set()
    return {
        number: statistics.geometric_mean(own[number] for own in by_cell)
        for number in complete
    }


def _judge_headroom(
    saturated: Iterable[Cell], bounds: Sequence[Mapping[str, Any]]
) -> Iterable[Verdict]:
    what = "share of hindsight's headroom over the best fixed k"
    by_cell = {
        Cell(one["workload"], one["temperature"], one["concurrency"]): one
        for one in bounds
    }

    def make(
        where: str, share: Mapping[str, float], verdict: str, note: str
    ) -> Verdict:
        ends = share.get("value"), share.get("low"), share.get("high")
        return Verdict(3, what, where, LEAST_HEADROOM_SHARE, True, *ends, verdict, note)

    steady = sorted(
        (cell for cell in saturated if not is_drifting(cell.workload)),
        key=lambda cell: (cell.workload, cell.temperature, cell.concurrency),
    )
    if not steady:
        yield make("saturated points", {}, NOT_DECIDED, "no point is saturated")
    for cell in steady:
        bound = by_cell.get(cell, {})
        headroom, share = bound.get("headroom"), bound.get("headroom_share")
        if headroom is None or "headroom_share" not in bound:
            yield make(cell.name, {}, NOT_DECIDED, "not traced")
        elif share is None:
            yield make(cell.name, {}, NO_HEADROOM, f"headroom {headroom:.1%}")
        else:
            verdict = judge_interval(LEAST_HEADROOM_SHARE, share["low"], share["high"])
            yield make(cell.name, share, verdict, f"headroom {headroom:.1%}")


def _judge_recovery(rows: Iterable[Mapping[str, Any]]) -> Iterable[Verdict]:
    for row in rows:
        recovery = row.get("recovery")
        if recovery is None:
            continue
        steps, least = recovery["steps"], recovery["least_steps"]
        verdict = NOT_DECIDED
        if steps is not None and steps <= MOST_RECOVERY_STEPS:
            verdict = MET
        elif recovery["steps_seen"] > MOST_RECOVERY_STEPS and (
            least is None or least > MOST_RECOVERY_STEPS
        ):
            verdict = MISSED
        yield Verdict(
            4,
            "steps until back at .98 of the best other",
            _cell_name(row),
            MOST_RECOVERY_STEPS,
            False,
            steps,
            least,
            None,
            verdict,
            f"best other {recovery['rival']}, {recovery['steps_seen']} steps seen",
        )


def _judge_cold(
    measurements: Sequence[Measurement], arms: Sequence[Arm], cells: Iterable[Cell]
) -> Iterable[Verdict]:
    held = [arm for arm in arms if arm.held_at_zero == "cold"]
    for cell in cells:
        plain = throughputs(measurements, cell, "none")
        for arm in held:
            ratio = compare(throughputs(measurements, cell, arm.name), plain)
            if ratio is None:
                continue
            yield Verdict(
                6,
                f"{arm.name}: cold depth 0 over no speculation",
                cell.name,
                LEAST_WHILE_COLD,
                True,
                ratio.ratio,
                ratio.low,
                ratio.high,
                judge_interval(LEAST_WHILE_COLD, ratio.low, ratio.high),
                f"{ratio.rounds} rounds",
            )


def _from_best(
    measure: int, what: str, where: str, aim: float, best: BestRatio, verdict: str
) -> Verdict:
    ratio = best.ratio
    return Verdict(
        measure,
        what,
        where,
        aim,
        True,
        ratio.ratio,
        ratio.low,
        ratio.high,
        verdict,
        _tell_rivals(best),
    )


def _tell_rivals(best: BestRatio) -> str:
    """Name what a policy was compared with, and the best rival of all rounds."""
    ratio = best.ratio
    half = "" if ratio.half_width is None else f" ± {ratio.half_width:.3f}"
    if set(best.chosen) == {best.rival}:
        return f"against {best.rival}{half}, {ratio.rounds} rounds"
    chosen = ", ".join(f"{name} in {count}" for name, count in best.chosen.items())
    return (
        f"against {chosen} of {ratio.rounds} rounds{half}; "
        f"{best.plain.ratio:.3f} over {best.rival}, the best of all rounds"
    )


def _cell_name(row: Mapping[str, Any]) -> str:
    return Cell(row["workload"], row["temperature"], row["concurrency"]).name
