"""What load is put on an endpoint: an arrival process and a shape."""

from __future__ import annotations

import bisect
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .shapes import Shape, cumulate, parse_shape

Process = Literal["closed", "paced", "poisson", "gamma"]

_FORM = re.compile(
    r"(?P<process>closed|paced|poisson|gamma)(?:=(?P<cv>[\d.]+))?:(?P<shape>.+)"
)
DEFAULT_GAMMA_CV = 2.0


@dataclass(frozen=True, slots=True)
class Load:
    """A load.

    Attributes:
        process: `closed` keeps a number of requests in flight; the others are open:
            requests arrive whether or not earlier ones have been answered, evenly
            (`paced`), as a Poisson process, or in bursts (`gamma`).
        shape: Requests in flight, or arrivals per second.
        cv: Coefficient of variation of the times between arrivals: 0 even, 1 Poisson,
            above 1 in bursts.
    """

    process: Process
    shape: Shape
    cv: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether requests arrive independently of the answers."""
        return self.process != "closed"

    @property
    def name(self) -> str:
        """How it is written on the command line."""
        process: str = self.process
        if process == "gamma":
            process += f"={self.cv:g}"
        return f"{process}:{self.shape.name}"

    @property
    def unit(self) -> str:
        """What the level counts."""
        return "requests/s" if self.is_open else "requests in flight"


def parse_load(text: str) -> Load:
    """Read a load, e.g. `closed:8`, `poisson:2.5`, `gamma=3:spike:1-8`.

    Raises:
        ValueError: If it is no load, or one that makes no sense.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no load; write PROCESS:SHAPE, e.g. closed:8, poisson:2.5, "
            "paced:ramp:1-6, gamma=3:spike:1-8"
        )
    process, shape = match["process"], parse_shape(match["shape"])
    if match["cv"] is not None and process != "gamma":
        raise ValueError(f"{text!r}: only gamma takes a coefficient of variation")
    if process == "closed":
        if any(not _is_whole(n) for n in _numbers(shape)):
            raise ValueError(f"{text!r}: requests in flight are whole numbers")
        return Load("closed", shape)
    if process == "paced":
        return Load("paced", shape)
    if process == "poisson":
        return Load("poisson", shape, cv=1.0)
    cv = float(match["cv"] or DEFAULT_GAMMA_CV)
    if not 0 < cv <= 10:
        raise ValueError(f"{text!r}: the coefficient of variation must be in (0, 10]")
    return Load("gamma", shape, cv)


def arrival_times(load: Load, duration_s: float, seed: str) -> Iterator[float]:
    """Yield the times at which requests of an open load arrive.

    Unit-rate renewal times are mapped through the inverse of the shape's integral. So
    the mean rate follows the shape at every moment, whatever the process.

    Args:
        load: An open load.
        duration_s: Length of the run.
        seed: Equal seeds give equal times.

    Yields:
        Seconds since the begin, ascending, below `duration_s`.
    """
    draw = random.Random(seed)
    times, sums = cumulate(load.shape, duration_s)
    # Half a gap first: an even process is then centred in the run.
    position = 0.5 * _gap(load, draw) if load.process == "paced" else _gap(load, draw)
    while position < sums[-1]:
        index = bisect.bisect_right(sums, position)
        width = sums[index] - sums[index - 1]
        part = (position - sums[index - 1]) / width
        yield times[index - 1] + part * (times[index] - times[index - 1])
        position += _gap(load, draw)


def _gap(load: Load, draw: random.Random) -> float:
    """Draw a time between arrivals with mean 1."""
    if load.cv == 0:
        return 1.0
    if load.process == "poisson":
        return draw.expovariate(1.0)
    alpha = 1 / load.cv**2
    return draw.gammavariate(alpha, 1 / alpha)


def users_at(load: Load, part: float) -> int:
    """Return how many requests a closed load keeps in flight at a part of the run."""
    return max(0, math.floor(load.shape.level(min(max(part, 0.0), 1.0)) + 0.5))


def _numbers(shape: Shape) -> tuple[float, ...]:
    return shape.level(0.0), shape.highest


def _is_whole(number: float) -> bool:
    return number == int(number)
