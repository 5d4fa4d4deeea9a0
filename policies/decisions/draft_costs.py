"""What drafting and verifying cost, in milliseconds and in tokens, under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policies.decisions.budget import survival_threshold

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from policies.decisions.depth import DepthEstimate, DepthPlan
    from policies.estimators.step_cost import StepCost
    from policies.types import DraftBatch


@dataclass(slots=True)
class DraftCosts:
    """What drafts cost, by learnt step costs; a plan's goodput makes time tokens.

    Attributes:
        cost: Learnt from every step.
        plan: The latest; its goodput is what a millisecond is worth.

    Source: ours.
    """

    cost: StepCost
    plan: DepthPlan

    def verify_ms(
        self,
        num_reqs: int,
        num_drafts: NDArray[np.float64],
        num_prefill_tokens: NDArray[np.float64] | float = 0.0,
    ) -> NDArray[np.float64]:
        """Return the time of the parts of a step that grow with its verified drafts.

        The target's pass and the drafter's first run over every token of the step,
        prompts and rejected drafts included, sampling over all that decode; further
        passes, the host and the context do not depend on them.
        """
        num_tokens = num_reqs + num_drafts + num_prefill_tokens
        cost = self.cost
        pass_ms = cost.target.predict(num_tokens) + cost.draft_first.predict(num_tokens)
        return pass_ms + cost.sampling.predict_ms(num_reqs, num_drafts)

    def verify_range_ms(
        self, num_reqs: int, first: int, num_counts: int, num_prefill_tokens: int
    ) -> NDArray[np.float64]:
        """Do as `verify_ms` for `first`, `first + 1`, ... drafts."""
        costs_ms = self.cost.sampling.predict_range_ms(num_reqs, first, num_counts)
        num_tokens = num_reqs + first + num_prefill_tokens
        self.cost.target.add_range(costs_ms, num_tokens)
        self.cost.draft_first.add_range(costs_ms, num_tokens)
        return costs_ms

    def _passes_ms(
        self, num_tokens: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what both models' first passes take with the usual prompts."""
        cost, mean_ms = self.cost, self.cost.prompts.pass_ms
        return mean_ms(cost.target, num_tokens), mean_ms(cost.draft_first, num_tokens)

    def estimate_ms(
        self,
        estimate: DepthEstimate,
        num_reqs: int,
        prompt_ms: float,
        *,
        skips_drafter: bool,
    ) -> NDArray[np.float64]:
        """Return the time of steps, by depth and survival threshold, less the prompts'.

        A draft is priced in passes of which some carry prompts, as usual. But what
        these take of the target is taken out: whoever brings more tokens a step ends
        requests sooner and meets more prompts, so that a token pays for the same share
        of a prompt at every depth. Counted by the step it would be spread over more
        tokens the deeper the drafts are, and drafts would win by it.

        Args:
            estimate: From `depth.estimate_depths`.
            num_reqs: Requests that decode.
            prompt_ms: What the usual prompts take (`UsualPrompts.more_ms`).
            skips_drafter: At depth 0 no drafter pass runs at all.

        Returns:
            `[max_depth + 1, num_thresholds]`, as the estimate's arrays, > 0.
        """
        num_drafts = num_reqs * estimate.verified
        cost = self.cost
        step_ms, first_ms = self._passes_ms(num_reqs + num_drafts)
        if skips_drafter:
            first_ms[0] = 0.0
        step_ms += first_ms + cost.sampling.predict_ms(num_reqs, num_drafts)
        step_ms += cost.host_ms(num_reqs) - prompt_ms
        if cost.context_per_req > 0.0:
            step_ms += cost.context_ms(cost.context_per_req * num_reqs)
        depths = np.arange(estimate.verified.shape[0])
        step_ms += cost.draft_next_ms(num_reqs, depths)[:, None]
        return step_ms

    def plain_ms(self, num_reqs: int, *, skips_drafter: bool) -> float:
        """Return the time of a step at depth 0, with the usual prompts."""
        target_ms, first_ms = self._passes_ms(np.array([float(num_reqs)]))
        step_ms = float(target_ms[0]) + self.cost.host_ms(num_reqs)
        step_ms += float(self.cost.sampling.predict_ms(num_reqs, 0.0))
        step_ms += self.cost.context_ms(self.cost.context_per_req * num_reqs)
        return step_ms if skips_drafter else step_ms + float(first_ms[0])

    def explore_ms(self, num_reqs: int, depth: int, *, skips_drafter: bool) -> float:
        """Return what drafting adds to such a step if half the requests verify one."""
        num_drafts = np.array([0.0, 0.5 * num_reqs + 1])
        target_ms, first_ms = self._passes_ms(num_reqs + num_drafts)
        step_ms = target_ms + self.cost.sampling.predict_ms(num_reqs, num_drafts)
        extra_ms = float(step_ms[1] - step_ms[0])
        extra_ms += float(self.cost.draft_next_ms(num_reqs, depth))
        return extra_ms + (float(first_ms[0]) if skips_drafter else 0.0)

    def fixed_ms(self, batch: DraftBatch) -> float:
        """Return the time of the parts that do not depend on what is verified."""
        fixed = self.cost.host_ms(batch.num_reqs)
        fixed += self.cost.context_ms(batch.num_context_tokens)
        return fixed + float(self.cost.draft_next_ms(batch.num_reqs, self.plan.depth))

    def expect_width(self, num_decodes: int) -> float:
        """Return twice the drafts that the plan verifies for so many requests."""
        return max(1.0, 2.0 * self.plan.budget_per_req * num_decodes)

    def token_price(self, num_decodes: int) -> float:
        """Return what a draft must promise to be verified, in tokens.

        Known before the block is drawn: it depends on the plan and the load alone, with
        the prompts that a step usually carries.
        """
        # Past the first draft: what comes with that is the plan's to weigh.
        width = self.expect_width(num_decodes)
        ends = np.array([1.0, 1.0 + width])
        target_ms, first_ms = self._passes_ms(num_decodes + ends)
        sampling_ms = self.cost.sampling.predict_ms(num_decodes, ends)
        ends_ms = target_ms + first_ms + sampling_ms
        return survival_threshold(ends_ms, width, self.plan.tokens_per_ms)

    def pass_price(self, num_reqs: int) -> float:
        """Return what a drafter pass after the first must promise, in tokens."""
        return self.plan.tokens_per_ms * self.cost.draft_next.at(num_reqs)


def count_decodes(batch: DraftBatch) -> int:
    """Return the requests of a step that decode, with or without drafts."""
    return max(batch.num_decodes, batch.num_reqs)
