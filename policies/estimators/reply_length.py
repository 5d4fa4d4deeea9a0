"""How long replies are, learnt from those that have ended."""

from __future__ import annotations

from typing import Final

_USUAL_TOKENS: Final = 100.0
_WEIGHT: Final = 0.05


class ReplyLength:
    """A running mean of a flow's replies, in tokens."""

    def __init__(self) -> None:
        """Have seen no reply yet."""
        self._tokens: dict[str, float] = {}

    def note(self, flow: str, num_tokens: int) -> None:
        """Learn from a reply that has ended."""
        usual = self.expect(flow)
        self._tokens[flow] = usual + _WEIGHT * (max(1, num_tokens) - usual)

    def expect(self, flow: str) -> float:
        """Return the tokens that a flow's next reply will have, >= 1."""
        return self._tokens.get(flow, _USUAL_TOKENS)
