"""Workers that break one rule of losslessness each, so that a test can see it.

Controls only: a statistical test that accepts the product proves something only if it
rejects these under the same conditions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.engine.cpu.drafter import ConfidenceDrafter
from serving.engine.cpu.worker import TetrisCPUWorker

if TYPE_CHECKING:
    import torch

    from serving.engine.compat_cpu import SamplingMetadata


class DrawnTokenDrafter(ConfidenceDrafter):
    """Scores a draft by the probability of the token drawn: the paper's rule."""

    def _sample_from_logits(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        drafts, probs = super()._sample_from_logits(logits, sampling_metadata)
        if probs is not None:
            self._confidences[-1] = probs.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
        return drafts, probs


class GrammarBlindDrafter(ConfidenceDrafter):
    """Samples the drafts of requests with a grammar like all others."""

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draft without knowing which rows follow a grammar."""
        self._grammar_rows = None
        return super().propose(*args, **kwargs)


class DrawnTokenWorker(TetrisCPUWorker):
    """A worker that ranks drafts as the paper does."""

    def load_model(self, **kwargs: Any) -> None:
        """Load as the product does, then bias the drafter."""
        super().load_model(**kwargs)
        _bias(self.model_runner.drafter, DrawnTokenDrafter)


class GrammarBlindWorker(TetrisCPUWorker):
    """A worker that drafts structured requests as if they were free."""

    def load_model(self, **kwargs: Any) -> None:
        """Load as the product does, then bias the drafter."""
        super().load_model(**kwargs)
        _bias(self.model_runner.drafter, GrammarBlindDrafter)


def _bias(drafter: ConfidenceDrafter, behaviour: type[ConfidenceDrafter]) -> None:
    drafter.__class__ = type("BiasedDrafter", (behaviour, type(drafter)), {})
