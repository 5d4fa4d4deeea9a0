"""How many drafts to verify.

    goodput = (one token per decoding request + expected accepted drafts) / step time

Long-run throughput is a ratio of expectations. A policy that maximises such a ratio
maximises, in every single step, tokens minus time priced at the ratio itself (renewal
reward): the depth plan finds the ratio, the draft budget uses it as a price.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray


@compiled
def find_budget(
    candidates: NDArray[np.float64],
    step_ms: NDArray[np.float64],
    tokens_per_ms: float,
    max_step_ms: float,
) -> tuple[int, int]:
    """Choose the budget with the largest surplus: tokens minus priced time.

    All budgets are compared, not only up to the first fall: where the engine pads,
    cost is a staircase, the first token of a stair never pays and the next ones are
    free. It looks at every candidate, so it is for argmax drafts and one-hot
    verification; sampled drafts take `survival_threshold`.

    Args:
        candidates: `[num_drafts]`, >= 0, survival times weight of every draft, largest
            first.
        step_ms: `[num_drafts + 1]`, what the step costs when 0, 1, ... are verified;
            a constant offset changes nothing.
        tokens_per_ms: Price of a millisecond in tokens, >= 0.
        max_step_ms: Latest `step_ms` that meets the latency target; inf for no target.

    Returns:
        How many drafts to verify, among equals the fewest, 0 if none meets the target;
        and how many more it would be without the target.

    Source: ours.
    """
    best = limited = 0
    most = most_limited = -np.inf
    tokens = 0.0
    for budget in range(step_ms.size):
        if budget > 0:
            tokens += candidates[budget - 1]
        surplus = tokens - tokens_per_ms * step_ms[budget]
        if surplus > most:
            most, best = surplus, budget
        if step_ms[budget] <= max_step_ms and surplus > most_limited:
            most_limited, limited = surplus, budget
    return limited, max(0, best - limited)


def survival_threshold(
    step_ms: NDArray[np.float64], width: float, tokens_per_ms: float
) -> float:
    """Return the survival at which verifying a draft pays for its time.

    The marginal price is the slope over a whole stretch of budgets: the concave
    envelope of a staircase rather than its next stair. Fixed before a block is drawn,
    it admits a draft by what is known before its token, whatever the others are.

    Args:
        step_ms: `[2]`, step cost with nothing and with `width` drafts verified.
        width: Drafts between the two, > 0.
        tokens_per_ms: Price of a millisecond in tokens.

    Source: ours.
    """
    return float(tokens_per_ms * (step_ms[1] - step_ms[0]) / width)
