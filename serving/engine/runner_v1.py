"""V1 model runner: capture the drafter's confidence, keep it drafting near limits.

vLLM builds the drafter and (on the CPU) the runner itself, with no factory to
override, so both are re-classed after construction: the object keeps its state and
gains a subclass whose methods call `super()`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from serving.engine.cold_drafter import ColdDrafter
from serving.engine.compat_cpu import GPUModelRunner, SpecDecodeBaseProposer
from serving.engine.drafts import WorkerTimes
from serving.engine.options import find_stop_token_ids
from serving.engine.plain_steps import PlainSteps
from serving.engine.reclass import reclass
from serving.engine.step_messages import QUIET_ATTRIBUTE, STOP_ATTRIBUTE

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from policies.stopping import DraftStop, DraftWatch
    from serving.engine.compat import SchedulerOutput
    from serving.engine.compat_cpu import (
        CommonAttentionMetadata,
        SamplingMetadata,
        SpecDecodeMetadata,
    )


class ConfidenceDrafter(SpecDecodeBaseProposer):
    """Records the largest probability of the draft distribution at every position.

    A function of the prefix alone, so that selecting by it never conditions on the
    token drawn. Works for drafters that turn hidden states into logits one position
    at a time (draft_model, eagle, eagle3, mtp).
    """

    _confidences: list[torch.Tensor]
    _grammar_rows: torch.Tensor | None
    _context_limit: int
    _first_pass_end_s: float
    _draft_end_s: float
    _num_drafted: int
    _watch: DraftWatch | None
    _stop_token_ids: list[set[int | None]]
    _drawn: list[tuple[torch.Tensor, torch.Tensor | None]]
    draft_start_s: float

    def watch(
        self,
        watch: DraftWatch,
        stop_token_ids: list[set[int | None]],
    ) -> None:
        """Let the coming draft end early.

        Args:
            watch: Asked between two passes.
            stop_token_ids: `[num_reqs]`, what ends each request.
        """
        self._watch, self._stop_token_ids = watch, stop_token_ids

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draft as vLLM does, with a fresh record and clock for this step."""
        self._confidences = []
        self._drawn = []
        self._first_pass_end_s = 0.0
        self.draft_start_s = time.perf_counter()
        try:
            drafts: torch.Tensor = super().propose(*args, **kwargs)
        except _EndOfDraftError:
            drafts = self._stack_drawn()
        self._watch = None
        self._drawn = []
        self._num_drafted = drafts.shape[1]
        self._draft_end_s = time.perf_counter()
        return drafts

    def _stack_drawn(self) -> torch.Tensor:
        """Return what was drawn so far, as vLLM does after its last pass."""
        probs = [one for _, one in self._drawn if one is not None]
        self._last_draft_probs = torch.stack(probs, dim=1) if probs else None
        return torch.stack([tokens for tokens, _ in self._drawn], dim=1)

    def note_skipped(self) -> None:
        """Stop the step's clock where drafting would have begun."""
        self._confidences = []
        self._num_drafted = 0
        self.draft_start_s = self._first_pass_end_s = self._draft_end_s = (
            time.perf_counter()
        )

    def take_times(
        self, step_start_s: float, cold: ColdDrafter | None
    ) -> WorkerTimes | None:
        """Hand over this step's clock readings once; None if nothing was drafted."""
        start = self.draft_start_s
        if start < step_start_s:
            return None
        first_end = self._first_pass_end_s or self._draft_end_s
        self.draft_start_s = 0.0
        catch_up_ms = 0.0 if cold is None else cold.catch_up_ms
        return WorkerTimes(
            target_ms=1e3 * (start - step_start_s) - catch_up_ms,
            draft_first_ms=1e3 * (first_end - start),
            draft_next_ms=1e3 * (self._draft_end_s - first_end),
            depth=self._num_drafted,
            catch_up_ms=catch_up_ms,
            num_caught_up=0 if cold is None else cold.num_caught_up,
        )

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> Any:
        """Keep positions of requests past the drafter's context inside its tables.

        Their drafts are dropped by the scheduler; the other requests of the batch
        go on drafting.
        """
        result = super().set_inputs_first_pass(*args, **kwargs)
        if not self.uses_mrope:
            self.positions[: result[0]].clamp_(max=self._context_limit - 1)
        return result

    def _update_positions_dependent_metadata(
        self,
        positions: torch.Tensor,
        common_attn_metadata: CommonAttentionMetadata,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Keep rows past the drafter's context from writing into their KV cache.

        vLLM masks the slot of a position past the limit and maps the position to 0,
        but counts on from there in the next pass and writes to positions 1, 2, ...,
        in blocks that prefix caching may share. Held at the last position, a row is
        past the limit, and masked, in every further pass.

        Every pass but the first begins here, so a draft that does not pay ends here.
        """
        if self._watch is not None and self._confidences:
            drawn = self._drawn[-1][0].tolist()
            stops = zip(drawn, self._stop_token_ids, strict=True)
            ended = [row for row, (token, ends) in enumerate(stops) if token in ends]
            if not self._watch.pays_to_go_on(self._confidences[-1].tolist(), ended):
                raise _EndOfDraftError
        # vLLM's own count on the host, give or take the tokens of this draft.
        longest = common_attn_metadata.max_seq_len + self.num_speculative_tokens + 1
        past_limit = None
        if longest >= self._context_limit and not self.uses_mrope:
            past_limit = positions + 1 >= self._context_limit
        advanced: torch.Tensor = super()._update_positions_dependent_metadata(
            positions, common_attn_metadata, *args, **kwargs
        )
        if past_limit is not None:
            advanced.masked_fill_(past_limit, self._context_limit - 1)
        return advanced

    def _sample_draft_tokens(
        self, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw as vLLM does, and keep it in case the draft ends here."""
        drawn: tuple[torch.Tensor, torch.Tensor | None] = super()._sample_draft_tokens(
            *args, **kwargs
        )
        self._drawn.append(drawn)
        return drawn

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.use_local_argmax_reduction or self.use_heterogeneous_vocab:
            # No full logits in the target's vocabulary here: draft without a record.
            drafts: torch.Tensor = super()._greedy_sample(hidden_states)
            return drafts
        logits = self.model.compute_logits(hidden_states)
        self._record(logits)
        return logits.argmax(dim=-1)

    def _sample_from_logits(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Recorded first: vLLM divides the logits by the temperature in place.
        self._record(logits, sampling_metadata.temperature)
        argmax = logits.argmax(dim=-1) if self._grammar_rows is not None else None
        drafts, probs = super()._sample_from_logits(logits, sampling_metadata)
        if argmax is not None and probs is not None:
            # A grammar cuts at the first invalid *drawn* token, which would bias
            # sampled drafts; an argmax draft is a function of the prefix.
            rows = self._grammar_rows
            drafts[rows] = argmax[rows]
            probs[rows] = torch.nn.functional.one_hot(argmax[rows], probs.shape[-1]).to(
                probs.dtype
            )
        return drafts, probs

    def _record(
        self, logits: torch.Tensor, temperature: torch.Tensor | None = None
    ) -> None:
        scores = logits.float()
        if temperature is not None and temperature.shape[0] == scores.shape[0]:
            # Greedy rows carry temperature 0 and draft from the raw distribution.
            divisor = torch.where(temperature < _GREEDY_BELOW, 1.0, temperature)
            scores = scores / divisor.unsqueeze(-1)
        # Two operations; between two passes of a small drafter every one counts.
        self._confidences.append(scores.softmax(dim=-1).amax(dim=-1))
        if not self._first_pass_end_s:
            self._first_pass_end_s = time.perf_counter()

    def take_confidence(self) -> NDArray[np.float64] | None:
        """Hand over this step's record once.

        Returns:
            `[num_reqs, depth]`, float64, 0-1; None if the drafter did not run or has
            no logits.
        """
        if not self._confidences:
            return None
        record = torch.stack(self._confidences, dim=1).double().cpu().numpy()
        self._confidences = []
        confidence: NDArray[np.float64] = record
        return confidence


class _EndOfDraftError(Exception):
    """Leaves vLLM's drafting loop, which has no exit of its own, between two passes."""


_METADATA_ARGUMENT = 6
"""Place of the attention metadata among vLLM's arguments after the first."""

_GREEDY_BELOW = 1e-5
"""vLLM's own threshold below which a temperature means argmax."""

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
    draft_span_s: tuple[float, float]
    """When drafting last began and ended."""

    def execute_model(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the target, alone where nothing is verified nor to be drafted."""
        goes_on = self._cold is not None and self._cold.look(scheduler_output)
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
            assert self._cold is not None
            self.drafter.note_skipped()
            self._cold.skip(scheduler_output)
        return super()._bookkeeping_sync(scheduler_output, *args, **kwargs)

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

        At depth 0 a draft model is skipped altogether; it catches up later.
        """
        if isinstance(self.drafter, ConfidenceDrafter):
            if self._cold is not None:
                if scheduler_output.num_spec_tokens_to_schedule == 0:
                    self.drafter.note_skipped()
                    self._cold.skip(scheduler_output)
                    return self._no_drafts[: self.input_batch.num_reqs]
                self._cold.catch_up(scheduler_output, args[_METADATA_ARGUMENT])
            self.drafter._grammar_rows = self._find_grammar_rows()
            stop: DraftStop | None = getattr(scheduler_output, STOP_ATTRIBUTE, None)
            if stop is not None:
                req_ids = self.input_batch.req_ids
                ends = [
                    find_stop_token_ids(self.requests[r].sampling_params)
                    for r in req_ids
                ]
                self.drafter.watch(stop.follow(tuple(req_ids)), ends)
        begin_s = time.perf_counter()
        drafts = super().propose_draft_token_ids(scheduler_output, *args, **kwargs)
        self.draft_span_s = begin_s, time.perf_counter()
        return drafts

    def _find_grammar_rows(self) -> torch.Tensor | None:
        rows = [
            row
            for row, req_id in enumerate(self.input_batch.req_ids)
            if (params := self.requests[req_id].sampling_params) is not None
            and params.structured_outputs is not None
        ]
        return torch.tensor(rows, device=self.device) if rows else None


def adopt_runner(runner: GPUModelRunner) -> None:
    """Give a constructed runner the behaviour of `UninterruptedRunner`, in place.

    Idempotent.
    """
    if reclass(runner, UninterruptedRunner):
        runner._drafter_skipped = False
        runner.ran_alone = runner.ran_quietly = runner._notes_step = False
        runner._no_drafts = torch.empty(
            runner.max_num_reqs, 0, dtype=torch.int64, device=runner.device
        )
        runner.draft_span_s = 0.0, 0.0
        runner._plain = PlainSteps(runner.max_num_reqs, runner.device)
        runner._cold = ColdDrafter(runner) if ColdDrafter.supports(runner) else None
        # Recurrent layers read their state by what speculation did to it, in every
        # step; a drafter of a single pass keeps no clock.
        runner._can_run_alone = not (
            runner.model_config.is_hybrid
            or runner.model_config.is_attention_free
            or runner.vllm_config.speculative_config.parallel_drafting
        )


def adopt_drafter(runner: GPUModelRunner) -> bool:
    """Give a loaded runner's drafter the behaviour of `ConfidenceDrafter`, in place.

    Idempotent.

    Returns:
        Whether the drafter is one that reports confidence.
    """
    drafter = getattr(runner, "drafter", None)
    if not isinstance(drafter, SpecDecodeBaseProposer) or drafter.parallel_drafting:
        return False
    if not reclass(drafter, ConfidenceDrafter):
        return True
    drafter._confidences = []
    drafter._grammar_rows = None
    drafter._watch = None
    drafter._stop_token_ids = []
    drafter._drawn = []
    drafter._num_drafted = 0
    drafter.draft_start_s = 0.0
    limit = min(drafter.max_model_len, runner.effective_drafter_max_model_len)
    drafter._context_limit = limit
    # The drafter's own kernels mask slots and positions past this length.
    drafter.max_model_len = limit
    return True
