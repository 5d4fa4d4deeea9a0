"""Drafter of the V1 runner: records its confidence, ends early, bears its limits.

vLLM builds it with no factory to override, so it is re-classed after construction: the
object keeps its state and gains a subclass whose methods call `super()`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from serving.engine.compat_cpu import LocalArgmaxMixin, SpecDecodeBaseProposer
from serving.engine.cpu.drafter_traits import GREEDY_BELOW
from serving.engine.cpu.drafts import WorkerTimes
from serving.engine.reclass import reclass

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from policies.decisions.early_exit import EarlyExit
    from serving.engine.compat_cpu import (
        CommonAttentionMetadata,
        GPUModelRunner,
        SamplingMetadata,
    )
    from serving.engine.cpu.cold_drafter import ColdDrafter
    from serving.engine.shared.faults import FaultGuard


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
    _early_exit: EarlyExit | None
    _stop_token_ids: list[set[int | None]]
    _drawn: list[tuple[torch.Tensor, torch.Tensor | None]]
    _guard: FaultGuard
    draft_start_s: float

    def exit_early(
        self, early_exit: EarlyExit, stop_token_ids: list[set[int | None]]
    ) -> None:
        """Let the coming draft end early.

        Args:
            early_exit: Asked between two passes.
            stop_token_ids: `[num_reqs]`, what ends each request.
        """
        self._early_exit, self._stop_token_ids = early_exit, stop_token_ids

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
        self._early_exit = None
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
        self, step_start_s: float, sample_start_s: float, cold: ColdDrafter | None
    ) -> WorkerTimes | None:
        """Hand over this step's clock readings once; None if nothing was drafted.

        Args:
            step_start_s: When the target's pass began.
            sample_start_s: When it had ended and sampling began.
            cold: What fills the drafter's cache, before it drafts.
        """
        start = self.draft_start_s
        if start < step_start_s:
            return None
        first_end = self._first_pass_end_s or self._draft_end_s
        self.draft_start_s = 0.0
        backlog_ms = 0.0 if cold is None else cold.backlog_ms
        return WorkerTimes(
            target_ms=1e3 * (sample_start_s - step_start_s),
            sample_ms=1e3 * (start - sample_start_s) - backlog_ms,
            draft_first_ms=1e3 * (first_end - start),
            draft_next_ms=1e3 * (self._draft_end_s - first_end),
            depth=self._num_drafted,
            backlog_ms=backlog_ms,
            num_backlog=0 if cold is None else cold.num_backlog,
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
        if self._early_exit is not None and self._guard.attempt(
            "stop_error", self._is_over
        ):
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

    def _is_over(self) -> bool:
        """Whether the draft ends with the pass just made."""
        if self._early_exit is None or not self._confidences:
            return False
        drawn = self._drawn[-1][0].tolist()
        stops = zip(drawn, self._stop_token_ids, strict=True)
        ended = [row for row, (token, ends) in enumerate(stops) if token in ends]
        return not self._early_exit.should_continue(
            self._confidences[-1].tolist(), ended
        )

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw as vLLM does, and keep it in case the draft ends here."""
        drawn = self._draw(hidden_states, sampling_metadata)
        self._drawn.append(drawn)
        # With its draw, or a depth of 1 would be priced without any.
        self._first_pass_end_s = self._first_pass_end_s or time.perf_counter()
        return drawn

    def _draw(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        offsets, is_greedy = self._offsets_to_target(), sampling_metadata.all_greedy
        if offsets is None or is_greedy or not self._enable_probabilistic_draft_probs:
            drawn: tuple[torch.Tensor, torch.Tensor | None]
            drawn = super()._sample_draft_tokens(hidden_states, sampling_metadata)
            return drawn
        # Noise for every token of the target's would take longer than the pass.
        logits = self._compute_own_logits(hidden_states)
        own: tuple[torch.Tensor, Any]
        own = self._sample_from_logits(logits, sampling_metadata)
        drafts, probs = own
        spread: torch.Tensor = probs.new_zeros(len(probs), self.model.config.vocab_size)
        spread[:, torch.arange(len(offsets)) + offsets] = probs
        return drafts + offsets[drafts], spread

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.use_local_argmax_reduction or self.use_heterogeneous_vocab:
            # No full logits in the target's vocabulary here: draft without a record.
            drafts: torch.Tensor = super()._greedy_sample(hidden_states)
            return drafts
        offsets = self._offsets_to_target()
        if offsets is None:
            logits = self.model.compute_logits(hidden_states)
        else:
            logits = self._compute_own_logits(hidden_states)
        self._guard.attempt("report_error", self._record, logits)
        drafts = logits.argmax(dim=-1)
        return drafts if offsets is None else drafts + offsets[drafts]

    def _compute_own_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return those of the head's own vocabulary.

        The model would scatter them over the target's, six times as many, which takes
        longer than the rest of a pass.
        """
        logits: torch.Tensor
        logits = self.model.logits_processor(self.model.lm_head, hidden_states)
        return logits

    def _offsets_to_target(self) -> torch.Tensor | None:
        """Target ids less draft ids of a head that knows fewer tokens; else None."""
        if not isinstance(self.model, LocalArgmaxMixin):
            return None
        offsets: torch.Tensor | None
        offsets = getattr(self.model, "draft_id_to_target_id", None)
        return offsets

    def _sample_from_logits(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Recorded first: vLLM divides the logits by the temperature in place.
        self._guard.attempt(
            "report_error", self._record, logits, sampling_metadata.temperature
        )
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
            divisor = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
            scores = scores / divisor.unsqueeze(-1)
        # Two operations; between two passes of a small drafter every one counts.
        self._confidences.append(scores.softmax(dim=-1).amax(dim=-1))

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


def adopt_drafter(runner: GPUModelRunner) -> bool:
    """Give an adopted runner's drafter the behaviour of `ConfidenceDrafter`, in place.

    Idempotent.

    Returns:
        Whether the drafter is one that reports confidence.
    """
    drafter = getattr(runner, "drafter", None)
    if not isinstance(drafter, SpecDecodeBaseProposer) or drafter.parallel_drafting:
        return False
    if not reclass(drafter, ConfidenceDrafter):
        return True
    drafter._guard = runner._guard
    drafter._confidences = []
    drafter._grammar_rows = None
    drafter._early_exit = None
    drafter._stop_token_ids = []
    drafter._drawn = []
    drafter._num_drafted = 0
    drafter.draft_start_s = 0.0
    limit = min(drafter.max_model_len, runner.effective_drafter_max_model_len)
    drafter._context_limit = limit
    # The drafter's own kernels mask slots and positions past this length.
    drafter.max_model_len = limit
    return True
