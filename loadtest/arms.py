"""Policies that are compared, each with its numbers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from policies.registry import POLICY_NAMES

PLAIN_POLICIES = ("none", "fixed")
"""What vLLM does without us."""

_DEFAULT_DRAFT_TOKENS = {"fixed": 3, "tetris": 2, "dynamic": 5, "goodput": 5}

_DEFAULT_EXTRA_DRAFT_TOKENS = 2

_DRAWN = "probabilistic"

_FORM = re.compile(
    r"(?P<policy>[a-z]+)(:(?P<tokens>\d+)(\+(?P<extra>\d+))?)?"
    rf"(?P<drawn>:{_DRAWN})?"
)


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy with its numbers.

    Attributes:
        policy: Its name.
        draft_tokens: k; 0 for `none`.
        extra_draft_tokens: How much deeper than k `tetris` drafts; 0 for the others.
        is_drawn: Drafts are drawn, not the drafter's likeliest tokens.
    """

    policy: str
    draft_tokens: int = 0
    extra_draft_tokens: int = 0
    is_drawn: bool = False

    @property
    def name(self) -> str:
        """The form that `parse_arm` reads, e.g. `tetris:2+2`."""
        if self.policy == "none":
            return self.policy
        extra = f"+{self.extra_draft_tokens}" if self.policy == "tetris" else ""
        drawn = f":{_DRAWN}" if self.is_drawn else ""
        return f"{self.policy}:{self.draft_tokens}{extra}{drawn}"

    @property
    def file_name(self) -> str:
        """The name, fit for a file."""
        return to_file_name(self.name)

    @property
    def max_depth(self) -> int:
        """Draft tokens the engine must be able to propose per request."""
        return self.draft_tokens + self.extra_draft_tokens

    def settings(self) -> dict[str, Any]:
        """Return the section `policy` of a deployment that serves this arm."""
        found: dict[str, Any] = {"name": self.policy}
        if self.policy in ("fixed", "tetris"):
            found["draft_tokens"] = self.draft_tokens
        if self.policy not in PLAIN_POLICIES:
            found["max_draft_tokens"] = self.max_depth
        if self.is_drawn:
            found["draft_sampling"] = _DRAWN
        return found


def to_file_name(name: str) -> str:
    """Return an arm's name, fit for a file."""
    return re.sub(r"[^\w.=-]", "-", name)


def parse_arm(text: str, others: Mapping[str, int] = MappingProxyType({})) -> Arm:
    """Read an arm: `none`, `fixed:3`, `dynamic:5`, `goodput:5` or `tetris:2+2`.

    Numbers may be left out; `:probabilistic` at the end has drafts drawn. `others` are
    further names, with the number of draft tokens that each has by itself.

    Raises:
        ValueError: If the policy is unknown or a number makes no sense for it.
    """
    match, names = _FORM.fullmatch(text), (*POLICY_NAMES, *others)
    if match is None or match["policy"] not in names:
        raise ValueError(
            f"{text!r} is no policy; write one of {', '.join(names)}, with numbers as "
            "in fixed:3, goodput:5 or tetris:2+2"
        )
    policy, extra = match["policy"], match["extra"]
    if policy == "none":
        if match["tokens"] is not None or match["drawn"] is not None:
            raise ValueError(f"{text!r}: policy none drafts nothing; write none")
        return Arm("none")
    defaults = _DEFAULT_DRAFT_TOKENS | dict(others)
    draft_tokens = int(match["tokens"] or defaults.get(policy, 3))
    is_drawn = match["drawn"] is not None
    if draft_tokens < 1:
        raise ValueError(f"{text!r}: draft tokens must be at least 1")
    if policy == "tetris":
        more = int(extra or _DEFAULT_EXTRA_DRAFT_TOKENS)
        return Arm(policy, draft_tokens, more, is_drawn)
    if extra is not None:
        raise ValueError(
            f"{text!r}: only tetris takes extra draft tokens; "
            f"write {policy}:{draft_tokens}"
        )
    return Arm(policy, draft_tokens, is_drawn=is_drawn)
