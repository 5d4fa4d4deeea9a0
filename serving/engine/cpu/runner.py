"""V1 model runner: keeps drafting near limits, and leaves the drafter out at depth 0.

vLLM builds it with no factory to override, so it is re-classed after construction, as
its drafter is (`drafter`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from serving.engine.compat_cpu import GPUModelRunner
from serving.engine.cpu.cold_drafter import ColdDrafter
from serving.engine.cpu.drafter import ConfidenceDrafter
from serving.engine.cpu.plain_steps import PlainSteps
from serving.engine.cpu.step_messages import QUIET_ATTRIBUTE, STOP_ATTRIBUTE
from serving.engine.reclass import reclass
from serving.engine.shared.options import find_stop_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from policies.decisions.early_exit import EarlyExitRule
    from serving.engine.compat import SchedulerOutput
    from serving.engine.compat_cpu import SpecDecodeMetadata
    from serving.engine.shared.faults import FaultGuard

_METADATA_ARGUMENT = 6
"""Place of the attention metadata among vLLM's arguments after the first."""

_LIMIT_AWARE_METHODS = frozenset({"ngram", "suffix"})
"""Drafters without a model that stop at the context limit request by request."""


class UninterruptedRunner(GPUModelRunner):
    """A V1 runner that drafts for everyone although one request nears the limit.

    vLLM skips drafting for the *whole* batch when its longest sequence is within k
    tokens of the drafter's context, and leaves holes in the drafter's KV cache.
    `ConfidenceDrafter` keeps rows past the limit harmless, so the batch can go on; the
    scheduler drops the drafts of the request in question.

    A step that verifies nothing is prepared and sampled as if there were no drafter.
    One after which nothing is drafted either is vLLM's own step without speculation.
    """

    _drafter_skipped: bool
    _guard: FaultGuard
    _cold: ColdDrafter | None
    _plain: PlainSteps
    speculative_config: Any
    attn_groups: list[list[Any]]
    _no_drafts: torch.Tensor
    _can_run_alone: bool
    ran_alone: bool
    """Whether the latest step left the drafter out from its beginning."""
    ran_quietly: bool
    """Whether nobody asks what such a step took."""
    _notes_step: bool
    """Whether there is something to note of such a step: most of many are alike."""
    sample_start_s: float
    """When sampling last began."""
    draft_span_s: tuple[float, float]
    """When drafting last began and ended."""

    def execute_model(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the target, alone where nothing is verified nor to be drafted."""
        goes_on = self._cold is not None and self._guard.attempt(
            "drafter_error", self._cold.look, scheduler_output
        )
        self.ran_alone = (
            self._cold is not None
            and self._can_run_alone
            and scheduler_output.num_spec_tokens_to_schedule == 0
            and not scheduler_output.scheduled_spec_decode_tokens
            and scheduler_output.total_num_scheduled_tokens > 0
        )
        self.ran_quietly = self.ran_alone and getattr(
            scheduler_output, QUIET_ATTRIBUTE, False
        )
        self._notes_step = self.ran_alone and not (goes_on and self.ran_quietly)
        execute = super().execute_model
        if not self.ran_alone:
            return execute(scheduler_output, *args, **kwargs)
        drafters = self.drafter._draft_attn_layer_names
        groups = self.attn_groups
        self.attn_groups = [
            [one for one in group if not drafters.issuperset(one.layer_names)]
            for group in groups
        ]
        try:
            return self._hide_drafter(execute, scheduler_output, *args, **kwargs)
        finally:
            self.attn_groups = groups

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and draft unless the step is the target's alone.

        A request whose prompt goes on is sampled too, for nothing. vLLM then turns its
        seed's generator back, which one on the CPU cannot do: the error would end the
        engine. So the generator is not there in such a step.
        """
        self.sample_start_s = time.perf_counter()
        if self._cold is not None:
            self._guard.attempt("drafter_error", self._cold.keep_states)
        generators = self.input_batch.generators
        goes_on = self.discard_request_mask.np[: self.input_batch.num_reqs]
        set_aside = {row: generators.pop(row) for row in [*generators] if goes_on[row]}
        sample = super().sample_tokens
        try:
            if not self.ran_alone:
                return sample(*args, **kwargs)
            return self._hide_drafter(sample, *args, **kwargs)
        finally:
            generators.update(set_aside)

    def _hide_drafter(self, part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a part of a step in which vLLM is to see no drafter.

        What it does for speculation in every step, found nothing to verify and nothing
        to draft, took as long as a hundredth of a small model's step.
        """
        config, self.speculative_config = self.speculative_config, None
        try:
            return part(*args, **kwargs)
        finally:
            self.speculative_config = config

    def _bookkeeping_sync(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        if self._notes_step:
            self._guard.attempt("drafter_error", self._skip_drafter, scheduler_output)
        return super()._bookkeeping_sync(scheduler_output, *args, **kwargs)

    def _skip_drafter(self, scheduler_output: SchedulerOutput) -> None:
        assert self._cold is not None
        self.drafter.note_skipped()
        self._cold.skip(scheduler_output)

    def _calc_spec_decode_metadata(
        self,
        num_draft_tokens: NDArray[np.int32],
        cu_num_scheduled_tokens: NDArray[np.int64],
    ) -> SpecDecodeMetadata:
        if num_draft_tokens.any():
            return super()._calc_spec_decode_metadata(
                num_draft_tokens, cu_num_scheduled_tokens
            )
        return self._plain.describe(cu_num_scheduled_tokens)

    def _sample(
        self, logits: torch.Tensor | None, metadata: SpecDecodeMetadata | None
    ) -> Any:
        if metadata is not None and metadata.max_spec_len == 0:
            metadata = None
        return super()._sample(logits, metadata)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        fits = common_attn_metadata is not None and (
            self._stops_by_request()
            or super()._input_fits_in_drafter(common_attn_metadata)
        )
        self._drafter_skipped = not fits
        return fits

    def _stops_by_request(self) -> bool:
        """Whether the drafter bears requests past its context beside others."""
        if isinstance(self.drafter, ConfidenceDrafter):
            return not self.drafter.uses_mrope
        return self.speculative_config.method in _LIMIT_AWARE_METHODS

    def propose_draft_token_ids(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        """Draft, ending early where the planner allows it.

        At depth 0 a drafter that can catch up later is skipped altogether.
        """
        if isinstance(self.drafter, ConfidenceDrafter):
            if self._cold is not None:
                attempt = self._guard.attempt
                if scheduler_output.num_spec_tokens_to_schedule == 0:
                    attempt("drafter_error", self._skip_drafter, scheduler_output)
                    return self._no_drafts[: self.input_batch.num_reqs]
                # What it fails to fill costs accepted drafts, not the output's law.
                attempt(
                    "drafter_error",
                    self._cold.fill_backlog,
                    scheduler_output,
                    args[_METADATA_ARGUMENT],
                )
            self.drafter._grammar_rows = self._find_grammar_rows()
            stop: EarlyExitRule | None = getattr(scheduler_output, STOP_ATTRIBUTE, None)
            if stop is not None:
                self._guard.attempt("stop_error", self._let_exit_early, stop)
        begin_s = time.perf_counter()
        drafts = super().propose_draft_token_ids(scheduler_output, *args, **kwargs)
        self.draft_span_s = begin_s, time.perf_counter()
        return drafts

    def _let_exit_early(self, stop: EarlyExitRule) -> None:
        req_ids = self.input_batch.req_ids
        ends = [find_stop_token_ids(self.requests[r].sampling_params) for r in req_ids]
        self.drafter.exit_early(stop.start(tuple(req_ids)), ends)

    def _find_grammar_rows(self) -> torch.Tensor | None:
        rows = [
            row
            for row, req_id in enumerate(self.input_batch.req_ids)
            if (params := self.requests[req_id].sampling_params) is not None
            and params.structured_outputs is not None
        ]
        return torch.tensor(rows, device=self.device) if rows else None


def adopt_runner(runner: GPUModelRunner, guard: FaultGuard) -> None:
    """Give a constructed runner the behaviour of `UninterruptedRunner`, in place.

    Idempotent. `guard` counts the faults of runner and drafter.
    """
    if reclass(runner, UninterruptedRunner):
        runner._guard = guard
        runner._drafter_skipped = False
        runner.ran_alone = runner.ran_quietly = runner._notes_step = False
        runner._no_drafts = torch.empty(
            runner.max_num_reqs, 0, dtype=torch.int64, device=runner.device
        )
        runner.draft_span_s, runner.sample_start_s = (0.0, 0.0), 0.0
        runner._plain = PlainSteps(runner.max_num_reqs, runner.device)
        runner._cold = ColdDrafter(runner) if ColdDrafter.supports(runner) else None
        # Recurrent layers read their state by what speculation did to it, in every
        # step; a drafter of a single pass keeps no clock.
        runner._can_run_alone = not (
            runner.model_config.is_hybrid
            or runner.model_config.is_attention_free
            or runner.vllm_config.speculative_config.parallel_drafting
        )
