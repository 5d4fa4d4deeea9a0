"""Requests as they come, before anything became of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from .prefixes import BLOCK_TOKENS
from .state import Floats, Ints

KINDS = ("easy", "hard")
"""Rows of the acceptance table of an engine."""


def _none() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Requests of one seed, trace or run; all `[num_requests]`."""

    arrival_s: Floats  # rising
    num_prompt_tokens: Ints  # >= 1
    num_output_tokens: Ints  # >= 1
    kind: Ints  # index into `KINDS`
    # `[num_named]`, blocks of prompts and replies, one request after another.
    chain: Ints = field(default_factory=_none)
    # `[num_requests + 1]`, where each request's begin; empty for none.
    chain_first: Ints = field(default_factory=_none)
    block_tokens: int = BLOCK_TOKENS  # of each block

    def first(self, count: int) -> Drawn:
        """Return the first requests of those whose blocks have names."""
        return replace(
            self,
            arrival_s=self.arrival_s[:count],
            num_prompt_tokens=self.num_prompt_tokens[:count],
            num_output_tokens=self.num_output_tokens[:count],
            kind=self.kind[:count],
            chain=self.chain[: self.chain_first[count]],
            chain_first=self.chain_first[: count + 1],
        )
