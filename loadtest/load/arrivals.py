"""Loads: an arrival process, and a shape that its level follows over a run."""

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
_CVS = {"closed": 0.0, "paced": 0.0, "poisson": 1.0, "gamma": 2.0}
_FORM = re.compile(
    rf"(?P<process>{'|'.join(_CVS)})(?:(?<=gamma)=(?P<cv>[\d.]+))?:"
    r"(?:(?P<kind>ramp|spike|diurnal):)?(?P<first>\d+(?:\.\d+)?)"
    r"(?(kind)-(?P<last>\d+(?:\.\d+)?))"
)


@dataclass(frozen=True, slots=True)
class Load:
    """A load, named as it is written on the command line.

    Attributes:
        process: `closed` keeps a number of requests in flight; the others are open:
            requests arrive whether or not earlier ones have been answered, evenly
            (`paced`), as a Poisson process, or in bursts (`gamma`).
        kind: `constant`, `ramp`, `spike` (a peak from 40 % to 60 % of the run) or
            `diurnal` (one sine wave that begins and ends at night).
        first: Level at the begin: requests in flight, or arrivals per second.
        last: Level at the end, or at the peak.
        cv: Coefficient of variation of the times between arrivals.
    """

    name: str
    process: str
    kind: str
    first: float
    last: float
    cv: float

    @property
    def is_open(self) -> bool:
        """Whether requests arrive independently of the answers."""
        return self.process != "closed"

    def level(self, part: float) -> float:
        """Return the level at a part of the run, 0 to 1."""
        share = {
            "constant": 0.0,
            "ramp": part,
            "spike": float(_SPIKE_START <= part < _SPIKE_END),
            "diurnal": (1 - math.cos(2 * math.pi * part)) / 2,
        }[self.kind]
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
            "paced:ramp:1-6, gamma=3:spike:1-8, poisson:diurnal:1-8"
        )
    process, kind, first = match["process"], match["kind"], float(match["first"])
    last, cv = float(match["last"] or first), float(match["cv"] or _CVS[process])
    load = Load(text, process, kind or "constant", first, last, cv)
    if max(first, last) <= 0:
        raise ValueError(f"{text!r}: some level must be above 0")
    if process == "gamma" and not 0 < cv <= 10:
        raise ValueError(f"{text!r}: the coefficient of variation must be in (0, 10]")
    if not load.is_open and not (first.is_integer() and last.is_integer()):
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
        itertools.accumulate(_draw_gaps(load.cv, random.Random(seed))),
    )
    return list(map(float, np.interp(list(positions), sums, edges * duration_s)))


def _draw_gaps(cv: float, draw: random.Random) -> Iterator[float]:
    """Draw times between arrivals with mean 1."""
    if cv == 0:
        # Half a gap first: an even process is then centred in the run.
        yield 0.5
    while True:
        # With shape 1 it is exponential: a Poisson process.
        yield draw.gammavariate(1 / cv**2, cv**2) if cv else 1.0
