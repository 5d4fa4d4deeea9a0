"""What the policy's own steps of the last hour took and emitted, by load."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from policies.audit.block import BlockResult, SeenStep

WINDOW_S = 3600.0
"""Of the engine's own time: while it sleeps nothing grows old."""

SLICE_S = 60.0

MAX_BLOCKS = 4096
"""Kept at most, of an hour; a faster engine forgets earlier."""


def bucket_of(num_reqs: int) -> int:
    """Return the class of a load: each number up to 8, then quarters of an octave."""
    return num_reqs if num_reqs < 8 else int(4 * math.log2(num_reqs)) - 4


@dataclass(slots=True)
class LoadSums:
    """Sums over steps of one load.

    A step of the policy's *speculates* if it drafts or verifies; else it *rests*, as
    all do without speculation.

    Attributes:
        num: Steps that speculate, and what they took, emitted per request, and carried.
        num_rest: Steps that rest, likewise.
        num_audited: Steps that an audited block touched, likewise.
        width, width_squares: Tokens of the target's pass in steps that speculate: of
            requests, drafts and prompts; for the slopes.
        target_ms, width_target: Without the drafter's passes, and times `width`.
        first_ms, width_first: The drafter's first pass, likewise.
    """

    num: float = 0.0
    ms: float = 0.0
    tokens: float = 0.0
    num_prompt: float = 0.0
    num_rest: float = 0.0
    rest_ms: float = 0.0
    num_rest_prompt: float = 0.0
    num_audited: float = 0.0
    audited_ms: float = 0.0
    audited_tokens: float = 0.0
    width: float = 0.0
    width_squares: float = 0.0
    target_ms: float = 0.0
    width_target: float = 0.0
    first_ms: float = 0.0
    width_first: float = 0.0

    def add(self, other: Self, sign: float = 1.0) -> None:
        """Add other sums, or take them off."""
        for name in _FIELDS:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))

    @property
    def num_steps(self) -> float:
        """All steps."""
        return self.num + self.num_rest + self.num_audited

    def expect_target_ms(self, width: float, slope: float) -> float:
        """Return what a pass over so many tokens took on the average of all.

        Args:
            width: Tokens of the target's pass.
            slope: Ms of one more.
        """
        return (self.target_ms + slope * (self.num * width - self.width)) / self.num

    def slopes(self) -> tuple[float, float]:
        """Return the ms of one more token in the target's pass, and in the drafter's.

        By least squares. Drafts and prompts are taken together: where few requests run,
        a step has either one or the other.
        """
        if not self.num:
            return 0.0, 0.0
        spread = self.width_squares - self.width**2 / self.num
        if spread < 1e-6 * self.width_squares or spread <= 0.0:
            return 0.0, 0.0
        target = self.width_target - self.width * self.target_ms / self.num
        first = self.width_first - self.width * self.first_ms / self.num
        return max(0.0, target / spread), max(0.0, first / spread)


_FIELDS = tuple(one.name for one in fields(LoadSums))
_FITTED = _FIELDS[_FIELDS.index("width") :]


@dataclass(slots=True)
class Ledger:
    """Sums by load, and results of blocks, of the last hour of the engine's time.

    Attributes:
        now_s: The engine's own time.
        blocks: In order of time.
    """

    now_s: float = 0.0
    blocks: deque[BlockResult] = field(default_factory=lambda: deque(maxlen=MAX_BLOCKS))
    _slices: deque[tuple[float, dict[int, LoadSums]]] = field(default_factory=deque)
    _closed: dict[int, LoadSums] = field(default_factory=dict)
    _ever: dict[int, LoadSums] = field(default_factory=dict)
    _current: dict[int, LoadSums] = field(default_factory=dict)
    _began_s: float = 0.0

    def add_policy(self, step: SeenStep, first_ms: float) -> None:
        """Add a step of the policy's that speculates.

        Args:
            step: What it took and brought.
            first_ms: The drafter's first pass.
        """
        sums = self._sums(step.num_reqs, step.ms)
        width = step.width
        sums.num += 1
        sums.ms += step.ms
        sums.tokens += step.tokens
        sums.num_prompt += step.num_prompt
        sums.width += width
        sums.width_squares += width * width
        sums.target_ms += step.target_ms
        sums.width_target += width * step.target_ms
        sums.first_ms += first_ms
        sums.width_first += width * first_ms

    def add_untimed(self, num_reqs: int, tokens: float) -> None:
        """Add a step of the policy's that nobody timed, as dear as those before it.

        The engine fell asleep after it: with few requests that happens often.
        """
        sums = self._sums(num_reqs, 0.0)
        if sums.num:
            ms = (sums.ms - sum(sums.slopes()) * sums.num_prompt) / sums.num
            # Steps that were fitted are one in `num`: their mean stays.
            for name in _FITTED:
                value = getattr(sums, name)
                setattr(sums, name, value + value / sums.num)
            self.now_s += 1e-3 * ms
            sums.num += 1
            sums.ms += ms
            sums.tokens += tokens

    def add_rest(self, step: SeenStep, count: int) -> None:
        """Add `count` steps that rest, one of which was timed."""
        ms = count * step.ms
        sums = self._sums(step.num_reqs, ms)
        sums.num_rest += count
        sums.rest_ms += ms
        sums.num_rest_prompt += step.num_prompt

    def add_audited(self, step: SeenStep) -> None:
        """Add a step that a block touched."""
        sums = self._sums(step.num_reqs, step.ms)
        sums.num_audited += 1
        sums.audited_ms += step.ms
        sums.audited_tokens += step.tokens

    def since_start(self, num_reqs: int) -> dict[int, LoadSums]:
        """Return sums of all steps since the start, at loads of an octave."""
        first = 1 << (num_reqs.bit_length() - 1)
        buckets = range(bucket_of(first), bucket_of(2 * first - 1) + 1)
        sums: dict[int, LoadSums] = {}
        for loads in (self._ever, self._current):
            _add_all(sums, {n: loads[n] for n in buckets if n in loads})
        return sums

    def total(self) -> dict[int, LoadSums]:
        """Return the sums of the last hour by class of load."""
        total: dict[int, LoadSums] = {}
        _add_all(total, self._closed)
        _add_all(total, self._current)
        return total

    def forget_old(self) -> None:
        """Drop what is older than an hour."""
        oldest_s = self.now_s - WINDOW_S
        while self._slices and self._slices[0][0] < oldest_s:
            _add_all(self._closed, self._slices.popleft()[1], -1.0)
        while self.blocks and self.blocks[0].at_s < oldest_s:
            self.blocks.popleft()

    def _sums(self, num_reqs: int, ms: float) -> LoadSums:
        self.now_s += 1e-3 * ms
        if self.now_s - self._began_s > SLICE_S:
            self._slices.append((self.now_s, self._current))
            _add_all(self._closed, self._current)
            _add_all(self._ever, self._current)
            self._current, self._began_s = {}, self.now_s
            self.forget_old()
        bucket = bucket_of(num_reqs)
        sums = self._current.get(bucket)
        if sums is None:
            sums = self._current[bucket] = LoadSums()
        return sums


def _add_all(
    total: dict[int, LoadSums], loads: dict[int, LoadSums], sign: float = 1.0
) -> None:
    for bucket, sums in loads.items():
        total.setdefault(bucket, LoadSums()).add(sums, sign)
