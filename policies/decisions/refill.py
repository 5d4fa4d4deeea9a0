"""How many streams that lost their replica are computed anew at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable


class Refills:
    """Streams that others go on with, until their first token there.

    A replica that dies leaves more to compute again than the others may have KV blocks
    for; all at once they would preempt one another and what runs there.
    """

    def __init__(self) -> None:
        """Know of none."""
        self._num_tokens: dict[Hashable, int] = {}

    def have_room(self, num_tokens: int, num_free: int) -> bool:
        """Return whether a stream fits beside those under way, or goes alone.

        Args:
            num_tokens: That are computed anew.
            num_free: Tokens for which there are KV blocks, as replicas said last.
        """
        taken = sum(self._num_tokens.values())
        return not taken or num_tokens + taken <= num_free

    def note_opened(self, stream: Hashable, num_tokens: int) -> None:
        """Remember what a stream takes before its blocks show."""
        self._num_tokens[stream] = num_tokens

    def note_begun(self, stream: Hashable) -> None:
        """Forget it: it has put out a token, or is not there any more."""
        self._num_tokens.pop(stream, None)
