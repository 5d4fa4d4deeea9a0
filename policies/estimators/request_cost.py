"""What a step costs by its requests and prompt tokens, whatever the policy.

Coarser than `step_cost`, which knows of drafts and context: a router asks what one more
request costs a replica as it is run now, and asks it of engines without a planner too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from policies.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LEVEL_WANDER: Final = 0.02
"""Relative change of all costs at once from step to step, as a neighbour brings."""

_OWN_WANDER: Final = 0.003
"""Relative change of each cost by itself."""

_NOISE: Final = 0.15
"""Relative error of one step's time."""

_LONGEST_STEP_MS: Final = 1e7

_MAX_SURPRISE: Final = 3.0
"""Standard deviations that one step may count for: some wait for something else."""

_MAX_DOUBT: Final = 2.0
"""Standard deviation of a cost, over the cost: what is never seen is not forgotten."""

_ACCEPTANCE_STEPS: Final = 100.0
"""Request-steps over which tokens per step are averaged."""


class RequestCost:
    """Learns `base + request * num_requests + prompt_token * num_prompt_tokens`, ms.

    A Kalman filter over the three costs. They wander together, so that a replica whose
    load never changes follows its neighbours' noise without forgetting how cost grows
    with load.

    Attributes:
        tokens_per_step: Of each request and step, accepted drafts included.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        # Compiled before the first step waits for it.
        self.tokens_per_step = follow_tokens(1.0, 1, 0)
        self._costs: NDArray[np.float64] | None = None
        self._covariance = np.zeros((3, 3))

    @property
    def costs_ms(self) -> tuple[float, float, float] | None:
        """The three costs, None before the first step."""
        if self._costs is None:
            return None
        base, request, prompt_token = self._costs.tolist()
        return base, request, prompt_token

    def observe_step(
        self, step_ms: float, num_requests: int, num_prompt_tokens: int = 0
    ) -> None:
        """Learn from one step's time; nothing from one that cannot be true.

        Args:
            step_ms: Its time.
            num_requests: In it, >= 1.
            num_prompt_tokens: Computed in it.
        """
        if not (0 < step_ms < _LONGEST_STEP_MS and num_requests > 0):
            return
        shares = np.array([1.0, num_requests, num_prompt_tokens])
        if self._costs is None:
            request_ms = 0.5 * step_ms / (num_requests + num_prompt_tokens)
            self._costs = np.array([0.5 * step_ms, request_ms, request_ms])
            self._covariance = np.diag(self._costs**2)
            return
        self._drift()
        expected_ms = float(shares @ self._costs)
        noise = (_NOISE * max(expected_ms, 1e-6)) ** 2
        spread = self._covariance @ shares
        variance = float(shares @ spread) + noise
        limit = _MAX_SURPRISE * math.sqrt(variance)
        surprise = min(max(step_ms - expected_ms, -limit), limit)
        gain = spread / variance
        self._costs = np.maximum(self._costs + gain * surprise, 1e-9 * expected_ms)
        # Joseph's form: it stays positive semi-definite whatever the rounding.
        keep = np.eye(3) - np.outer(gain, shares)
        self._covariance = keep @ self._covariance @ keep.T
        self._covariance += noise * np.outer(gain, gain)

    def observe_tokens(self, num_requests: int, num_accepted: int) -> None:
        """Learn from what a step's requests put out.

        Args:
            num_requests: That put out at least one token.
            num_accepted: Draft tokens accepted among them.
        """
        if num_requests > 0 and num_accepted >= 0:
            self.tokens_per_step = follow_tokens(
                self.tokens_per_step, num_requests, num_accepted
            )

    def _drift(self) -> None:
        costs = self._costs
        assert costs is not None
        self._covariance += _LEVEL_WANDER**2 * np.outer(costs, costs)
        self._covariance += np.diag((_OWN_WANDER * costs) ** 2)
        deviation = np.sqrt(np.maximum(np.diag(self._covariance), 0.0))
        largest = _MAX_DOUBT * np.maximum(costs, 1e-3 * costs.max())
        shrink = np.minimum(1.0, largest / np.maximum(deviation, 1e-300))
        self._covariance *= np.outer(shrink, shrink)


@compiled
def follow_tokens(
    tokens_per_step: float, num_requests: int, num_accepted: int
) -> float:
    """Return the mean tokens per request and step after one more step.

    Args:
        tokens_per_step: Before it.
        num_requests: That put out at least one token, >= 1.
        num_accepted: Draft tokens accepted among them, >= 0.
    """
    weight = min(1.0, num_requests / _ACCEPTANCE_STEPS)
    seen = 1.0 + num_accepted / num_requests
    return tokens_per_step + weight * (seen - tokens_per_step)
