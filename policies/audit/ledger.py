"""What the policy's own steps of the last hour took and emitted, by load."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from policies.audit.block import BlockResult
    from policies.types import StepTiming

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
    all do without speculation. A *pure* step carries no prompt, a *mixed* one does. Of
    times there are two: whole, and without the drafter's passes.

    Attributes:
        tokens: Emitted per request in steps that speculate.
        num_rest: Steps that rest.
        num_rest_pure: Those of them that are pure and were timed.
        num_audited: Steps that an audited block touched.
        audited_tokens: Emitted per request in these.
    """

    num_pure: float = 0.0
    pure_ms: float = 0.0
    pure_target_ms: float = 0.0
    num_mixed: float = 0.0
    mixed_ms: float = 0.0
    mixed_target_ms: float = 0.0
    tokens: float = 0.0
    num_rest: float = 0.0
    rest_ms: float = 0.0
    num_rest_pure: float = 0.0
    rest_pure_ms: float = 0.0
    num_audited: float = 0.0
    audited_ms: float = 0.0
    audited_tokens: float = 0.0

    def add(self, other: Self, sign: float = 1.0) -> None:
        """Add other sums, or take them off."""
        for name in _FIELDS:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))

    @property
    def num_steps(self) -> float:
        """All steps."""
        return self.num_pure + self.num_mixed + self.num_rest + self.num_audited

    @property
    def speculating_ms(self) -> float:
        """Time of steps that speculate."""
        return self.pure_ms + self.mixed_ms


_FIELDS = tuple(one.name for one in fields(LoadSums))


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
    _current: dict[int, LoadSums] = field(default_factory=dict)
    _began_s: float = 0.0

    def add_policy(
        self, timing: StepTiming, ms: float, target_ms: float, tokens: float
    ) -> None:
        """Add a step of the policy's that speculates.

        Args:
            timing: The step's.
            ms: All of it.
            target_ms: Without the drafter's passes.
            tokens: Emitted per request.
        """
        sums = self._sums(timing.num_reqs, ms)
        sums.tokens += tokens
        if timing.num_prefill_tokens:
            sums.num_mixed += 1
            sums.mixed_ms += ms
            sums.mixed_target_ms += target_ms
        else:
            sums.num_pure += 1
            sums.pure_ms += ms
            sums.pure_target_ms += target_ms

    def add_untimed(self, num_reqs: int, tokens: float) -> None:
        """Add a step of the policy's that nobody timed, as dear as those before it.

        The engine fell asleep after it: with few requests that happens often.
        """
        usual = self._sums(num_reqs, 0.0)
        if usual.num_pure:
            ms = usual.pure_ms / usual.num_pure
            self.now_s += 1e-3 * ms
            usual.pure_target_ms *= 1.0 + 1.0 / usual.num_pure
            usual.pure_ms += ms
            usual.num_pure += 1
            usual.tokens += tokens

    def add_rest(self, timing: StepTiming, ms: float, count: int) -> None:
        """Add `count` steps that rest, one of which was timed."""
        sums = self._sums(timing.num_reqs, count * ms)
        sums.num_rest += count
        sums.rest_ms += count * ms
        if not timing.num_prefill_tokens:
            sums.num_rest_pure += count
            sums.rest_pure_ms += count * ms

    def add_audited(self, num_reqs: int, ms: float, tokens: float) -> None:
        """Add a step that a block touched."""
        sums = self._sums(num_reqs, ms)
        sums.num_audited += 1
        sums.audited_ms += ms
        sums.audited_tokens += tokens

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
