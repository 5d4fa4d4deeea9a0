"""Fleets that grow and shrink: autoscalers, start-up times, and replica-hours.

`ours` is the class that Serve's controller asks in a deployment
(`policies.decisions.scaling`), told what a deployment tells it.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from policies.decisions.scaling import ReplicaPace, Scaling

from . import kernel, state
from .drawn import Drawn
from .engine import Engine
from .fleet import PIECES, ROUTERS, Metrics, Targets, make_fleet, measure
from .readers import number
from .routers import find_costs, listen

PERIOD_S: Final = 5.0
"""Between two decisions."""

AGE_S: Final = 0.25
"""Of telemetry: a replica speaks four times a second."""

Decide = Callable[[float, float, Sequence[ReplicaPace], int, int], int]
"""Time, requests there, paces, replicas running and wanted: replicas to be wanted."""

SCALERS: Final = ("target-ongoing", "latency", "ours")
"""By requests a replica; by step times at the acceptance of the start; and ours."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How a fleet may change."""

    most: int  # replicas there can be
    start_s: float = 60.0  # from the decision until a replica takes requests
    up_delay_s: float = 10.0  # a wish for more must have lasted so long
    down_delay_s: float = 300.0  # and one for fewer
    least: int = 1  # replicas there always are
    first: int | None = None  # with which it begins; None for the most


def parse_scaler(text: str) -> str:
    """Check an autoscaler and its target, as `NAME:TARGET`.

    Raises:
        ArgumentTypeError: If it is none.
    """
    name, has_target, target = text.partition(":")
    if name not in SCALERS or not has_target:
        names = ", ".join(SCALERS)
        raise ArgumentTypeError(f"{text!r} is no NAME:TARGET; names are {names}")
    number(1e-6)(target)
    return text


def make_scaler(name: str, target: float, engine: Engine, hard_share: float) -> Decide:
    """Return an autoscaler.

    Args:
        name: One of `SCALERS`.
        target: Requests of each replica for `target-ongoing`, else the longest mean
            time between two tokens, ms.
        engine: Of every replica.
        hard_share: Of the requests that `latency` was profiled with.
    """
    if name == "target-ongoing":
        return lambda _now, load, _paces, _running, _wanted: math.ceil(load / target)
    scaling = Scaling(target, engine.costs.max_num_seqs / 2)
    if name == "ours":
        return scaling.decide
    tokens = float(np.dot((1.0 - hard_share, hard_share), engine.tokens_per_step))
    return lambda now_s, load, paces, running, wanted: scaling.decide(
        now_s,
        load,
        [replace(one, tokens_per_step=tokens) for one in paces],
        running,
        wanted,
    )


def run_growing(
    engine: Engine,
    drawn: Drawn,
    decide: Decide,
    growth: Growth,
    targets: Targets,
    seed: int,
    on_piece: Callable[[], None] = lambda: None,
) -> tuple[Metrics, state.Requests, list[int]]:
    """Run a fleet whose size follows an autoscaler; requests go to the better of two.

    A replica is paid from the decision to start it until it has drained. `on_piece` is
    called `PIECES` times on the way.

    Returns:
        What `measure` finds, `replica_hours`, the mean number of `replicas`, and the
        share of time for which there were as many `at_limit` as there can be; the
        requests; and replicas at the end of each `PERIOD_S`.
    """
    fleet = make_fleet(engine, drawn, growth.most, seed)
    size = _Size(growth)
    paid: list[int] = []
    full: list[bool] = []
    now_s, how = 0.0, (ROUTERS["power-of-two-sent"], AGE_S, drawn.arrival_s.size)
    fleet.counts[state.OPEN] = size.open_at(now_s)
    for piece in range(1, PIECES + 1):
        while now_s < drawn.arrival_s[-1] * piece / PIECES:
            now_s += PERIOD_S
            kernel.advance(fleet, *how, now_s)
            listen(fleet, now_s - AGE_S)
            fleet.counts[state.OPEN] = num_open = size.open_at(now_s)
            load = float(fleet.telemetry.num_sent.sum())
            paces = _read_paces(fleet, num_open)
            size.follow(now_s, decide(now_s, load, paces, num_open, size.num_wanted))
            # Also those in whose place another one starts.
            draining = np.count_nonzero(fleet.num_running[size.num_open :])
            paid.append(size.num_paid + int(draining))
            full.append(size.num_paid >= growth.most)
        on_piece()
    kernel.advance(fleet, *how, np.inf)
    found = measure(fleet.requests, targets) | {
        "replicas": float(np.mean(paid)),
        "at_limit": float(np.mean(full)),
        "replica_hours": PERIOD_S * sum(paid) / 3600.0,
    }
    return found, fleet.requests, paid


class _Size:
    """Replicas wanted, started and open, with the delays of Serve's controller."""

    def __init__(self, growth: Growth) -> None:
        self.num_wanted = self.num_open = growth.first or growth.most
        self._growth = growth
        self._starts: list[float] = []
        self._since: tuple[int, float] | None = None

    @property
    def num_paid(self) -> int:
        """Replicas that are open or start."""
        return self.num_open + len(self._starts)

    def open_at(self, now_s: float) -> int:
        """Return how many take requests."""
        ready = [due for due in self._starts if due <= now_s]
        self._starts = self._starts[len(ready) :]
        self.num_open += len(ready)
        return self.num_open

    def follow(self, now_s: float, wish: int) -> None:
        """Take a wish, which counts once it has lasted."""
        wish = min(max(wish, self._growth.least), self._growth.most)
        way = (wish > self.num_wanted) - (wish < self.num_wanted)
        if way == 0:
            self._since = None
            return
        if self._since is None or self._since[0] != way:
            self._since = way, now_s
        delay_s = self._growth.up_delay_s if way > 0 else self._growth.down_delay_s
        if now_s - self._since[1] < delay_s:
            return
        self._since = None
        self.num_wanted = wish
        more = wish - self.num_paid
        if more >= 0:
            self._starts += [now_s + self._growth.start_s] * more
        else:
            # Those that start are given up first.
            given_up = min(len(self._starts), -more)
            self._starts = self._starts[: len(self._starts) - given_up]
            self.num_open = max(1, self.num_open + more + given_up)


def _read_paces(fleet: state.Fleet, count: int) -> list[ReplicaPace]:
    """Return what replicas would report; those that have done nothing know no pace."""
    known = fleet.telemetry
    return [
        ReplicaPace(
            *find_costs(fleet, replica)[:2],
            float(known.tokens_per_step[replica]),
            fleet.costs.max_num_seqs,
        )
        for replica in np.flatnonzero(known.num_running[:count]).tolist()
    ]
