"""Cumulative figures of one engine, kept where the decisions are made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.types import DraftSelection

CutReason = str
"""Why a draft is not verified:

    `budget`      not worth its time
    `latency`     worth its time, but a latency target leaves no room
    `probe`       a step that verifies nothing, to learn what one costs
    `depth`       not even proposed: the draft was shorter than the deepest there can be
    `kv`          no KV block is left for it, or its request lost its own
    `grammar`     not allowed by the request's grammar
    `stop_token`  behind a draft that ends the request if it is accepted
    `min_tokens`  stop tokens become possible inside the block
    `length`      the request or the drafter's context ends before it
    `opt_out`     the request wants no speculation
    `quarantine`  the drafter has collapsed for such requests (`watchdog`)
    `skipped`     the drafter did not run, what it proposed is a placeholder
    `scheduler`   vLLM's limit of tokens per step left no room
"""


@dataclass(slots=True)
class SpeculationCounters:
    """Everything counted since the engine started; values never fall.

    Attributes:
        num_proposed_tokens: Drafted tokens that reached the scheduler: verified, cut
            for any reason but `depth`, or their request ended before their turn came.
        num_verified_tokens: Draft tokens the target scored.
        num_accepted_tokens: Verified draft tokens that were accepted.
        num_drafts: Requests x steps with at least one verified draft.
        draft_budget_total: Sum over steps of the budget. What was not verified of it
            found no drafts, as `tetris`'s may, or was cut for another reason later.
        num_expected_accepted: Sum of the survival probabilities of admitted drafts;
            beside `num_accepted_tokens` it shows how well acceptance is predicted. 0
            for policies that predict nothing.
        selection_seconds_total: Time spent on selecting drafts.
        planning_seconds_total: Time spent on all that speculation adds to a step in
            the scheduler: selecting, choosing depth and batch, learning, and putting
            together what that takes.
        num_aged_requests: Requests that became as urgent as any by waiting (`ageing`).
        num_quarantines: Times that drafting collapsed (`watchdog`), by reason.
        num_quarantined: Requests of which drafts are left out now, likewise.
    """

    policy: str
    method: str
    max_depth: int
    num_steps: int = 0
    num_drafts: int = 0
    num_proposed_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verified_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    draft_budget_total: int = 0
    last_draft_budget: int = 0
    num_expected_accepted: float = 0.0
    draft_depth: int = 0
    num_selections: int = 0
    selection_seconds_total: float = 0.0
    planning_seconds_total: float = 0.0
    num_aged_requests: int = 0
    num_fallbacks: Counter[str] = field(default_factory=Counter)
    num_cut_tokens: Counter[CutReason] = field(default_factory=Counter)
    num_quarantines: Counter[str] = field(default_factory=Counter)
    num_quarantined: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Size the per-position counts."""
        self.num_verified_tokens_per_pos = [0] * self.max_depth
        self.num_accepted_tokens_per_pos = [0] * self.max_depth

    def count_verification(
        self, num_verified: Sequence[int], num_accepted: Sequence[int]
    ) -> None:
        """Count what became of the drafts of a step.

        Args:
            num_verified: `[num_reqs]`, >= 0.
            num_accepted: `[num_reqs]`, <= `num_verified`.
        """
        self.num_drafts += len(num_verified) - num_verified.count(0)
        self.num_verified_tokens += sum(num_verified)
        self.num_accepted_tokens += sum(num_accepted)
        _count_positions(self.num_verified_tokens_per_pos, num_verified)
        _count_positions(self.num_accepted_tokens_per_pos, num_accepted)

    def count_cut(self, reason: CutReason, num_tokens: int) -> None:
        """Count drafts that are not verified."""
        if num_tokens:
            self.num_cut_tokens[reason] += num_tokens

    def count_left_out(self, selection: DraftSelection, num_tokens: int) -> None:
        """Count drafts that a selection leaves out, for the reasons that it had."""
        num_late = min(num_tokens, selection.num_cut_by_latency)
        self.count_cut("latency", num_late)
        reason = "probe" if selection.is_probe else "budget"
        self.count_cut(reason, num_tokens - num_late)

    def snapshot(self) -> dict[str, Any]:
        """Return plain values that any serialiser takes."""
        values = {name: getattr(self, name) for name in self.__slots__}
        for name, value in values.items():
            if isinstance(value, Counter):
                values[name] = dict(value)
        for name in ("num_verified_tokens_per_pos", "num_accepted_tokens_per_pos"):
            values[name] = list(values[name])
        return values


def _count_positions(per_position: list[int], lengths: Sequence[int]) -> None:
    """Add one to every position that lies within a length, for each of them."""
    num_of_length = [0] * (1 + max(lengths, default=0))
    for length in lengths:
        num_of_length[length] += 1
    num_reaching = 0
    for position in range(len(num_of_length) - 2, -1, -1):
        num_reaching += num_of_length[position + 1]
        if position < len(per_position):
            per_position[position] += num_reaching
