"""How long replies are, learnt from those that have ended."""

from __future__ import annotations

from typing import Final

from policies.compiled import compiled

USUAL_TOKENS: Final = 100.0
"""Of a reply while none has been seen."""

_WEIGHT: Final = 0.05


class ReplyLength:
    """A running mean of a flow's replies, in tokens."""

    def __init__(self) -> None:
        """Have seen no reply yet."""
        self._tokens: dict[str, float] = {}
        # Compiled before the first reply waits for it.
        follow_length(USUAL_TOKENS, 1)

    def note(self, flow: str, num_tokens: int) -> None:
        """Learn from a reply that has ended."""
        self._tokens[flow] = follow_length(self.expect(flow), num_tokens)

    def expect(self, flow: str) -> float:
        """Return the tokens that a flow's next reply will have, >= 1."""
        return self._tokens.get(flow, USUAL_TOKENS)


@compiled
def follow_length(usual_tokens: float, num_tokens: int) -> float:
    """Return the usual length after one more reply."""
    return usual_tokens + _WEIGHT * (max(1, num_tokens) - usual_tokens)
