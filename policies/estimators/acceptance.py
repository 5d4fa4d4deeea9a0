"""Acceptance probabilities: from what a drafter reports, or from outcomes alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.estimators.state import read_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from policies.types import VerificationOutcome

PRIOR_ACCEPTANCE = 0.5
PRIOR_WEIGHT = 4.0
"""The prior counts as this many observed tokens: enough to keep the first outcomes
from deciding everything, few enough to be overruled within one batch."""

FORGETTING = 0.995
"""Per-step decay of old outcomes: a memory of about 200 steps that verify."""

MOST_TOKENS = 1e7
"""Observed at a position within that memory, by more requests than any engine runs."""


@dataclass(slots=True)
class PositionAcceptance:
    """Learn one acceptance probability per draft position from outcomes.

    For ngram and suffix drafts, which come without logits: every request gets the
    same estimate, so selection prefers shallow positions, and a request with few
    matching drafts leaves its share to the others.

    Before the first outcome every position stands at `prior`. The estimate
    is the same for all requests and frozen while a block is drafted, so it never
    depends on a drawn token.

    Source: ours (Beta-Bernoulli mean with exponential forgetting; observation is
    censored at the first rejection).
    """

    max_depth: int
    prior: float = PRIOR_ACCEPTANCE
    _accepted: NDArray[np.float64] = field(init=False)
    _observed: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        """Start every position from the prior."""
        if self.max_depth < 1:
            raise ValueError(f"max_depth must be >= 1, got {self.max_depth}")
        self._accepted = np.zeros(self.max_depth)
        self._observed = np.zeros(self.max_depth)

    def estimate(self) -> NDArray[np.float64]:
        """Return acceptance given that everything before was accepted.

        Returns:
            `[max_depth]`, float64, strictly between 0 and 1.
        """
        accepted = self._accepted + self.prior * PRIOR_WEIGHT
        mean: NDArray[np.float64] = accepted / (self._observed + PRIOR_WEIGHT)
        return mean

    def export_state(self) -> dict[str, Any]:
        """Return what was learnt as plain values."""
        return {
            "accepted": self._accepted.tolist(),
            "observed": self._observed.tolist(),
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from another engine's `export_state`.

        Raises:
            ValueError: If it was learnt at another depth, or cannot be true; nothing
                has changed then.
        """
        depth = self.max_depth
        accepted = read_array(state, "accepted", size=depth, most=MOST_TOKENS)
        observed = read_array(state, "observed", size=depth, most=MOST_TOKENS)
        if (accepted > observed).any():
            raise ValueError("state's 'accepted' must not exceed 'observed'")
        self._accepted, self._observed = accepted, observed

    def observe(self, outcome: VerificationOutcome) -> None:
        """Learn from one step; positions behind the first rejection teach nothing.

        Nor is anything forgotten in a step that verified nothing.

        Args:
            outcome: Verified and accepted counts of the step. Positions past
                `max_depth` are ignored.
        """
        if not outcome.num_verified.any():
            return
        observed, accepted = split_observed(
            outcome.num_verified, outcome.num_accepted, self.max_depth
        )
        self._accepted *= FORGETTING
        self._observed *= FORGETTING
        self._accepted += accepted.sum(axis=0)
        self._observed += observed.sum(axis=0)


def split_observed(
    num_verified: NDArray[np.int64], num_accepted: NDArray[np.int64], max_depth: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Tell which draft positions taught something, and which of them were accepted.

    A position was observed if it was verified and everything before it accepted; what
    a budget trimmed or a rejection hid is censored, not rejected.

    Args:
        num_verified: `[num_reqs]`.
        num_accepted: `[num_reqs]`, <= `num_verified`.
        max_depth: Columns of the result.

    Returns:
        Observed and accepted, both `[num_reqs, max_depth]`; accepted implies observed.
    """
    position = np.arange(max_depth)
    accepted = position < num_accepted[:, None]
    observed = (position < num_verified[:, None]) & (position <= num_accepted[:, None])
    return observed, accepted & observed
