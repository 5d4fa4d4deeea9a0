"""Loads: an arrival process, and a shape that its level follows over a run."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_SPIKE_START, _SPIKE_END = 0.4, 0.6
"""Parts of the run: long enough before to be steady, long enough after to recover."""

_INTEGRATION_STEPS = 2000
_DEFAULT_COUNTS = {"ladder": 4, "diurnal": 1}
_DEFAULT_GAMMA_CV = 2.0
_NUMBER = r"\d+(?:\.\d+)?"
_FORM = re.compile(
    r"(?P<process>closed|paced|poisson|gamma)(?:=(?P<cv>[\d.]+))?:"
    rf"(?:(?P<kind>ramp|ladder|spike|diurnal):(?P<first>{_NUMBER})-(?P<last>{_NUMBER})"
    rf"(?:x(?P<count>\d+))?|(?P<value>{_NUMBER}))"
)


@dataclass(frozen=True, slots=True)
class Load:
    """A load.

    Attributes:
        name: How it is written on the command line.
        process: `closed` keeps a number of requests in flight; the others are open:
            requests arrive whether or not earlier ones have been answered, evenly
            (`paced`), as a Poisson process, or in bursts (`gamma`).
        kind: `constant`, `ramp`, `ladder` (equal steps), `spike` (a peak from 40 % to
            60 % of the run) or `diurnal` (sine waves that begin and end at night).
        first: Level at the begin: requests in flight, or arrivals per second.
        last: Level at the end, or at the peak.
        count: Steps of a ladder, days of a diurnal load.
        cv: Coefficient of variation of the times between arrivals.
    """

    name: str
    process: str
    kind: str
    first: float
    last: float
    count: int = 1
    cv: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether requests arrive independently of the answers."""
        return self.process != "closed"

    @property
    def highest(self) -> float:
        """The highest level."""
        return max(self.first, self.last)

    def level(self, part: float) -> float:
        """Return the level at a part of the run, 0 to 1."""
        match self.kind:
            case "ramp":
                share = part
            case "ladder":
                last = self.count - 1
                share = min(int(part * self.count), last) / last
            case "spike":
                share = float(_SPIKE_START <= part < _SPIKE_END)
            case "diurnal":
                share = (1 - math.cos(2 * math.pi * part * self.count)) / 2
            case _:
                share = 0.0
        return self.first + (self.last - self.first) * share

    def users_at(self, part: float) -> int:
        """Return how many requests a closed load keeps in flight."""
        return math.floor(self.level(min(max(part, 0.0), 1.0)) + 0.5)


def parse_load(text: str) -> Load:
    """Read a load, e.g. `closed:8`, `poisson:2.5`, `gamma=3:spike:1-8`.

    Raises:
        ValueError: If it is no load, or one that makes no sense.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no load; write PROCESS:SHAPE, e.g. closed:8, poisson:2.5, "
            "paced:ramp:1-6, closed:ladder:4-16x4, gamma=3:spike:1-8, "
            "poisson:diurnal:1-8x2"
        )
    process, kind = match["process"], match["kind"] or "constant"
    if match["cv"] is not None and process != "gamma":
        raise ValueError(f"{text!r}: only gamma takes a coefficient of variation")
    if match["count"] is not None and kind not in _DEFAULT_COUNTS:
        raise ValueError(f"{text!r}: only ladder and diurnal take a count")
    cv = {"poisson": 1.0, "gamma": float(match["cv"] or _DEFAULT_GAMMA_CV)}
    load = Load(
        name=text,
        process=process,
        kind=kind,
        first=float(match["first"] or match["value"]),
        last=float(match["last"] or match["value"]),
        count=int(match["count"] or _DEFAULT_COUNTS.get(kind, 1)),
        cv=cv.get(process, 0.0),
    )
    if load.count < (2 if kind == "ladder" else 1):
        raise ValueError(f"{text!r}: a ladder has at least 2 steps, the rest 1 day")
    if load.highest <= 0:
        raise ValueError(f"{text!r}: some level must be above 0")
    if process == "gamma" and not 0 < load.cv <= 10:
        raise ValueError(f"{text!r}: the coefficient of variation must be in (0, 10]")
    if not load.is_open and not (load.first.is_integer() and load.last.is_integer()):
        raise ValueError(f"{text!r}: requests in flight are whole numbers")
    return load


def arrival_times(load: Load, duration_s: float, seed: str) -> list[float]:
    """Return the times at which requests of an open load arrive.

    Unit-rate renewal times are mapped through the inverse of the shape's integral. So
    the mean rate follows the shape at every moment, whatever the process. A level that
    jumps is off by at most one part in 2000 of the run. Equal seeds give equal times.
    """
    edges = np.linspace(0.0, 1.0, _INTEGRATION_STEPS + 1)
    levels = [load.level(part) for part in (edges[:-1] + edges[1:]) / 2]
    sums = np.cumsum([0.0, *levels]) * duration_s / _INTEGRATION_STEPS
    positions = itertools.takewhile(
        lambda position: position < sums[-1],
        itertools.accumulate(_draw_gaps(load, random.Random(seed))),
    )
    return list(map(float, np.interp(list(positions), sums, edges * duration_s)))


def _draw_gaps(load: Load, draw: random.Random) -> Iterator[float]:
    """Draw times between arrivals with mean 1."""
    if load.cv == 0:
        # Half a gap first: an even process is then centred in the run.
        yield 0.5
    while True:
        if load.cv in (0, 1):
            yield draw.expovariate(1.0) if load.cv else 1.0
        else:
            alpha = 1 / load.cv**2
            yield draw.gammavariate(alpha, 1 / alpha)
