"""Steps in which no draft is verified, at the price of an engine without speculation.

vLLM prepares and runs its rejection sampler in every step of an engine with a drafter:
dozens of small tensor operations, which a small model feels, to find that nothing was
drafted. Without drafts the plain sampler gives the same result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from serving.engine.compat_cpu import SpecDecodeMetadata

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class PlainSteps:
    """Describes steps without drafts, from tensors made once."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        """Make the tensors.

        Args:
            max_num_reqs: Most requests in a step.
            device: Where the runner keeps its indices.
        """
        self._rows = torch.arange(max_num_reqs + 1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros_like(self._rows)
        self._device = device

    def describe(self, cu_num_tokens: NDArray[np.int64]) -> SpecDecodeMetadata:
        """Say that every request has one row of logits, its last, and no draft.

        Args:
            cu_num_tokens: `[num_reqs]`, running total of scheduled tokens.
        """
        num_reqs = cu_num_tokens.shape[0]
        rows, none = self._rows[:num_reqs], self._rows[:0]
        last = torch.from_numpy(cu_num_tokens - 1).to(self._device)
        return SpecDecodeMetadata(
            draft_token_ids=none,
            num_draft_tokens=[0] * num_reqs,
            cu_num_draft_tokens=self._zeros[:num_reqs],
            cu_num_sampled_tokens=self._rows[1 : num_reqs + 1],
            target_logits_indices=none,
            bonus_logits_indices=rows,
            logits_indices=last,
        )
