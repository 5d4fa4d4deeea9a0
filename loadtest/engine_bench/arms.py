"""Arms: the policies that are compared, each with its numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from policies.registry import POLICY_NAMES

DEFAULT_DRAFT_TOKENS = {"fixed": 3, "tetris": 2, "dynamic": 5, "goodput": 5}
DEFAULT_EXTRA_DRAFT_TOKENS = 2

HELD_AT_ZERO = ("cold", "warm")
"""Arms that no server offers: engines of `goodput` held at depth 0, by
skipping the drafter or after its first pass. Beside `none` they show what it costs."""

DEFAULT_HELD_TOKENS = 8

UPSTREAM = "adaptive"
"""The arm of vLLM's own adaptive verification, which only a GPU's engine has."""

DEFAULT_ADAPTIVE_TOKENS = 5

_FORM = re.compile(r"(?P<policy>[a-z]+)(:(?P<tokens>\d+)(\+(?P<extra>\d+))?)?")


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy with its numbers.

    Attributes:
        policy: Name of the policy, or of a form of depth 0.
        draft_tokens: k; 0 for `none`.
        extra_draft_tokens: How much deeper than k `tetris` drafts; 0 for the others.
    """

    policy: str
    draft_tokens: int = 0
    extra_draft_tokens: int = 0

    @property
    def name(self) -> str:
        """The form that `parse_bench_arm` reads, e.g. `tetris:2+2`."""
        if self.policy == "none":
            return self.policy
        extra = f"+{self.extra_draft_tokens}" if self.policy == "tetris" else ""
        return f"{self.policy}:{self.draft_tokens}{extra}"

    @property
    def file_name(self) -> str:
        """The name, fit for a file."""
        return self.name.replace(":", "-").replace("+", "-")

    @property
    def speculates(self) -> bool:
        """Whether the arm's engine has a drafter."""
        return self.policy != "none"

    @property
    def held_at_zero(self) -> str | None:
        """The form of depth 0 that the engine is held at; None if it drafts."""
        return self.policy if self.policy in HELD_AT_ZERO else None

    @property
    def engine_policy(self) -> str:
        """The policy that the engine is configured with."""
        return self.policy if self.held_at_zero is None else "goodput"

    @property
    def is_rival(self) -> bool:
        """Whether `goodput` should not fall behind it."""
        return self.engine_policy != "goodput"

    @property
    def max_depth(self) -> int:
        """Draft tokens the engine must be able to propose per request."""
        return self.draft_tokens + self.extra_draft_tokens


def parse_arm(text: str) -> Arm:
    """Read an arm: `none`, `fixed:3`, `dynamic:5`, `goodput:5` or `tetris:2+2`.

    Numbers may be left out.

    Raises:
        ValueError: If the policy is unknown or a number makes no sense for it.
    """
    match = _FORM.fullmatch(text)
    if match is None or match["policy"] not in POLICY_NAMES:
        raise ValueError(
            f"{text!r} is no policy; write one of {', '.join(POLICY_NAMES)}, "
            "with numbers as in fixed:3, goodput:5 or tetris:2+2"
        )
    policy = match["policy"]
    if policy == "none":
        if match["tokens"] is not None:
            raise ValueError(f"{text!r}: policy none drafts nothing; write none")
        return Arm("none")
    draft_tokens = int(match["tokens"] or DEFAULT_DRAFT_TOKENS.get(policy, 3))
    if draft_tokens < 1:
        raise ValueError(f"{text!r}: draft tokens must be at least 1")
    if policy != "tetris":
        if match["extra"] is not None:
            raise ValueError(
                f"{text!r}: only tetris takes extra draft tokens; "
                f"write {policy}:{draft_tokens}"
            )
        return Arm(policy, draft_tokens)
    extra = match["extra"]
    return Arm(
        policy,
        draft_tokens,
        DEFAULT_EXTRA_DRAFT_TOKENS if extra is None else int(extra),
    )


def parse_bench_arm(text: str) -> Arm:
    """Read an arm as `parse_arm` does, or `cold:8`, `warm:8` or `adaptive:5`.

    Raises:
        ValueError: If it is none, or a number makes no sense for it.
    """
    match = _FORM.fullmatch(text)
    if match is None or match["policy"] not in (*HELD_AT_ZERO, UPSTREAM):
        return parse_arm(text)
    policy = match["policy"]
    default = DEFAULT_ADAPTIVE_TOKENS if policy == UPSTREAM else DEFAULT_HELD_TOKENS
    draft_tokens = int(match["tokens"] or default)
    if draft_tokens < 1 or match["extra"] is not None:
        raise ValueError(f"{text!r}: write {policy}:8, what its engine could draft")
    return Arm(policy, draft_tokens)


def lend_drafts(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """Return the fixed arms whose drafts the bounds of other arms need.

    Bounds are played on drafts as deep as the policy's own, all of them verified.

    Args:
        arms: Those that are measured; what is among them is left out.
    """
    depth = max((arm.max_depth for arm in arms if arm.policy == "goodput"), default=0)
    lender = Arm("fixed", depth)
    return (lender,) if depth and lender not in arms else ()
