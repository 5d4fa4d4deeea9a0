"""V1 runner that can skip its drafter entirely and catch up later."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from serving.engine.compat_cpu import (
    CUDAGraphMode,
    DraftModelProposer,
    set_forward_context,
)
from serving.engine.cpu.drafter_cache import DrafterCache, MissingSpan, split_spans
from serving.engine.cpu.step_messages import REBUILD_ATTRIBUTE
from serving.engine.cpu.target_states import TargetStates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from serving.engine.compat import SchedulerOutput
    from serving.engine.compat_cpu import CommonAttentionMetadata, GPUModelRunner


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Steps without the drafter in which the same requests get a token each.

    Attributes:
        starts: Position of each request in the first of them, in the order of rows.
    """

    starts: dict[str, int]

    def goes_on(self, output: SchedulerOutput) -> bool:
        """Whether a step is another one of these."""
        num_tokens = output.num_scheduled_tokens
        return (
            output.total_num_scheduled_tokens == len(self.starts)
            and not output.finished_req_ids
            and not output.scheduled_cached_reqs.resumed_req_ids
            and num_tokens.keys() == self.starts.keys()
        )


class ColdDrafter:
    """Skips a runner's drafter at depth 0 and fills its KV cache on resume.

    For draft models, which read tokens alone, and for EAGLE heads, for which the
    target's hidden states are kept (`TargetStates`). Other heads hand on states of
    their own.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        """Attach to a runner whose models are loaded."""
        self._runner = runner
        self._cache: DrafterCache | None = None
        self._stretch: _Stretch | None = None
        self._states: TargetStates | None = None
        if TargetStates.supports(runner):
            self._states = TargetStates(runner)
        self.num_backlog = 0
        self.backlog_ms = 0.0

    @staticmethod
    def supports(runner: GPUModelRunner) -> bool:
        """Whether the runner's drafter can be skipped without losing anything."""
        drafter = getattr(runner, "drafter", None)
        return isinstance(drafter, DraftModelProposer) or TargetStates.supports(runner)

    def keep_states(self) -> None:
        """Keep what an EAGLE head may have to read later, before a step is sampled."""
        state = self._runner.execute_model_state
        if self._states is not None and state is not None:
            self._states.keep(state)

    def look(self, output: SchedulerOutput) -> bool:
        """Look at a step before the runner takes it in, whatever becomes of it.

        While the same requests go on, a token at a time and without the drafter, there
        is nothing to note but where that began. Their rows are read when it ends: with
        the next step they may be gone.

        Returns:
            Whether they do, so that this step needs no `skip` if it is one.
        """
        stretch = self._stretch
        if stretch is None:
            return False
        if output.num_spec_tokens_to_schedule == 0 and stretch.goes_on(output):
            return True
        self._stretch = None
        batch = self._runner.input_batch
        ends = batch.num_computed_tokens_cpu.tolist()
        blocks = self._blocks()
        assert self._cache is not None
        for row, (req_id, start) in enumerate(stretch.starts.items()):
            self._cache.skip(req_id, start, ends[row] + 1 - start, blocks[row])
        return False

    def skip(self, output: SchedulerOutput) -> None:
        """Note what this step leaves out."""
        self.num_backlog = 0
        self.backlog_ms = 0.0
        if self._stretch is not None:
            return
        cache = self._prepare(output)
        req_ids = self._runner.input_batch.req_ids
        starts = self._runner.input_batch.num_computed_tokens_cpu.tolist()
        if output.total_num_scheduled_tokens == len(req_ids):
            self._stretch = _Stretch(dict(zip(req_ids, starts, strict=False)))
            return
        blocks, counts = self._blocks(), output.num_scheduled_tokens
        for row, req_id in enumerate(req_ids):
            cache.skip(req_id, starts[row], counts[req_id], blocks[row])

    def fill_backlog(
        self, output: SchedulerOutput, metadata: CommonAttentionMetadata
    ) -> None:
        """Fill what earlier skips left out, in as few passes as fit the buffers.

        And all of requests whose KV is in doubt.
        """
        self.num_backlog = 0
        self.backlog_ms = 0.0
        cache = self._prepare(output)
        for req_id in getattr(output, REBUILD_ATTRIBUTE, ()):
            cache.doubt(req_id)
        if cache.is_complete:
            return
        req_ids = self._runner.input_batch.req_ids
        num_reqs = len(req_ids)
        starts = self._runner.input_batch.num_computed_tokens_cpu[:num_reqs]
        scheduled = output.num_scheduled_tokens
        counts = np.fromiter((scheduled[req_id] for req_id in req_ids), int, num_reqs)
        firsts = cache.fill(req_ids, starts, counts, self._blocks())
        # Past its context the drafter has no rotation to compute with.
        limit = self._runner.drafter._context_limit
        spans = [
            MissingSpan(row, first, min(int(starts[row]), limit))
            for row, first in firsts.items()
            if first < limit
        ]
        begin_s = time.perf_counter()
        for batch in split_spans(spans, self._runner.drafter.max_num_tokens):
            self._run_pass(batch, metadata)
        self.backlog_ms = 1e3 * (time.perf_counter() - begin_s)

    def _blocks(self) -> NDArray[np.int32]:
        """Return the block ids by row of the batch, `[max_num_reqs, max_blocks]`."""
        # vLLM lets a draft model write by the blocks of the first group of layers.
        group = 0 if self._states is None else self._runner.drafter.kv_cache_gid
        blocks: NDArray[np.int32] = self._runner.input_batch.block_table[
            group
        ].get_numpy_array()
        return blocks

    def _prepare(self, output: SchedulerOutput) -> DrafterCache:
        """Create the bookkeeping on first use; take in new and resumed requests."""
        if self._cache is None:
            self._cache = DrafterCache(self._runner.drafter.block_size)
        batch = self._runner.input_batch
        arrivals = [request.req_id for request in output.scheduled_new_reqs]
        arrivals.extend(output.scheduled_cached_reqs.resumed_req_ids)
        for req_id in arrivals:
            row = batch.req_id_to_index.get(req_id)
            if row is not None:
                self._cache.admit(
                    req_id,
                    int(batch.num_computed_tokens_cpu[row]),
                    self._blocks()[row],
                )
        self._cache.prune(self._runner.requests)
        return self._cache

    def _run_pass(
        self, spans: list[MissingSpan], metadata: CommonAttentionMetadata
    ) -> None:
        """Run the drafter over missing positions for the sake of their KV.

        An EAGLE head sees the token after each position, as in vLLM's own first pass.
        """
        drafter = self._runner.drafter
        ahead = 0 if self._states is None else 1
        rows = torch.tensor([span.row for span in spans])
        counts = torch.tensor([span.end - span.start for span in spans])
        ends = torch.tensor([span.end for span in spans], dtype=torch.int32)
        query_start_loc = torch.zeros(len(spans) + 1, dtype=torch.int32)
        query_start_loc[1:] = counts.cumsum(0)
        positions = torch.cat([torch.arange(s.start, s.end) for s in spans])
        token_ids = torch.cat(
            [
                torch.from_numpy(
                    self._runner.input_batch.token_ids_cpu[
                        s.row, s.start + ahead : s.end + ahead
                    ]
                )
                for s in spans
            ]
        )
        block_table = metadata.block_table_tensor[rows]
        owner = torch.repeat_interleave(torch.arange(len(spans)), counts)
        block = block_table[owner, positions // drafter.block_size].long()
        slot_mapping = block * drafter.block_size + positions % drafter.block_size

        num_tokens = int(counts.sum())
        self.num_backlog += num_tokens
        drafter.input_ids[:num_tokens] = token_ids
        drafter._set_positions(num_tokens, positions)
        inputs = {}
        if self._states is not None:
            inputs["hidden_states"] = self._states.read(slot_mapping)
        attention = replace(
            metadata,
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=ends,
            num_reqs=len(spans),
            num_actual_tokens=num_tokens,
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=block_table,
            slot_mapping=slot_mapping,
            **_UNSET_METADATA,
        )
        _, per_layer = drafter.build_per_group_and_layer_attn_metadata(attention)
        with set_forward_context(
            per_layer,
            self._runner.vllm_config,
            num_tokens=num_tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=drafter._get_slot_mapping(num_tokens, slot_mapping),
        ):
            drafter.model(
                input_ids=drafter.input_ids[:num_tokens],
                positions=drafter._get_positions(num_tokens),
                inputs_embeds=None,
                **inputs,
            )


_UNSET_METADATA: dict[str, Any] = {
    "positions": None,
    "is_prefilling": None,
    "seq_lens_cpu_upper_bound": None,
    "req_idx": None,
    "logits_indices_padded": None,
    "num_logits_indices": None,
}
"""Optional per-batch extras that describe the target's step, not the catch-up's."""
