"""What sampling and judging drafts cost, apart from the target's pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies.estimators.cost_table import CostTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from policies.types import StepTiming


class SamplingCost:
    """Two curves: of steps without drafts, and of those with one or more.

    The first draft of a step brings the rejection sampler, which draws anew over the
    whole vocabulary for every request: 14 ms beside a plain step of 25 with vLLM's own,
    16 requests, 49,152 tokens and a temperature. Part of the target's pass it would be
    spread over all token counts, and whoever always drafts would never learn that a
    plain step is free of it.

    Where no worker times it, the target's pass has it, and here it costs nothing.

    Attributes:
        plain: By requests.
        judged: By requests and drafts.
        is_timed: Whether a step told of it yet.

    Source: ours.
    """

    __slots__ = ("is_timed", "judged", "plain")

    def __init__(self, max_tokens: int, max_reqs: int) -> None:
        """Start from priors, for steps of at most so many tokens and requests."""
        self.plain = CostTable(max_reqs, first_ms=0.3, per_unit_ms=0.02)
        self.judged = CostTable(max_tokens, first_ms=0.3, per_unit_ms=0.02)
        self.is_timed = False

    def predict_ms(
        self, num_reqs: int, num_drafts: NDArray[np.float64] | float
    ) -> NDArray[np.float64]:
        """Return the time in steps of so many requests.

        Args:
            num_reqs: In the step.
            num_drafts: Verified, of any shape; less than one is the share of steps
                with one.
        """
        drafts = np.asarray(num_drafts, dtype=np.float64)
        if not self.is_timed:
            return np.zeros(drafts.shape)
        plain_ms = self.plain.at(num_reqs)
        judged_ms = self.judged.predict(num_reqs + np.maximum(drafts, 1.0))
        return plain_ms + np.minimum(drafts, 1.0) * (judged_ms - plain_ms)

    def predict_range_ms(
        self, num_reqs: int, first: int, num_counts: int
    ) -> NDArray[np.float64]:
        """Do as `predict_ms` for `first`, `first + 1`, ... drafts."""
        costs_ms = np.zeros(num_counts)
        if self.is_timed:
            self.judged.add_range(costs_ms, num_reqs + first)
            if first == 0:
                costs_ms[0] = self.plain.at(num_reqs)
        return costs_ms

    def predict_step_ms(self, timing: StepTiming) -> float:
        """Predict it for a step that has been measured."""
        if timing.sample_ms <= 0:
            return 0.0
        return self._table_of(timing).at(timing.num_reqs + timing.num_drafts)

    def observe(self, timing: StepTiming) -> None:
        """Learn from a step, if it was timed there.

        Not from one of prompts alone: after a long pass sampling finds cold caches, 5
        ms where other plain steps of SmolLM2 take 3, and whoever always drafts sees no
        others. Without one a plain step seems cheap, is tried, and found out.
        """
        if timing.sample_ms > 0 and timing.num_decode_tokens > 0:
            self.is_timed = True
            num_rows = timing.num_reqs + timing.num_drafts
            self._table_of(timing).observe(num_rows, timing.sample_ms)

    def _table_of(self, timing: StepTiming) -> CostTable:
        return self.judged if timing.num_drafts > 0 else self.plain
