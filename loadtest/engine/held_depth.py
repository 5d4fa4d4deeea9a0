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
    """Stands between engine and planner and drafts nothing, whatever is planned."""

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
