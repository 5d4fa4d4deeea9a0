"""Arms that no server offers beside those that one does, and what each engine is."""

from __future__ import annotations

from typing import Any

from loadtest.arms import Arm, parse_arm

COLD = "cold"
"""The engine of `goodput` held at depth 0: beside `none` it shows what that costs."""

UPSTREAM = "adaptive"
"""vLLM's own adaptive verification, which only a GPU's engine has."""

_OTHERS = {COLD: 8, UPSTREAM: 5}


def parse_bench_arm(text: str) -> Arm:
    """Read an arm as a server offers it, or `cold:8` or `adaptive:5`.

    Raises:
        ValueError: If it is none, or a number makes no sense for it.
    """
    return parse_arm(text, _OTHERS)


def policy_of(arm: Arm) -> dict[str, Any]:
    """Return the section `policy` of the deployment whose engine is this arm's."""
    if arm.policy == "none":
        return {"name": "none"}
    if arm.policy == "fixed":
        return {"name": "fixed", "draft_tokens": arm.draft_tokens}
    if arm.policy == UPSTREAM:
        extra = {"enable_adaptive_verification": True}
        return {"name": "fixed", "draft_tokens": arm.draft_tokens, "extra": extra}
    lengths = {"max_draft_tokens": arm.max_depth}
    if arm.policy == "tetris":
        lengths["draft_tokens"] = arm.draft_tokens
    return {"name": "goodput" if arm.policy == COLD else arm.policy, **lengths}
