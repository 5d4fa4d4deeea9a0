"""When to end a draft: after a pass that leaves too little worth drafting on for."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING

import numpy as np

from policies.calibration import LEAST_PROBABILITY, to_log_odds, to_probability

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from policies.batch import AcceptanceScale

FEW_ROWS = 4
"""Batches up to this size are looked at in plain floats."""


@dataclass(frozen=True, slots=True)
class DraftStop:
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

    def follow(self, req_ids: tuple[Hashable, ...]) -> DraftWatch | FewRowsWatch:
        """Begin a draft of these requests, in the order of the drafter's batch."""
        row_of = {req_id: row for row, req_id in enumerate(self.req_ids)}
        rows = [row_of.get(req_id, -1) for req_id in req_ids]
        weights = np.ones(len(self.req_ids)) if self.weights is None else self.weights
        # One more entry stands for the others.
        effect = np.append(self.scale.effect, 0.0)[rows]
        worth = np.append(weights, 0.0)[rows]
        offset = self.scale.intercept[:, None] + effect
        if worth.size <= FEW_ROWS:
            return FewRowsWatch(self, offset.tolist(), worth.tolist())
        return DraftWatch(self, offset, worth)


@dataclass(slots=True)
class DraftWatch:
    """One draft of a batch, pass by pass.

    Attributes:
        stop: The rule.
        offset: `[max_depth, num_reqs]`, log-odds that do not depend on confidence.
        worth: `[num_reqs]`, weight times predicted survival of the latest position.
        num_passes: Seen so far.
    """

    stop: DraftStop
    offset: NDArray[np.float64]
    worth: NDArray[np.float64]
    num_passes: int = 0

    def pays_to_go_on(
        self, confidence: list[float], ended: list[int] | None = None
    ) -> bool:
        """Take in a pass and tell whether the next one is worth its time.

        Args:
            confidence: `[num_reqs]`, 0-1, of the position just drafted.
            ended: Rows that nothing can follow: they drew a stop token.
        """
        stop, position = self.stop, self.num_passes
        self.num_passes += 1
        if self.num_passes >= stop.max_depth:
            return False
        log_odds = stop.scale.slope * to_log_odds(np.array(confidence))
        log_odds += self.offset[position]
        self.worth *= to_probability(log_odds)
        if ended:
            self.worth[ended] = 0.0
        gained = np.multiply.outer(self.worth, stop.next_acceptance)
        gained -= stop.token_price
        np.maximum(gained, 0.0, out=gained)
        return float(gained.sum()) > stop.pass_price * stop.next_acceptance.size


@dataclass(slots=True)
class FewRowsWatch:
    """`DraftWatch` for a handful of requests, in plain floats.

    Between two passes of a small drafter every array operation counts: with a cold
    cache, ten of them take a tenth of the pass.

    Attributes:
        stop: The rule.
        offset: `[max_depth][num_reqs]`.
        worth: `[num_reqs]`.
        num_passes: Seen so far.
    """

    stop: DraftStop
    offset: list[list[float]]
    worth: list[float]
    num_passes: int = 0

    def pays_to_go_on(
        self, confidence: list[float], ended: list[int] | None = None
    ) -> bool:
        """Do what `DraftWatch.pays_to_go_on` does."""
        stop, worth = self.stop, self.worth
        offset = self.offset[self.num_passes]
        self.num_passes += 1
        if self.num_passes >= stop.max_depth:
            return False
        slope, token_price = stop.scale.slope, stop.token_price
        samples = stop.next_acceptance.tolist()
        for row in ended or ():
            worth[row] = 0.0
        gained = 0.0
        for row, value in enumerate(confidence):
            clipped = min(max(value, LEAST_PROBABILITY), 1.0 - LEAST_PROBABILITY)
            log_odds = slope * log(clipped / (1.0 - clipped)) + offset[row]
            own = worth[row] / (1.0 + exp(-log_odds))
            worth[row] = own
            for sample in samples:
                gained += max(own * sample - token_price, 0.0)
        return gained > stop.pass_price * len(samples)
