"""What batches are worth where classes of requests have latency targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from policies.estimators.step_cost import StepCost


class ClassLoad(NamedTuple):
    """The requests of one class that run, on the average of recent steps.

    Attributes:
        target_ms: Longest time per token they want; inf for none.
        weight: What a token of theirs is worth, > 0.
        num_running: How many they are, > 0.
    """

    target_ms: float
    weight: float
    num_running: float


def value_batches(
    cost: StepCost,
    context_per_req: float,
    max_reqs: int,
    classes: Sequence[ClassLoad],
    tokens_by_depth: NDArray[np.float64],
    *,
    runs_drafter: bool = False,
) -> NDArray[np.float64]:
    """Return what batches of 1, 2, ... requests of this mix bring within their targets.

    Tokens per millisecond by weight; one that comes later than its class wants is worth
    nothing. A class whose target a step without drafts misses has all its drafts
    verified, as far as that keeps it; else it is given up, and gets none. So a target
    empties the engine only as far as that is worth more than what all others lose, and
    one out of reach takes nothing from anybody.

    Args:
        cost: The learnt step cost.
        context_per_req: Mean KV positions per request; 0 where it is not known yet.
        max_reqs: The engine's own limit, >= 1.
        classes: Of the running requests, >= 1, whose shares the batches have.
        tokens_by_depth: `[max_depth + 1]`, as `DepthEstimate.tokens_in_full`.
        runs_drafter: The drafter's first pass is part of every step.

    Returns:
        `[max_reqs]`, of the best depth for each size; 0 where no class is kept.

    Complexity: sizes times depths times classes squared; a tenth of a millisecond for
    two classes and 64 requests.

    Source: ours; goodput within targets as in AdaServe (arXiv 2501.12162).
    """
    classes = sorted(classes)
    num_running = sum(one.num_running for one in classes)
    sizes = np.arange(1, max_reqs + 1, dtype=np.float64)
    depths, tokens = np.arange(tokens_by_depth.size)[:, None], tokens_by_depth[:, None]
    # Who keeps fewer running begins fewer.
    prompts = sizes * (cost.prompts.mean_tokens / num_running)
    passes_ms: NDArray[np.float64] = cost.host.predict(sizes) + cost.batch_ms(
        sizes, context_per_req
    )
    # The pass is over more than a token of each, which comes below.
    passes_ms -= cost.target.predict(sizes)
    passes_ms = passes_ms + np.maximum(depths - 1, 0) * cost.draft_next.predict(sizes)

    def step_ms(num_drafts: NDArray[np.float64]) -> NDArray[np.float64]:
        num_tokens = sizes + prompts + num_drafts
        pass_ms = cost.target.predict(num_tokens)
        pass_ms += cost.draft_first.predict(num_tokens) * (runs_drafter | (depths > 0))
        return passes_ms + pass_ms

    plain_ms = step_ms(np.zeros(passes_ms.shape))
    best = np.zeros(max_reqs)
    for num_given_up in range(len(classes)):
        mix = [
            (one, one.num_running / num_running, plain_ms > one.target_ms)
            for one in classes[num_given_up:]
        ]
        num_drafts = sizes * depths * sum(share * drafts for _, share, drafts in mix)
        whole_ms, worth = step_ms(num_drafts), np.zeros(passes_ms.shape)
        for one, share, drafts in mix:
            brought = np.where(drafts, tokens, 1.0)
            in_time = whole_ms <= one.target_ms * brought
            worth += one.weight * share * brought * in_time
        np.maximum(best, (worth * sizes / whole_ms).max(axis=0), out=best)
    return best
