"""What a policy is: the one object an engine asks before a step and tells after it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from policies.decisions.batching import BatchPlan, EngineLoad
    from policies.decisions.early_exit import EarlyExitRule
    from policies.types import (
        AcceptanceScale,
        CostProfile,
        DraftBatch,
        DraftSelection,
        StepTiming,
        VerificationOutcome,
    )


class Planner(ABC):
    """Decides for one engine which drafts are verified and how deep to draft.

    A policy must say three things: `select`, `choose_depth`, `observe`. The rest has
    answers that leave the engine as it is.

    **Order of calls.** `fit_profile` once, when the engine has timed itself at its
    start. Then in every step

    1. `observe_timing` of steps that have finished,
    2. `select`, if any running request has drafts,
    3. `plan_batch`, before the engine looks at its queue,
    4. `choose_depth` for the drafting after this step's verification; then
       `early_exit`, from engines that can end a draft between two passes
       (`EngineLimits.exits_early`), or `acceptance_scale`, from engines that rank
       drafts on the device,
    5. `observe`, once the target has judged the drafts.

    `forget` comes when a request ends, `note_skipped_steps` after steps at depth 0 that
    were not planned. A call that raises is counted, logged once, and the step verifies
    all its drafts: no policy can stop an engine.

    **Causality** is what keeps output lossless. Whether the draft at position j of a
    request is verified may depend on what was known before that token was drawn: the
    request's confidences up to j (each describes a distribution, not a draw), other
    requests, what was learnt before. Never on confidences after j, which depend on
    the token drawn at j. Where `DraftBatch.drafts_are_sampled` that is binding, and
    a budget computed from all confidences breaks it; where it is False (drafts are
    the likeliest tokens, or verification takes them for certain) any rule is exact.
    `policies.testing` checks it.

    **Engines.** On a CPU (vLLM's V1 runner) the batch holds the very drafts, and
    `DraftSelection.num_admitted` is what is verified. On a GPU (V2 runner) steps
    overlap: `select` sees confidences that are a step old. `num_admitted` then limits
    each request's drafts, unless the selection says `may_reallocate`: then only
    `draft_budget` counts, and the device gives it to the drafts of the whole batch
    that rank highest by fresh confidences through `acceptance_scale`.
    """

    __slots__ = ()

    @abstractmethod
    def select(self, batch: DraftBatch) -> DraftSelection:
        """Choose the drafts to verify in the coming step; must not change `batch`."""

    @abstractmethod
    def choose_depth(
        self, num_reqs: int, latency_target_ms: float | None = None
    ) -> int:
        """Choose how many tokens each request drafts after the coming step.

        Args:
            num_reqs: Requests in the step, >= 0.
            latency_target_ms: The tightest time per token that a running request
                wants; None where none does.

        Returns:
            0 to the policy's largest depth; engines clip it to their own.
        """

    @abstractmethod
    def observe(self, outcome: VerificationOutcome) -> None:
        """Learn from a finished step what was accepted."""

    def observe_timing(self, timing: StepTiming) -> None:
        """Learn from a finished step what it cost. Default: ignore it."""

    def fit_profile(self, profile: CostProfile) -> None:
        """Take in forward passes timed at start-up. Default: ignore them."""

    def acceptance_scale(
        self,
        req_ids: Sequence[Hashable],  # noqa: ARG002 - for those who override it
    ) -> AcceptanceScale | None:
        """Return how confidence becomes acceptance; None ranks by confidence itself."""
        return None

    def early_exit(
        self,
        req_ids: Sequence[Hashable],  # noqa: ARG002 - for those who override it
        weights: NDArray[np.float64] | None = None,  # noqa: ARG002 - likewise
    ) -> EarlyExitRule | None:
        """Return when the coming draft may end early; None drafts to its depth.

        Args:
            req_ids: `[num_reqs]`.
            weights: `[num_reqs]`, > 0; None where all are alike.
        """
        return None

    def note_skipped_steps(self, num_steps: int) -> None:
        """Count steps at depth 0 that nobody asked about. Default: do not.

        Engines that can leave their drafter out go on at depth 0 for some steps while
        the same requests run, and say here how many they were before they ask again.
        """

    def forget(self, req_id: Hashable) -> None:
        """Drop what is known about a finished request. Default: nothing is."""

    def plan_batch(self, load: EngineLoad) -> BatchPlan | None:  # noqa: ARG002
        """Choose limits for the coming step; None leaves the engine's own."""
        return None

    def best_fixed(self, num_reqs: int) -> int | None:  # noqa: ARG002
        """Return the fixed draft length that promises most; None without an opinion.

        An audit compares the policy with it (`policies.audit`).

        Args:
            num_reqs: Requests that decode, >= 1.

        Returns:
            From 1 to the policy's largest depth.
        """
        return None

    def report(self) -> dict[str, float]:
        """Return gauges for telemetry, by name. Default: none."""
        return {}

    def export_state(self) -> dict[str, Any]:
        """Return what a new replica can start from, as plain values. Default: {}."""
        return {}

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from another planner's `export_state`; {} changes nothing.

        Raises:
            ValueError: If it does not fit; nothing has changed then.
        """
