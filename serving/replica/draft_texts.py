"""What drafted tokens say, for the board."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

MAX_TEXTS: Final = 16_384
"""Tokens whose text is kept."""


class DraftTexts:
    """Writes text in the place of token ids.

    A fast engine drafts thousands of tokens between two looks, over and over the same,
    and the process that decodes them has requests to pass on besides.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """Keep nothing yet; `decode` is a tokenizer's."""
        self._text_of = functools.lru_cache(MAX_TEXTS)(lambda one: decode([one]))

    def write(self, steps: Iterable[dict[str, Any]]) -> None:
        """Replace `draft_ids` by `draft_text` in what a board's recorder returned."""
        for step in steps:
            for request in step["requests"]:
                ids = request.pop("draft_ids")
                request["draft_text"] = [self._text_of(one) for one in ids]
