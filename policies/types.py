"""Frozen value types that travel between the engine adapters and the policies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The drafts that could be verified in the next engine step.

    Attributes:
        num_draft_tokens: `[num_reqs]`, int64, >= 0. Drafts each request offers.
        confidence: `[num_reqs, max_depth]`, float64, 0-1, or None when the drafter
            produces none (ngram, suffix). Entry `j` describes the draft
            *distribution* at position `j`, never the token drawn there: a rule that
            looks at the drawn token biases sampled output (see `selection`).
            Columns at or past `num_draft_tokens` are ignored.
        req_ids: `[num_reqs]`, whose drafts these are; may be empty for a policy that
            learns nothing about single requests.
        num_decodes: Requests that decode in the coming step, with or without drafts.
        num_prefill_tokens: Prompt tokens expected to join the step.
        num_context_tokens: KV positions the step attends to, summed over requests.
        drafts_are_sampled: Drafts were drawn at random and the sampler knows their
            probabilities, so that only what was known before a token was drawn may
            decide about it.
        weights: `[num_reqs]`, float64, > 0, what a token of each request is worth; None
            where all are worth the same. Fixed for a request's life, so that weighing
            by it is lossless.
        latency_targets_ms: `[num_reqs]`, float64, longest time per token each request
            wants, inf for none; None where no request has one. Fixed likewise.
    """

    num_draft_tokens: NDArray[np.int64]
    confidence: NDArray[np.float64] | None
    req_ids: tuple[Hashable, ...] = ()
    num_decodes: int = 0
    num_prefill_tokens: int = 0
    num_context_tokens: int = 0
    drafts_are_sampled: bool = False
    weights: NDArray[np.float64] | None = None
    latency_targets_ms: NDArray[np.float64] | None = None

    @property
    def num_reqs(self) -> int:
        """Number of requests in the batch."""
        return int(self.num_draft_tokens.shape[0])

    @property
    def max_depth(self) -> int:
        """Longest draft in the batch; 0 for an empty batch."""
        # As a list: of a few numbers that takes a fraction of NumPy's time.
        return max(self.num_draft_tokens.tolist(), default=0)


@dataclass(frozen=True, slots=True)
class DraftSelection:
    """Which drafts of a `DraftBatch` are verified.

    Attributes:
        num_admitted: `[num_reqs]`, int64. Length of the verified prefix per request.
        draft_budget: Draft tokens the policy was ready to verify in this step.
        expected_accepted: Drafts the policy expects to be accepted; NaN if it has no
            opinion.
        num_cut_by_latency: Drafts that would have been admitted without any target.
        is_probe: Drafts were left out to see what a step costs without them.
        may_reallocate: An engine that selects before it knows the drafts may give the
            budget to other drafts of the batch, by fresher confidences.
    """

    num_admitted: NDArray[np.int64]
    draft_budget: int
    expected_accepted: float = float("nan")
    num_cut_by_latency: int = 0
    is_probe: bool = False
    may_reallocate: bool = False


@dataclass(frozen=True, slots=True)
class VerificationOutcome:
    """What the target made of the drafts of one engine step.

    Position `j` of a request was *observed* only if it was verified and everything
    before it was accepted; later positions are censored.

    Attributes:
        num_verified: `[num_reqs]`, int64. Drafts the target scored.
        num_accepted: `[num_reqs]`, int64, <= `num_verified`. Before stop strings or
            token limits cut the output.
        req_ids: `[num_reqs]`, or empty.
        confidence: `[num_reqs, max_depth]`, float64, 0-1, of the very drafts that were
            verified, from an engine that selects before it knows them; None where
            they are those that `select` was last shown.
        num_unlearnt: Drafts accepted besides, of which nothing may be learnt: a
            watchdog's tries, or all of a step that was planned by nobody.
    """

    num_verified: NDArray[np.int64]
    num_accepted: NDArray[np.int64]
    req_ids: tuple[Hashable, ...] = ()
    confidence: NDArray[np.float64] | None = None
    num_unlearnt: int = 0


@dataclass(frozen=True, slots=True)
class AcceptanceScale:
    """How to turn confidence into acceptance probability, as plain numbers.

        log-odds(acceptance) = intercept_j + slope * log-odds(confidence) + effect_i

    For an engine that ranks drafts on the device, where no planner can be asked.

    Attributes:
        slope: Shared by all.
        intercept: `[max_depth]`, float64.
        effect: `[num_reqs]`, float64, in the order of the requests asked about.
        max_log_odds: Log-odds of the confidence are clipped to +- this.
    """

    slope: float
    intercept: NDArray[np.float64]
    effect: NDArray[np.float64]
    max_log_odds: float


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy by name with its numbers, as configuration states them.

    Attributes:
        name: `fixed`, `tetris`, `dynamic` or `goodput` (`none` never reaches an engine
            with a drafter), or somebody's own planner as `module:Class`.
        draft_tokens: k. For `fixed` the drafts every request verifies; for `tetris`
            the verification capacity per request. >= 1 for these two.
        max_draft_tokens: The depth that all others choose within, and to which `tetris`
            drafts, so that there is something to choose from. >= 1, for `tetris` >= k.
        latency_target_ms: For `goodput`, the longest time wanted between two steps of
            a request, or None.
        params: For a planner of somebody's own: what its class takes beside the depth
            and the limits, by name.
        audit: Share of steps in which an engine finds out what the policy gains; 0 for
            none.
    """

    name: str
    draft_tokens: int = 0
    max_draft_tokens: int = field(default=0, kw_only=True)
    latency_target_ms: float | None = field(default=None, kw_only=True)
    params: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    audit: float = field(default=0.0, kw_only=True)

    @property
    def max_depth(self) -> int:
        """Draft tokens the engine must be able to propose per request."""
        return self.draft_tokens if self.name == "fixed" else self.max_draft_tokens


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a planner must know about the engine it plans for.

    Attributes:
        max_tokens: Most tokens a step can carry.
        max_reqs: Most requests a step can carry.
        skips_drafter: At depth 0 the engine does not run the drafter at all (cold) and
            fills its KV cache when drafting resumes; otherwise the drafter's first
            pass runs in every step (warm).
        exits_early: The engine asks `early_exit` between drafter passes and may end a
            draft short of the depth it was given.
        method: vLLM's name of the drafting method, for priors.
        padded_sizes: Token counts, rising, to the next of which a forward pass is
            priced: the engine pads it, as replaying a captured graph does, or has
            kernels for that size at hand. Larger passes are priced as they are; all
            are where empty.
    """

    max_tokens: int = 8192
    max_reqs: int = 256
    skips_drafter: bool = False
    exits_early: bool = False
    method: str = "draft_model"
    padded_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One measured engine step and what it carried.

    Attributes:
        num_reqs: Requests in the step.
        num_decode_tokens: Tokens of decoding requests in the target's forward pass:
            one per request and the verified drafts.
        num_prefill_tokens: Prompt tokens in the same pass.
        num_context_tokens: KV positions attended to, summed over requests.
        depth: Draft tokens per request made after verification; 0 if none.
        target_ms: The target's forward pass, and its sampling where that is not timed
            apart.
        draft_first_ms: The drafter's first pass, over every token of the step, or all
            of its work if it makes no passes; 0 if it was skipped.
        draft_next_ms: All further draft passes together, `depth - 1` of them.
        host_ms: The rest of the step: scheduling, bookkeeping, output.
        backlog_ms: Filling the drafter's KV cache after it had been skipped; not part
            of the step's own cost.
        num_backlog: Positions filled then.
        num_drafts: Drafts verified; needed where sampling is timed apart.
        sample_ms: Sampling from the target and judging the drafts; 0 where that is part
            of `target_ms`.
    """

    num_reqs: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_context_tokens: int
    depth: int
    target_ms: float
    draft_first_ms: float
    draft_next_ms: float
    host_ms: float
    backlog_ms: float = 0.0
    num_backlog: int = 0
    num_drafts: int = 0
    sample_ms: float = 0.0

    @property
    def num_tokens(self) -> int:
        """All tokens of the target's forward pass."""
        return self.num_decode_tokens + self.num_prefill_tokens

    @property
    def total_ms(self) -> float:
        """Wall time of the step, without catching up."""
        drafter_ms = self.draft_first_ms + self.draft_next_ms
        return self.target_ms + self.sample_ms + drafter_ms + self.host_ms

    @property
    def is_possible(self) -> bool:
        """Whether a clock that works can have measured this."""
        # NaN compares false; of negative parts the sum alone might hide one.
        return (
            0.0 <= self.target_ms < math.inf
            and 0.0 <= self.draft_first_ms < math.inf
            and 0.0 <= self.draft_next_ms < math.inf
            and 0.0 <= self.host_ms < math.inf
            and 0.0 <= self.backlog_ms < math.inf
            and 0.0 <= self.sample_ms < math.inf
        )


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Forward passes timed at start-up, before there is anything to learn from.

    Attributes:
        num_tokens: `[num_samples]`, rising.
        target_ms: `[num_samples]`, the target's pass over that many tokens.
        draft_ms: `[num_samples]`, one pass of the drafter; empty if it makes none, as a
            look-up in the text so far (ngram, suffix) does not.
        drafts_in_one_pass: All tokens of a draft come from that one pass.
    """

    num_tokens: tuple[int, ...]
    target_ms: tuple[float, ...]
    draft_ms: tuple[float, ...] = ()
    drafts_in_one_pass: bool = False
