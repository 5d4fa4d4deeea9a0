"""Two callers of whom one floods, and deadlines at twice what a fleet can do."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from loadtest.progress import Progress

from .engine import Engine, find_model, load_engine
from .front import SERVED, TOO_LATE, Caller, Front, Served
from .load import Drawn, Lengths, Load, draw_requests, parse_arrivals

_MODEL, _DRAFTS, _BATCH, _REPLICAS, _QUEUED = "h100-qwen3-1.7b", 3, 32, 4, 64
_LOAD: Final = Load(
    parse_arrivals("poisson"), Lengths(300, 1.0), Lengths(200, 1.0), 0.5, 0.5
)
_QUIET, _FLOOD, _TWICE = 0.2, 1.8, 2.0
"""Over what the fleet can do: the quiet caller, the other, and one with deadlines."""

_DEADLINES_MS: Final = (600.0, 1000.0, 1500.0)
_SERVED: Final = ", requests served"
_SEEDS, _REQUESTS, _REPLAYED = 3, 6000, 40


def draw(parts: Sequence[tuple[float, int]], seed: int) -> tuple[Drawn, NDArray[Any]]:
    """Return the requests of several callers by arrival, and whose each is.

    Args:
        parts: Of each caller, requests a second and how many.
        seed: Of all of them.
    """
    drawn = [
        draw_requests(_LOAD, count, rate_per_s, 100 * seed + number)
        for number, (rate_per_s, count) in enumerate(parts)
    ]
    whose = np.repeat(np.arange(len(parts)), [count for _, count in parts])
    names = ("arrival_s", "num_prompt_tokens", "num_output_tokens", "kind")
    joined = [np.concatenate([getattr(one, name) for one in drawn]) for name in names]
    order = np.argsort(joined[0], kind="stable")
    return Drawn(*(values[order] for values in joined)), whose[order]


def compare_callers(engine: Engine, seed: int) -> dict[str, float]:
    """Return the quiet caller's p95 of times to first tokens, ms: alone and beside.

    And how many requests of both were served.
    """
    rate_per_s = engine.capacity_per_s(_LOAD) * _REPLICAS
    num_quiet = round(_REQUESTS * _QUIET / (_QUIET + _FLOOD))
    quiet = _QUIET * rate_per_s, num_quiet
    both = [quiet, (_FLOOD * rate_per_s, _REQUESTS - num_quiet)]
    callers = [Caller("quiet"), Caller("flood")]
    found = {}
    for name, parts, is_fair, keeps_seats in (
        ("alone", [quiet], True, True),
        ("fair turns and kept seats", both, True, True),
        ("fair turns", both, True, False),
        ("first come, first served", both, False, False),
    ):
        drawn, whose = draw(parts, seed)
        front = Front(
            *(engine, drawn, callers[: len(parts)], whose, _REPLICAS),
            max_queued=_QUEUED,
            is_fair=is_fair,
            keeps_seats=keeps_seats,
            seed=seed,
        )
        served = front.run()
        found[name] = float(np.nanquantile(served.ttft_ms[whose == 0], 0.95))
        found[f"{name}{_SERVED}"] = float((served.outcome == SERVED).sum())
    return found


def compare_deadlines(
    engine: Engine, deadline_ms: float, seed: int, num_replayed: int = _REPLAYED
) -> dict[str, float]:
    """Return what becomes of requests with a deadline, refused early and not.

    `precision` is the share of those refused that would have missed it: some of them
    are let in, each in a run of its own.
    """
    rate_per_s = engine.capacity_per_s(_LOAD) * _REPLICAS
    drawn, whose = draw([(_TWICE * rate_per_s, _REQUESTS)], seed)
    caller = Caller("all", deadline_ms)
    span_s = drawn.arrival_s[-1]

    def run(*, refuses: bool, never_refused: int = -1) -> Served:
        front = Front(
            *(engine, drawn, [caller], whose, _REPLICAS),
            max_queued=_QUEUED,
            refuses=refuses,
            never_refused=never_refused,
            seed=seed,
        )
        return front.run()

    found = {}
    for name, refuses in (("refused early", True), ("not refused", False)):
        served = run(refuses=refuses)
        is_in_time = served.finish_ms <= deadline_ms
        found[f"{name}, in time a second"] = float(is_in_time.sum() / span_s)
        taken = served.outcome == SERVED
        found[f"{name}, of those served in time"] = float(is_in_time[taken].mean())
        if refuses:
            late = np.flatnonzero(served.outcome == TOO_LATE)
            found["refused"] = float(late.size / whose.size)
    some = np.random.default_rng(seed).permutation(late)[:num_replayed]
    missed = 0
    for number in some:
        alone = run(refuses=True, never_refused=int(number))
        missed += not alone.finish_ms[number] <= deadline_ms
    found["precision"] = missed / max(1, some.size)
    return found


def run_crowd() -> dict[str, list[dict[str, float]]]:
    """Compute both for every seed."""
    engine = load_engine(find_model(_MODEL), _DRAFTS, _BATCH)
    progress = Progress(_SEEDS * (1 + len(_DEADLINES_MS)))
    parts: dict[str, Callable[[int], dict[str, float]]] = {
        "callers": functools.partial(compare_callers, engine)
    }
    for deadline_ms in _DEADLINES_MS:
        found = functools.partial(compare_deadlines, engine, deadline_ms)
        parts[f"{deadline_ms:g}"] = found
    for name in parts:
        progress.expect(name, _SEEDS)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in parts}
    for seed, (name, part) in itertools.product(range(_SEEDS), parts.items()):
        began_s = time.monotonic()
        rows[name].append(part(seed))
        progress.advance(name, time.monotonic() - began_s, f"{name}, seed {seed}")
    return rows


def render_crowd(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Render two tables: the quiet caller, and requests with deadlines."""
    means = {
        name: {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
        for name, runs in rows.items()
    }
    callers = means.pop("callers")
    alone = callers["alone"]
    lines = [
        "",
        "| the quiet caller | p95 of times to first token, ms | times alone | requests "
        "served, of both |",
        "|---|---|---|---|",
        *(
            f"| {name} | {value:,.0f} | {value / alone:.1f} | "
            f"{callers[name + _SERVED]:,.0f} |"
            for name, value in callers.items()
            if not name.endswith(_SERVED)
        ),
        "",
        "| deadline, ms | refused early, % | of those served in time, % | in time a "
        "second | would have missed, % of refused | in time a second, none refused |",
        "|---|---|---|---|---|---|",
    ]
    for deadline_ms, row in means.items():
        cells = [
            f"{float(deadline_ms):,.0f}",
            f"{100 * row['refused']:.0f}",
            f"{100 * row['refused early, of those served in time']:.0f}",
            f"{row['refused early, in time a second']:.0f}",
            f"{100 * row['precision']:.0f}",
            f"{row['not refused, in time a second']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", ""])
