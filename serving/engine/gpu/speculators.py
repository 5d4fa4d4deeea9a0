"""V2 drafters: raw confidence, a depth that saves passes, marks for the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.engine.compat import (
    DraftModelSpeculator,
    OnlineAcceptanceEstimator,
    StandaloneARSpeculator,
    TargetDependentARSpeculator,
)
from serving.engine.reclass import reclass

if TYPE_CHECKING:
    import torch

    from serving.engine.gpu.clock import DeviceClock


class RawConfidence(OnlineAcceptanceEstimator):
    """Reports the largest draft probability itself and learns nothing.

    Upstream's estimator computes sigmoid(slope * log-odds + intercept) inside the
    captured draft graph. With slope 1 and intercept 0 that is the probability, which
    our calibration starts from; it learns on the host and is applied when drafts are
    ranked.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the estimator the identity."""
        super().__init__(*args, **kwargs)
        self.slope.fill_(1.0)
        self.intercepts.fill_(0.0)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Keep the coefficients."""


class PacedStandalone(StandaloneARSpeculator):
    """A draft model of its own that drafts as deep as it is asked to.

    vLLM 0.32 passes `num_speculative_tokens` to this drafter, which ignores it and
    always makes all its passes. At depth 0 the first pass still runs: it keeps the
    drafter's KV cache in step with the target's.
    """

    num_speculative_steps: int
    draft_tokens: torch.Tensor
    _clock: DeviceClock

    def propose(
        self, *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Draft `num_speculative_tokens` tokens for each request.

        Returns:
            `[num_reqs, num_speculative_steps]`; columns past the depth are stale.
        """
        full_depth = self.num_speculative_steps
        if num_speculative_tokens is not None:
            self.num_speculative_steps = max(1, min(full_depth, num_speculative_tokens))
        try:
            drafts = super().propose(
                *args, num_speculative_tokens=num_speculative_tokens, **kwargs
            )
        finally:
            self.num_speculative_steps = full_depth
        # Upstream returns a single column when it makes a single pass.
        return self.draft_tokens[: drafts.shape[0]]

    def _multi_step_decode(self, *args: Any, **kwargs: Any) -> None:
        self._clock.mark_draft_first_end()
        super()._multi_step_decode(*args, **kwargs)


class PacedTargetDependent(TargetDependentARSpeculator):
    """EAGLE, EAGLE-3 or MTP: upstream already drafts as deep as it is asked to."""

    _clock: DeviceClock

    def on_multi_step_decode_begin(self, num_reqs: int) -> None:
        """Mark the end of the first pass; called outside of captured graphs."""
        self._clock.mark_draft_first_end()
        super().on_multi_step_decode_begin(num_reqs)


def adopt_speculator(speculator: Any, clock: DeviceClock) -> None:
    """Let a drafter obey the depth and tell the clock; others stay as they are."""
    for behaviour in (PacedStandalone, PacedTargetDependent):
        if isinstance(speculator, behaviour.__bases__[0]):
            reclass(speculator, behaviour)
            speculator._clock = clock


def use_raw_confidence(speculator: Any) -> None:
    """Replace a loaded drafter's estimator, before its graphs are captured.

    DSpark has none: its confidence comes from a trained head.
    """
    if (
        isinstance(speculator, DraftModelSpeculator)
        and speculator.acceptance_estimator is not None
    ):
        speculator.acceptance_estimator = RawConfidence(
            speculator.max_num_reqs,
            speculator.num_speculative_steps,
            speculator.device,
        )
