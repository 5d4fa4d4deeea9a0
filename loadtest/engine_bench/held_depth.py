"""Depth 0 in every step: what an engine that could draft costs beside one that cannot.

An engine of `goodput` may be at depth 0 for hours. Its planner goes on planning and
learning, its scheduler and runner are ours, its drafter is loaded: all of that is part
of the price, so all of it stays. Only the depth is held, and what the planner believes
to have chosen. Exploring falls away with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any


class HeldDepth:
    """Stands between scheduler and planner and drafts nothing, whatever is planned."""

    def __init__(self, planner: Any) -> None:
        """Hold back a planner."""
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        """Pass on whatever else the planner has."""
        return getattr(self._planner, name)

    def choose_depth(self, *args: Any, **kwargs: Any) -> int:
        """Let the planner choose, and return 0."""
        self._planner.choose_depth(*args, **kwargs)
        prices = self._planner.depth.costs
        if prices.plan.depth > 0:
            prices.plan = replace(prices.plan, depth=0)
        return 0


def hold_depth(scheduler: Any, runner: Any, form: str) -> None:
    """Keep an engine at depth 0 from now on.

    Args:
        scheduler: Whose planner is held back.
        runner: Of the same engine.
        form: `cold` skips the drafter; `warm` runs its first pass, which keeps its KV
            cache complete, as drafters do that cannot be skipped.
    """
    scheduler._planner = HeldDepth(scheduler._planner)
    if form == "warm":
        runner._cold = None
