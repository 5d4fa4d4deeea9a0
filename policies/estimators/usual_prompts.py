"""Which prompts steps usually carry, and what passes take on average with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from policies.estimators.cost_table import CostTable

SMOOTHING = 1 / 32
"""Weight of the newest step in the means: a prompt comes in a few steps of a hundred,
and what counts is their share of all."""

_LEAST_SHARE = 1e-9


@dataclass(slots=True)
class UsualPrompts:
    """The prompts of recent steps.

    Few steps carry any, and those many tokens. A pass over the mean hardly ever runs,
    and the curve of costs past it need not be the one before it.

    Attributes:
        mean_tokens: Prompt tokens that a step carries, those without any counted too.
        share: Of steps that carry any.
    """

    mean_tokens: float = 0.0
    share: float = 0.0

    def note(self, num_tokens: Iterable[int]) -> None:
        """Take in the prompt tokens of steps in a row."""
        for count in num_tokens:
            self.mean_tokens += SMOOTHING * (count - self.mean_tokens)
            self.share += SMOOTHING * ((count > 0) - self.share)

    def skip(self, num_steps: int) -> None:
        """Count steps that carried no prompt."""
        keep = (1.0 - SMOOTHING) ** num_steps
        self.mean_tokens *= keep
        self.share *= keep

    def pass_ms(
        self, table: CostTable, num_tokens: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return what a pass takes on average.

        Args:
            table: Of passes.
            num_tokens: Any shape, without prompts.
        """
        share = self.share
        num_more = (0.0, self.mean_tokens / max(share, _LEAST_SHARE))
        costs_ms = table.predict(np.add.outer(num_more, num_tokens))
        mean_ms: NDArray[np.float64] = costs_ms[0] + share * (costs_ms[1] - costs_ms[0])
        return mean_ms

    def more_ms(self, table: CostTable, num_tokens: float) -> float:
        """Return what prompts add to such a pass on average."""
        num_more = self.mean_tokens / max(self.share, _LEAST_SHARE)
        full_ms = table.at(num_tokens + num_more)
        return self.share * (full_ms - table.at(num_tokens))
