"""Cumulative figures of one engine, kept where the decisions are made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

CutReason = str
"""Why a proposed draft is not verified: `budget`, `latency`
(the target left no room), `grammar`, `length` (the request or
the drafter's context ends before it), `min_tokens` (stop tokens become possible inside
the block), `opt_out`, `skipped` (the drafter did not run),
`scheduler` (vLLM had no room for it)."""


@dataclass(slots=True)
class SpeculationCounters:
    """Everything counted since the engine started; values never fall.

    Attributes:
        num_proposed_tokens: Drafted tokens that reached the scheduler.
        num_verified_tokens: Draft tokens the target scored.
        num_accepted_tokens: Verified draft tokens that were accepted.
        num_drafts: Requests x steps with at least one verified draft.
        draft_budget_total: Sum over steps of the budget.
        draft_budget_used_total: Sum over steps of what was admitted under it.
        num_expected_accepted: Sum of the survival probabilities of admitted drafts;
            beside `num_accepted_tokens` it shows how well acceptance is predicted. 0
            for policies that predict nothing.
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
    draft_budget_used_total: int = 0
    last_draft_budget: int = 0
    num_expected_accepted: float = 0.0
    draft_depth: int = 0
    num_selections: int = 0
    selection_seconds_total: float = 0.0
    num_fallbacks: Counter[str] = field(default_factory=Counter)
    num_cut_tokens: Counter[CutReason] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Size the per-position counts."""
        self.num_verified_tokens_per_pos = [0] * self.max_depth
        self.num_accepted_tokens_per_pos = [0] * self.max_depth

    def count_verification(self, num_verified: int, num_accepted: int) -> None:
        """Count one request's verified block."""
        self.num_drafts += 1
        self.num_verified_tokens += num_verified
        self.num_accepted_tokens += num_accepted
        for position in range(min(num_verified, self.max_depth)):
            self.num_verified_tokens_per_pos[position] += 1
        for position in range(min(num_accepted, self.max_depth)):
            self.num_accepted_tokens_per_pos[position] += 1

    def snapshot(self) -> dict[str, Any]:
        """Return plain values that any serialiser takes."""
        values = {name: getattr(self, name) for name in self.__slots__}
        for name in ("num_fallbacks", "num_cut_tokens"):
            values[name] = dict(values[name])
        for name in ("num_verified_tokens_per_pos", "num_accepted_tokens_per_pos"):
            values[name] = list(values[name])
        return values
