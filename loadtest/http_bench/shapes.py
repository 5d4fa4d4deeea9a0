"""How load changes over a run: pure functions of time."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

_SPIKE_START = 0.4
_SPIKE_END = 0.6
"""Parts of the run: long enough before to be steady, long enough after to recover."""

_INTEGRATION_STEPS = 2000


class Shape(Protocol):
    """A level over a run; requests in flight in closed loop, per second in open."""

    @property
    def name(self) -> str:
        """How it is written on the command line."""
        ...

    @property
    def highest(self) -> float:
        """The highest level."""
        ...

    def level(self, part: float) -> float:
        """Return the level at a part of the run, 0 to 1."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same."""

    value: float

    @property
    def name(self) -> str:
        """As written on the command line."""
        return f"{self.value:g}"

    @property
    def highest(self) -> float:
        """The level."""
        return self.value

    def level(self, part: float) -> float:  # noqa: ARG002 - constant
        """Return the level."""
        return self.value


@dataclass(frozen=True, slots=True)
class Ramp:
    """Linear from one level to another."""

    first: float
    last: float

    @property
    def name(self) -> str:
        """As written on the command line."""
        return f"ramp:{self.first:g}-{self.last:g}"

    @property
    def highest(self) -> float:
        """The higher end."""
        return max(self.first, self.last)

    def level(self, part: float) -> float:
        """Return the level at a part of the run."""
        return self.first + (self.last - self.first) * part


@dataclass(frozen=True, slots=True)
class Ladder:
    """Steps of equal length and height."""

    first: float
    last: float
    num_steps: int

    @property
    def name(self) -> str:
        """As written on the command line."""
        return f"ladder:{self.first:g}-{self.last:g}x{self.num_steps}"

    @property
    def highest(self) -> float:
        """The highest step."""
        return max(self.first, self.last)

    def level(self, part: float) -> float:
        """Return the level at a part of the run."""
        step = min(int(part * self.num_steps), self.num_steps - 1)
        return self.first + (self.last - self.first) * step / (self.num_steps - 1)


@dataclass(frozen=True, slots=True)
class Spike:
    """A base, and a peak from 40 % to 60 % of the run."""

    base: float
    peak: float

    @property
    def name(self) -> str:
        """As written on the command line."""
        return f"spike:{self.base:g}-{self.peak:g}"

    @property
    def highest(self) -> float:
        """The peak."""
        return max(self.base, self.peak)

    def level(self, part: float) -> float:
        """Return the level at a part of the run."""
        return self.peak if _SPIKE_START <= part < _SPIKE_END else self.base


@dataclass(frozen=True, slots=True)
class Diurnal:
    """Days as sine waves that begin and end at night."""

    night: float
    noon: float
    num_days: int = 1

    @property
    def name(self) -> str:
        """As written on the command line."""
        return f"diurnal:{self.night:g}-{self.noon:g}x{self.num_days}"

    @property
    def highest(self) -> float:
        """Noon."""
        return max(self.night, self.noon)

    def level(self, part: float) -> float:
        """Return the level at a part of the run."""
        day = (1 - math.cos(2 * math.pi * part * self.num_days)) / 2
        return self.night + (self.noon - self.night) * day


_NUMBER = r"\d+(?:\.\d+)?"
_FORM = re.compile(
    rf"(?:(?P<kind>ramp|ladder|spike|diurnal):(?P<a>{_NUMBER})-(?P<b>{_NUMBER})"
    rf"(?:x(?P<count>\d+))?|(?P<value>{_NUMBER}))"
)
_DEFAULT_NUM_STEPS = 4


def parse_shape(text: str) -> Shape:
    """Read a shape: `8`, `ramp:1-32`, `ladder:4-16x4`, `spike:4-32`, `diurnal:1-8x2`.

    Raises:
        ValueError: If it is none of these, or nothing would ever be sent.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no shape; write 8, ramp:1-32, ladder:4-16x4, spike:4-32 or "
            "diurnal:1-8x2"
        )
    kind, count = match["kind"], match["count"]
    if count is not None and kind not in ("ladder", "diurnal"):
        raise ValueError(f"{text!r}: only ladder and diurnal take a count")
    shape: Shape
    if kind is None:
        shape = Constant(float(match["value"]))
    else:
        first, last = float(match["a"]), float(match["b"])
        if kind == "ladder":
            shape = Ladder(first, last, int(count or _DEFAULT_NUM_STEPS))
            if shape.num_steps < 2:
                raise ValueError(f"{text!r}: a ladder has at least 2 steps")
        elif kind == "diurnal":
            shape = Diurnal(first, last, int(count or 1))
            if shape.num_days < 1:
                raise ValueError(f"{text!r}: takes at least 1 day")
        else:
            shape = (Ramp if kind == "ramp" else Spike)(first, last)
    if shape.highest <= 0:
        raise ValueError(f"{text!r}: some level must be above 0")
    return shape


def cumulate(shape: Shape, duration_s: float) -> tuple[list[float], list[float]]:
    """Integrate a shape over a run.

    Args:
        shape: Level per second.
        duration_s: Length of the run.

    Returns:
        Times and the integral up to each, both ascending. A level that jumps is off by
        at most one part in 2000 of the run.
    """
    width_s = duration_s / _INTEGRATION_STEPS
    times, sums = [0.0], [0.0]
    for number in range(_INTEGRATION_STEPS):
        middle = (number + 0.5) / _INTEGRATION_STEPS
        times.append((number + 1) * width_s)
        sums.append(sums[-1] + shape.level(middle) * width_s)
    return times, sums
