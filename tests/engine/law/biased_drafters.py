"""Drafters of the V1 runner that break one rule each: controls only."""

from contextlib import contextmanager

from serving.engine.cpu.drafter import ConfidenceDrafter


class DrawnTokenDrafter(ConfidenceDrafter):
    """Scores a draft by the probability of the token drawn: the paper's rule."""

    def _sample_from_logits(self, logits, sampling_metadata):
        drafts, probs = super()._sample_from_logits(logits, sampling_metadata)
        if probs is not None:
            self._confidences[-1] = probs.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
        return drafts, probs


class GrammarBlindDrafter(ConfidenceDrafter):
    """Samples the drafts of requests with a grammar like all others."""

    def propose(self, *args, **kwargs):
        """Draft without knowing which rows follow a grammar."""
        self._grammar_rows = None
        return super().propose(*args, **kwargs)


@contextmanager
def draft_as(drafter, behaviour):
    """Let a drafter of the V1 runner break one rule."""
    honest = type(drafter)
    drafter.__class__ = type("BiasedDrafter", (behaviour, honest), {})
    try:
        yield
    finally:
        drafter.__class__ = honest
