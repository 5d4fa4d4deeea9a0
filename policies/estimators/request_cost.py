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
        self._costs: NDArray[np.float64] | None = None
        self._covariance = np.zeros((3, 3))
        # Compiled before the first step waits for it.
        self.tokens_per_step = follow_tokens(1.0, 1, 0)
        follow_costs(np.ones(3), np.eye(3), 1.0, 1, 0)

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
        if self._costs is None:
            request_ms = 0.5 * step_ms / (num_requests + num_prompt_tokens)
            self._costs = np.array([0.5 * step_ms, request_ms, request_ms])
            self._covariance = np.diag(self._costs**2)
            return
        follow_costs(
            self._costs, self._covariance, step_ms, num_requests, num_prompt_tokens
        )

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


@compiled
def follow_costs(
    costs: NDArray[np.float64],
    covariance: NDArray[np.float64],
    step_ms: float,
    num_requests: int,
    num_prompt_tokens: int,
) -> None:
    """Learn from one more step, in place.

    Args:
        costs: Of a step, a request and a prompt token, ms; `[3]`, > 0.
        covariance: Of their errors; `[3, 3]`.
        step_ms: The step's time, > 0.
        num_requests: In it, >= 1.
        num_prompt_tokens: Computed in it, >= 0.
    """
    _drift(costs, covariance)
    shares = (1.0, float(num_requests), float(num_prompt_tokens))
    gain, keep, kept = np.zeros(3), np.zeros((3, 3)), np.zeros((3, 3))
    expected_ms = variance = 0.0
    for i in range(3):
        expected_ms += shares[i] * costs[i]
        for j in range(3):
            gain[i] += covariance[i, j] * shares[j]
        variance += shares[i] * gain[i]
    noise = (_NOISE * max(expected_ms, 1e-6)) ** 2
    variance += noise
    limit = _MAX_SURPRISE * math.sqrt(variance)
    surprise = min(max(step_ms - expected_ms, -limit), limit)
    for i in range(3):
        gain[i] /= variance
        costs[i] = max(costs[i] + gain[i] * surprise, 1e-9 * expected_ms)
        for j in range(3):
            keep[i, j] = (i == j) - gain[i] * shares[j]
    # Joseph's form: it stays positive semi-definite whatever the rounding.
    for i in range(3):
        for j in range(3):
            for k in range(3):
                kept[i, j] += keep[i, k] * covariance[k, j]
    for i in range(3):
        for j in range(3):
            covariance[i, j] = noise * gain[i] * gain[j]
            for k in range(3):
                covariance[i, j] += kept[i, k] * keep[j, k]


@compiled
def _drift(costs: NDArray[np.float64], covariance: NDArray[np.float64]) -> None:
    """Let the costs wander for a step, in place; arguments as of `follow_costs`."""
    shrink = np.empty(3)
    smallest = 1e-3 * max(costs[0], costs[1], costs[2])
    for i in range(3):
        for j in range(3):
            covariance[i, j] += _LEVEL_WANDER**2 * costs[i] * costs[j]
        covariance[i, i] += (_OWN_WANDER * costs[i]) ** 2
        deviation = math.sqrt(max(covariance[i, i], 0.0))
        largest = _MAX_DOUBT * max(costs[i], smallest)
        shrink[i] = min(1.0, largest / max(deviation, 1e-300))
    for i in range(3):
        for j in range(3):
            covariance[i, j] *= shrink[i] * shrink[j]


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
