"""Loads: when requests arrive, how long they are, and how easy to draft for."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .drawn import Drawn
from .readers import number
from .sessions import Sessions, lay_out
from .state import Floats, Ints
from .traces import read_trace

SHIFT_AT = 0.5
"""Part of the requests after which the share of hard ones is another."""

_CURVE_POINTS = 2001
_LEAD = 5
"""Mean lengths of a session by which sessions begin before the first request."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process."""

    cv: float = 1.0  # coefficient of variation of the times between; 1 for Poisson
    # Rate at the peak over that at night, in one sine wave over the run; 1 for a
    # constant rate.
    swing: float = 1.0

    def draw(
        self, num_requests: int, rate_per_s: float, rng: np.random.Generator
    ) -> Floats:
        """Draw when requests arrive, s, `[num_requests]`, rising.

        Renewal times of unit rate are mapped through the inverse of the rate's
        integral, so the rate follows its wave whatever the process. The mean rate over
        the run is `rate_per_s`.
        """
        shape = self.cv**-2
        due = np.cumsum(rng.gamma(shape, 1.0 / shape, num_requests))
        duration_s = num_requests / rate_per_s
        if self.swing == 1.0:
            return np.asarray(due / rate_per_s, dtype=np.float64)
        part = np.linspace(0.0, 1.0, _CURVE_POINTS)
        # The integral of 1 - depth cos, from night to night.
        depth = (self.swing - 1.0) / (self.swing + 1.0)
        share = part - depth * np.sin(2 * np.pi * part) / (2 * np.pi)
        whole, rest = np.divmod(due / num_requests, 1.0)
        return np.asarray(duration_s * (whole + np.interp(rest, share, part)))


def parse_arrivals(text: str) -> Arrivals:
    """Read an arrival process, e.g. `poisson`, `gamma=3` (bursts), `diurnal=4`.

    Raises:
        ArgumentTypeError: If it is none.
    """
    process, _, value = text.partition("=")
    if process == "gamma":
        return Arrivals(cv=number(0.1, 10)(value or "2"))
    if process == "diurnal":
        return Arrivals(swing=number(1, 1000)(value or "4"))
    if text != "poisson":
        raise ArgumentTypeError(
            f"{text!r} is no load; write poisson, gamma=CV (bursts; CV 2 by default) "
            "or diurnal=SWING (peak over night; 4)"
        )
    return Arrivals()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal numbers of tokens: the mean, and how heavy the tail is."""

    mean: float  # tokens, >= 1
    cv: float  # coefficient of variation; 0 gives all the same length

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """Draw lengths, `[count]`, >= 1; rounded, which keeps the mean."""
        variance = np.log1p(self.cv**2)
        drawn = rng.lognormal(
            np.log(self.mean) - variance / 2, np.sqrt(variance), count
        )
        return np.asarray(np.maximum(1, np.rint(drawn)), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Load:
    """What a fleet is to serve."""

    arrivals: Arrivals = Arrivals()
    prompt: Lengths = Lengths(300, 1)  # tokens of prompts
    output: Lengths = Lengths(200, 1)  # tokens of replies
    hard_before: float = 0.5  # share of hard requests in the first half, 0 to 1
    hard_after: float = 0.5  # in the second half
    trace: str = ""  # file that says when and how long instead
    sessions: Sessions | None = None  # to which requests belong; None for no two

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn.

        Raises:
            ValueError: If sessions are to begin with a day's wave.
        """
        if self.sessions and self.arrivals.swing != 1.0:
            raise ValueError("--sessions begin at a steady rate: leave out diurnal")

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt; those of sessions carry all turns before."""
        if self.sessions is None:
            return self.prompt.mean
        before = (self.sessions.turns - 1) * (self.prompt.mean + self.output.mean)
        return self.sessions.system_tokens + before + self.prompt.mean

    @property
    def kind_shares(self) -> tuple[float, float]:
        """Share of each of `KINDS` over the run."""
        hard = SHIFT_AT * self.hard_before + (1 - SHIFT_AT) * self.hard_after
        return 1.0 - hard, hard


def read_load(path: Path, hard_before: float, hard_after: float) -> Load:
    """Return the load of a trace file.

    Raises:
        ValueError: If it is none.
    """
    found = read_trace(path)
    prompt, output = (
        Lengths(float(tokens.mean()), float(tokens.std() / tokens.mean()))
        for tokens in (found.num_prompt_tokens, found.num_output_tokens)
    )
    return Load(Arrivals(), prompt, output, hard_before, hard_after, str(path))


def find_own_rate(load: Load, num_requests: int) -> float:
    """Return the requests a second of a load's trace.

    Raises:
        ValueError: If it has fewer requests, or all of them come at once.
    """
    arrival_s = read_trace(Path(load.trace)).arrival_s
    if num_requests > arrival_s.size:
        raise ValueError(f"{load.trace} has {arrival_s.size} requests: take fewer")
    last_s = float(arrival_s[num_requests - 1])
    # The first tenth is not measured.
    if num_requests > 1 and arrival_s[num_requests // 10] == last_s:
        raise ValueError(f"{load.trace}: {num_requests} requests come at once")
    return num_requests / max(last_s, 1e-9)


def draw_requests(load: Load, num_requests: int, rate_per_s: float, seed: int) -> Drawn:
    """Draw requests; equal seeds give equal ones.

    The parts have generators of their own: another arrival process or rate keeps the
    lengths and kinds. Prompts of sessions are what each turn adds.
    """
    when, prompt, output, hard, number_of, gap = (
        np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(6)
    )
    sessions, count = load.sessions, num_requests
    if sessions:
        # They begin as requests would.
        duration_s = num_requests / rate_per_s
        lead_s = _LEAD * sessions.turns * sessions.think_s
        starts_per_s = rate_per_s / sessions.turns
        count = int(1.2 * starts_per_s * (duration_s + lead_s)) + 100
        begin_s = load.arrivals.draw(count, starts_per_s, when) - lead_s
        is_late = begin_s >= SHIFT_AT * duration_s
    else:
        is_late = np.arange(count) >= SHIFT_AT * count
    share = np.where(is_late, load.hard_after, load.hard_before)
    kind = (hard.random(count) < share).astype(np.int64)
    if sessions:
        num_turns = number_of.geometric(1.0 / sessions.turns, count)
        total = int(num_turns.sum())
        lengths = load.prompt.draw(total, prompt), load.output.draw(total, output)
        found = lay_out(sessions, begin_s, kind, num_turns, *lengths, gap)
        return found.first(num_requests)
    if load.trace:
        # As Splitwise rescales it: the same bursts at another rate.
        stretch = find_own_rate(load, num_requests) / rate_per_s
        found = read_trace(Path(load.trace)).first(num_requests)
        return replace(found, arrival_s=stretch * found.arrival_s, kind=kind)
    return Drawn(
        load.arrivals.draw(num_requests, rate_per_s, when),
        load.prompt.draw(num_requests, prompt),
        load.output.draw(num_requests, output),
        kind,
    )
