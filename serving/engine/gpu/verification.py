"""vLLM's adaptive verification on a GPU, told by the scheduler how much to verify."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from policies.types import CostProfile
from serving.engine.compat import AdaptiveVerificationManager, async_tensor_h2d
from serving.engine.gpu.copy import DeviceReader, PendingCopy
from serving.engine.gpu.ranking import predict_acceptance, select_drafts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from serving.engine.compat import StepTimingSample
    from serving.engine.gpu.step_messages import VerificationOrder


class VerifiedDrafts(NamedTuple):
    """What a step verified, on its way to the host.

    Attributes:
        req_ids: The batch in the order of the rows copied.
        copy: Of the drafts' confidences and of how many of them were admitted.
    """

    req_ids: tuple[str, ...]
    copy: PendingCopy


class PlannedVerification(AdaptiveVerificationManager):
    """Trims a batch to the budget that came with it and ranks by our calibration.

    Keeps upstream's variable-length graphs, its compaction of the batch and the way it
    writes the boundaries of requests on the device. Changes:
        `get_num_tokens`: the budget is the scheduler's, the same on every rank;
            nothing is computed from confidences or clocks of one rank.
        `record_confidences`: rank 0's confidences are broadcast on the device. The
            host waits for nothing; upstream waits for the copy of the step before.
        `reallocate_drafts`: the torch twin of `policies.decisions.select` on calibrated
            confidence; starts the copy that carries the confidences to the scheduler.
        `batches_to_profile`: start-up steps carry no context.
        `set_initial_cost_curves`: start-up timings go to the planner.
    """

    num_bonus_tokens: int
    num_speculative_steps: int
    query_start_loc: torch.Tensor
    _max_total_logits: int
    _batch_budget: tuple[dict[str, int], dict[str, int], int] | None
    _confidence_probs: torch.Tensor
    _batch_draft_capacity: torch.Tensor
    _num_non_draft_tokens: torch.Tensor
    _cu_num_logits: torch.Tensor

    def __init__(
        self,
        upstream: AdaptiveVerificationManager,
        *,
        tp_group: Any,
        num_draft_passes: int,
        reader: DeviceReader | None,
    ) -> None:
        """Take over what upstream has built.

        Args:
            upstream: As the runner made it; not to be used any more.
            tp_group: vLLM's tensor-parallel group.
            num_draft_passes: Forward passes that make one full draft.
            reader: None on ranks that report nothing.
        """
        # All of it, so that whatever upstream's inherited methods need is there.
        self.__dict__.update(vars(upstream))
        self._tp_group = tp_group
        self._num_draft_passes = num_draft_passes
        self._reader = reader
        self._order: VerificationOrder | None = None
        self._verified: VerifiedDrafts | None = None
        self.profile: CostProfile | None = None

    def take_order(self, order: VerificationOrder | None) -> None:
        """Expect the coming step to be run under this order; None verifies all."""
        self._order = order
        self._verified = None

    def take_verified(self) -> VerifiedDrafts | None:
        """Hand over once what this step verifies."""
        verified, self._verified = self._verified, None
        return verified

    def add_request(self, req_idx: int) -> None:
        """Clear the confidences of a slot's last occupant."""
        self._confidence_probs[req_idx].fill_(1.0)

    def get_num_tokens(
        self,
        num_tokens_per_req: dict[str, int],
        draft_tokens: dict[str, list[int]],
    ) -> int:
        """Return the tokens of the trimmed batch; both arguments cover every request.

        What upstream's sampler cannot address in one chunk is cut here, by sizes that
        all ranks share.
        """
        num_drafts = {
            req_id: len(draft_tokens.get(req_id, ())) for req_id in num_tokens_per_req
        }
        num_others = {
            req_id: num_tokens - num_drafts[req_id]
            for req_id, num_tokens in num_tokens_per_req.items()
        }
        room = self._max_total_logits - len(num_drafts) * self.num_bonus_tokens
        draft_budget = max(0, min(sum(num_drafts.values()), room))
        if self._order is not None:
            draft_budget = min(draft_budget, self._order.draft_budget)
        self._batch_budget = (num_drafts, num_others, draft_budget)
        return sum(num_others.values()) + draft_budget

    def reallocate_drafts(
        self, req_ids: list[str], idx_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Admit the best drafts and write the boundaries of all requests.

        Args:
            req_ids: `[num_reqs]`, the batch in the runner's order.
            idx_mapping: `[num_reqs]`, slots of these requests.

        Returns:
            Running totals of logits `[num_reqs + 1]` and of tokens `[max_num_reqs +
            1]`, both on the device, and the number of drafts admitted.
        """
        batch_budget, self._batch_budget = self._batch_budget, None
        assert batch_budget is not None
        num_drafts, num_others, draft_budget = batch_budget
        num_reqs = len(req_ids)
        offered = np.array([num_drafts[req_id] for req_id in req_ids], dtype=np.int32)
        others = np.array([num_others[req_id] for req_id in req_ids], dtype=np.int32)
        admitted = self._batch_draft_capacity[:num_reqs]
        async_tensor_h2d(offered, out=admitted)
        confidence = self._confidence_probs[idx_mapping]
        if draft_budget == 0:
            admitted.zero_()
        elif draft_budget < int(offered.sum()):
            acceptance, weights = self._rank(req_ids, confidence)
            admitted.copy_(select_drafts(acceptance, admitted, draft_budget, weights))
        if self._reader is not None:
            # Clones: the next step overwrites both before the copy may have begun.
            copy = self._reader.start(confidence, admitted.clone())
            self._verified = VerifiedDrafts(tuple(req_ids), copy)
        others_gpu = self._num_non_draft_tokens[:num_reqs]
        async_tensor_h2d(others, out=others_gpu)
        cu_num_logits = self._cu_num_logits[: num_reqs + 1]
        _write_totals(admitted + self.num_bonus_tokens, cu_num_logits)
        _write_totals(admitted + others_gpu, self.query_start_loc[: num_reqs + 1])
        self.query_start_loc[num_reqs + 1 :].fill_(int(others.sum()) + draft_budget)
        return cu_num_logits, self.query_start_loc, draft_budget

    def record_confidences(
        self, confidence_probs: torch.Tensor, input_batch: Any
    ) -> None:
        """Keep this step's confidences for the ranking of the next step.

        Args:
            confidence_probs: `[max_num_reqs, num_steps]`, float32, rows in the order of
                the batch.
            input_batch: The batch.
        """
        fresh = confidence_probs[: input_batch.num_reqs]
        # On the device and in stream order; the host goes on at once. Bit-equal
        # confidences make every rank rank alike, whatever its kernels rounded to.
        self._tp_group.broadcast(fresh, src=0)
        self._confidence_probs[input_batch.idx_mapping] = fresh

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Yield upstream's start-up steps, without the context it lends each request.

        Its 8192 tokens a request would be read as the price of tokens: the planner
        learns that of context by itself.
        """
        for batch in super().batches_to_profile(capture_sizes):
            yield batch | {"context_len": 0}

    def set_initial_cost_curves(self, samples: Sequence[StepTimingSample]) -> None:
        """Keep upstream's start-up timings for the planner, which learns from there."""
        self.profile = make_profile(samples, self._num_draft_passes)

    def _rank(
        self, req_ids: list[str], confidence: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return acceptance and weights as the order says, on the device."""
        order = self._order
        if order is None or (order.scale is None and order.weights is None):
            return confidence, None
        row_of = {req_id: row for row, req_id in enumerate(order.req_ids)}
        rows = [row_of[req_id] for req_id in req_ids]
        num_reqs, scale, weights = len(rows), order.scale, order.weights
        parts = []
        if scale is not None:
            # A planner may know fewer positions than the engine can draft.
            num_unknown = max(0, self.num_speculative_steps - scale.intercept.size)
            intercept = np.pad(scale.intercept, (0, num_unknown), mode="edge")
            parts += [scale.effect[rows], intercept]
        if weights is not None:
            parts.append(weights[rows])
        # One copy for all of it.
        on_device = async_tensor_h2d(
            np.concatenate(parts).astype(np.float32), device=confidence.device
        )
        acceptance = confidence
        if scale is not None:
            acceptance = predict_acceptance(
                confidence,
                scale.slope,
                on_device[num_reqs : num_reqs + self.num_speculative_steps],
                on_device[:num_reqs],
                scale.max_log_odds,
            )
        return acceptance, None if weights is None else on_device[-num_reqs:]


def make_profile(
    samples: Iterable[StepTimingSample], num_draft_passes: int
) -> CostProfile:
    """Turn vLLM's start-up timings into a profile of forward passes.

    vLLM times a whole draft. Up to its limit of requests a dummy step has one token per
    request, and all passes of the drafter are alike; past it the further passes keep
    the cost they have at that many requests, and the rest is the first pass.

    Args:
        samples: Of dummy steps, several per size.
        num_draft_passes: Forward passes in one draft.
    """
    target: dict[int, list[float]] = defaultdict(list)
    draft: dict[int, list[float]] = defaultdict(list)
    num_reqs: dict[int, int] = {}
    for sample in samples:
        target[sample.num_target_tokens].append(sample.forward_ms)
        draft[sample.num_target_tokens].append(sample.drafter_ms)
        num_reqs[sample.num_target_tokens] = sample.num_reqs
    counts = sorted(target)
    pass_ms: dict[int, float] = {}
    draft_ms = []
    for count in counts:
        whole_ms = float(np.median(draft[count]))
        one_ms = pass_ms.setdefault(num_reqs[count], whole_ms / num_draft_passes)
        draft_ms.append(max(whole_ms - (num_draft_passes - 1) * one_ms, 1e-3))
    return CostProfile(
        num_tokens=tuple(counts),
        target_ms=tuple(float(np.median(target[count])) for count in counts),
        draft_ms=tuple(draft_ms),
        drafts_in_one_pass=num_draft_passes == 1,
    )


def _write_totals(lengths: torch.Tensor, out: torch.Tensor) -> None:
    out[:1].zero_()
    torch.cumsum(lengths, dim=0, out=out[1:])
