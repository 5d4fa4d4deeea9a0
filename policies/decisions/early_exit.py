"""When to end a draft: after a pass that leaves too little worth drafting on for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policies.compiled import compiled
from policies.estimators.logit import log_odds_of, probability_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from policies.types import AcceptanceScale


@dataclass(frozen=True, slots=True)
class EarlyExitRule:
    """What a further drafter pass must promise; asked between passes by the engine.

    The depth plan looks at recent drafts; this looks at the very ones being drawn. A
    pass drafts for the whole batch, so it is worth the sum of what each request may
    still gain. Survival never rises along a request: once a pass does not pay, no
    later one will.

    It reads confidences of positions already drafted, never of the next: whether a
    position is drafted depends on its prefix alone, and sampled drafts stay lossless.

    Attributes:
        req_ids: `[num_reqs]`, whose drafts can be of use, and whom `scale.effect` and
            `weights` are about; others in the drafter's batch gain nothing.
        scale: How confidence becomes acceptance.
        max_depth: Passes there can be.
        next_acceptance: `[num_samples]`, 0-1, what the acceptance of the next position
            may turn out to be. A sample, not its mean: a draft that turns out badly
            is not verified, so that only the good outcomes count.
        pass_price: Tokens that pay for the time of one more pass.
        token_price: Tokens that pay for the time of verifying one.
        weights: `[num_reqs]`, mean 1, what a token of each is worth; None for all 1.

    Source: ours. Stopping rules on the drafter's confidence are known for single
    requests (arXiv 2405.04304); the price of a pass over a batch is not theirs.
    """

    req_ids: tuple[Hashable, ...]
    scale: AcceptanceScale
    max_depth: int
    next_acceptance: NDArray[np.float64]
    pass_price: float
    token_price: float
    weights: NDArray[np.float64] | None = None

    def start(self, req_ids: tuple[Hashable, ...]) -> EarlyExit:
        """Begin a draft of these requests, in the order of the drafter's batch."""
        effect = self.scale.effect
        weights = np.ones(effect.size) if self.weights is None else self.weights
        if req_ids == self.req_ids:
            return EarlyExit(self, effect, weights.copy())
        # Lists: of a few requests each operation on arrays takes longer than all this.
        row_of = {req_id: row for row, req_id in enumerate(self.req_ids)}
        rows = [row_of.get(req_id, -1) for req_id in req_ids]
        # One more entry stands for the others.
        effects, own = [*effect.tolist(), 0.0], [*weights.tolist(), 0.0]
        return EarlyExit(
            self,
            np.array([effects[row] for row in rows]),
            np.array([own[row] for row in rows]),
        )


@dataclass(slots=True)
class EarlyExit:
    """One draft of a batch, pass by pass.

    Attributes:
        rule: When to end it.
        effect: `[num_reqs]`, log-odds of each request's own.
        weighted_survival: `[num_reqs]`, weight times predicted survival of the latest
            position.
        num_passes: Seen so far.
    """

    rule: EarlyExitRule
    effect: NDArray[np.float64]
    weighted_survival: NDArray[np.float64]
    num_passes: int = 0

    def should_continue(
        self, confidence: list[float], ended: list[int] | None = None
    ) -> bool:
        """Take in a pass and tell whether the next one is worth its time.

        Args:
            confidence: `[num_reqs]`, 0-1, of the position just drafted.
            ended: Rows that nothing can follow: they drew a stop token.

        Raises:
            ValueError: If there is not one confidence for each request.
        """
        if len(confidence) != self.weighted_survival.size:
            raise ValueError(
                f"{len(confidence)} confidences for "
                f"{self.weighted_survival.size} requests"
            )
        rule, position = self.rule, self.num_passes
        self.num_passes += 1
        if self.num_passes >= rule.max_depth:
            return False
        for row in ended or ():
            self.weighted_survival[row] = 0.0
        gained = _take_in_pass(
            self.weighted_survival,
            np.array(confidence),
            self.effect,
            rule.scale.slope,
            rule.scale.intercept[position],
            rule.next_acceptance,
            rule.token_price,
        )
        return bool(gained > rule.pass_price)


@compiled
def _take_in_pass(
    weighted_survival: NDArray[np.float64],
    confidence: NDArray[np.float64],
    effect: NDArray[np.float64],
    slope: float,
    intercept: float,
    next_acceptance: NDArray[np.float64],
    token_price: float,
) -> float:
    """Take a pass into the survivals, in place; return what the next may gain."""
    for row in range(weighted_survival.size):
        log_odds = slope * log_odds_of(confidence[row]) + intercept + effect[row]
        weighted_survival[row] *= probability_of(log_odds)
    return expect_gain(weighted_survival, next_acceptance, token_price)


@compiled
def expect_gain(
    weighted_survival: NDArray[np.float64],
    next_acceptance: NDArray[np.float64],
    token_price: float,
) -> float:
    """Return the tokens that one more pass may gain, less the verifying of them.

    Args:
        weighted_survival: `[num_reqs]`, of the latest position.
        next_acceptance: `[num_samples]`, 0-1, >= 1 of them.
        token_price: As in `EarlyExitRule`.
    """
    gained = 0.0
    for survival in weighted_survival:
        for acceptance in next_acceptance:
            gained += max(survival * acceptance - token_price, 0.0)
    return gained / next_acceptance.size
