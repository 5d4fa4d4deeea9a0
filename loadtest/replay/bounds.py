"""How much better any selector could have done: bounds from recorded traces.

    python -m loadtest.replay.bounds DIR

reads what `tetris-serve bench engine --output DIR` left there, and prints the
bounds of every cell as JSON. Drafts come from an arm of fixed length that is as deep as
`goodput` may draft: name one with --policies.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.arms import Arm
from loadtest.engine.plan import parse_bench_arm
from loadtest.engine.store import Store, cell_of

from .hindsight import play_hindsight, play_online
from .prices import PriceList, fit_prices
from .replay import (
    Played,
    play_clairvoyant,
    play_fixed,
    play_own,
    read_steps,
)
from .traces import Array, RecordedTrace, load_traces

MIN_HEADROOM = 0.02
"""Of hindsight over the best fixed k: below it a share of it means nothing."""

NUM_CHUNKS = 16
"""Stretches of a trace that are drawn anew together: neighbouring steps are alike."""

NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Share:
    """How much of the headroom an arm reached.

    Attributes:
        value: (arm / best fixed - 1) / (hindsight / best fixed - 1).
        low: Lower end of the 95 % interval, stretches of the traces drawn anew.
        high: Upper end.
    """

    value: float
    low: float
    high: float


def find_bounds(
    traces: Mapping[Arm, RecordedTrace], measured: Collection[Arm] | None = None
) -> dict[str, Any] | None:
    """Compute all bounds of one cell, in tokens per second of decoding.

    The deepest `goodput` arm is what they are bounds of: hindsight is the same policy,
    and no selector drafts deeper than it may.

    Args:
        traces: Of the cell, by arm.
        measured: Arms that are compared; others lend their recorded drafts alone. All
            by default.

    Returns:
        Plain values; None without the trace of a fixed arm as deep as the policy.
        `none`, `fixed` by depth, `replayed` (the policy as it learns), `hindsight` and
        `clairvoyant` are all played on the same recorded drafts. `achieved` by arm is
        its own decisions in its own trace; every arm is charged its own prices.
        `headroom` is hindsight over the best fixed k, minus 1. `headroom_share`
        compares the policy with the best fixed k by their own traces,
        `headroom_share_replayed` by the recorded drafts; None where the headroom is
        below `MIN_HEADROOM`.
    """
    measured = set(traces) if measured is None else set(measured)
    source = find_source(traces)
    prices = fit_prices(traces) if source is not None else None
    if source is None or prices is None:
        return None
    policy = _deepest_goodput(traces)
    depth = source.max_depth if policy is None else policy.max_depth
    steps = read_steps(traces[source], depth)
    if not steps:
        return None
    fixed = {
        arm.name: play_fixed(steps, prices.of(arm), arm.draft_tokens)
        for arm in sorted(traces, key=lambda arm: arm.draft_tokens)
        if arm.policy == "fixed" and arm in measured and arm.draft_tokens <= depth
    }
    own_prices = prices.shared if policy is None else prices.of(policy)
    hindsight = play_hindsight(steps, own_prices, depth)
    achieved = _achieved(traces, prices, measured)
    found: dict[str, Any] = {
        "drafts_of": source.name,
        "num_steps": len(steps),
        "none": play_fixed(steps, prices.shared, 0).tokens_per_s(),
        "fixed": {name: played.tokens_per_s() for name, played in fixed.items()},
        "hindsight": hindsight.tokens_per_s(),
        "clairvoyant": play_clairvoyant(steps, prices.cheapest, depth).tokens_per_s(),
        "achieved": {name: played.tokens_per_s() for name, played in achieved.items()},
        "policy": None if policy is None else policy.name,
    }
    if fixed:
        best = fixed[_fastest(fixed)]
        found["headroom"] = _ratio(hindsight, best) - 1.0
    if fixed and policy is not None:
        replayed = play_online(steps, own_prices, depth, traces[policy].state())
        found["replayed"] = replayed.tokens_per_s()
        found["headroom_share_replayed"] = _share(replayed, best, hindsight, best)
        own_fixed = {name: achieved[name] for name in fixed if name in achieved}
        if own_fixed and policy.name in achieved:
            best_own = _fastest(own_fixed)
            found["best_fixed_achieved"] = best_own
            found["headroom_share"] = _share(
                achieved[policy.name], own_fixed[best_own], hindsight, best
            )
    return found


def find_source(traces: Mapping[Arm, RecordedTrace]) -> Arm | None:
    """Return the fixed arm whose drafts are played; None if none is deep enough.

    That is the shallowest as deep as the deepest `goodput` arm, or, without such an
    arm, the deepest.
    """
    policy = _deepest_goodput(traces)
    fixed = sorted(
        (arm for arm in traces if arm.policy == "fixed"), key=lambda arm: arm.max_depth
    )
    if policy is None:
        return fixed[-1] if fixed else None
    return next((arm for arm in fixed if arm.max_depth >= policy.max_depth), None)


def _deepest_goodput(traces: Mapping[Arm, RecordedTrace]) -> Arm | None:
    own = [arm for arm in traces if arm.policy == "goodput"]
    return max(own, key=lambda arm: arm.max_depth, default=None)


def _achieved(
    traces: Mapping[Arm, RecordedTrace], prices: PriceList, measured: Collection[Arm]
) -> dict[str, Played]:
    played = {
        arm.name: play_own(trace, prices.of(arm))
        for arm, trace in traces.items()
        if arm in measured
    }
    return {name: own for name, own in played.items() if own is not None}


def _fastest(played: Mapping[str, Played]) -> str:
    return max(played, key=lambda name: played[name].tokens_per_s())


def _share(
    ours: Played, fixed: Played, hindsight: Played, fixed_replayed: Played
) -> dict[str, float] | None:
    """Return the share of the headroom with its interval; None without headroom.

    All traces answer the same requests in the same order, so the same stretches of all
    of them are drawn together.
    """
    everything = [ours, fixed, hindsight, fixed_replayed]
    if _ratio(hindsight, fixed_replayed) - 1.0 < MIN_HEADROOM:
        return None
    chunks = [_chunk(played) for played in everything]
    rng = np.random.default_rng(0)
    drawn = rng.integers(NUM_CHUNKS, size=(NUM_RESAMPLES, NUM_CHUNKS))
    speeds = [
        tokens[drawn].sum(axis=1) / ms[drawn].sum(axis=1) for tokens, ms in chunks
    ]
    gain = speeds[0] / speeds[1] - 1.0
    # A draw without headroom must not turn a loss into a gain.
    headroom = np.maximum(speeds[2] / speeds[3] - 1.0, MIN_HEADROOM / 4)
    low, high = np.percentile(gain / headroom, [2.5, 97.5]).tolist()
    value = (_ratio(ours, fixed) - 1.0) / (_ratio(hindsight, fixed_replayed) - 1.0)
    return asdict(Share(value, low, high))


def _ratio(ours: Played, theirs: Played) -> float:
    return ours.tokens_per_s() / theirs.tokens_per_s()


def _chunk(played: Played) -> tuple[Array, Array]:
    """Return tokens and milliseconds of each stretch, `[NUM_CHUNKS]`."""
    edges = np.linspace(0, played.tokens.size, NUM_CHUNKS + 1).astype(np.int64)
    return _sum_between(played.tokens, edges), _sum_between(played.ms, edges)


def _sum_between(values: Array, edges: NDArray[np.int64]) -> Array:
    sums = np.concatenate(([0.0], np.cumsum(values)))[edges]
    return np.asarray(np.diff(sums), dtype=np.float64)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the bounds of all cells of a folder that have traces."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args(argv).folder
    store = Store(folder)
    arms = [parse_bench_arm(name) for name in (store.conditions() or {})["policies"]]
    cells = dict.fromkeys(cell_of(one) for one in store.measurements())
    found = {}
    for cell, traces in load_traces(folder / "traces", list(cells), arms).items():
        # Prices change in a drifting cell: one set of them fits neither half.
        if not cell.workload.startswith("drift-"):
            found[cell.name] = find_bounds(traces)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
