"""What an EAGLE head reads of the target, kept so that the head can be left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from serving.engine.compat_cpu import EagleProposer

if TYPE_CHECKING:
    from serving.engine.compat_cpu import ExecuteModelState, GPUModelRunner


class TargetStates:
    """The target's hidden states of every token in the KV cache, by its slot.

    A head is given them in the step that computes them, and vLLM drops them after it.
    Kept by slot, they are there for whoever reaches a token through prefix caching,
    too, and go when the slot is written again. Memory: a row of `states` for each
    slot, taken from the machine as slots are used for the first time.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        """Attach to a runner with an EAGLE head; its KV cache may come later."""
        self._runner = runner
        self._states: torch.Tensor | None = None
        self._layer = min(runner.drafter._draft_attn_layer_names)

    @staticmethod
    def supports(runner: GPUModelRunner) -> bool:
        """Whether a runner's drafter reads nothing but tokens and these states."""
        return (
            isinstance(getattr(runner, "drafter", None), EagleProposer)
            and runner.drafter.method in ("eagle", "eagle3")
            and not runner.drafter.supports_mm_inputs
        )

    def keep(self, state: ExecuteModelState) -> None:
        """Keep the states of a step's tokens.

        Args:
            state: Of a forward pass that has not been sampled yet.
        """
        num_tokens = state.scheduler_output.total_num_scheduled_tokens
        assert isinstance(state.slot_mappings, dict)
        slots = state.slot_mappings[self._layer][:num_tokens]
        parts = state.aux_hidden_states or [state.hidden_states]
        states = torch.cat([part[:num_tokens] for part in parts], dim=-1)
        if self._states is None:
            # Zeros, so that a slot that was never kept is no NaN: those spread.
            self._states = states.new_zeros(self._count_slots(), states.shape[1])
        self._states.index_copy_(0, slots, states)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return what the head takes in for some tokens.

        Args:
            slots: `[num_tokens]`.

        Returns:
            `[num_tokens, width]`.
        """
        assert self._states is not None
        drafter, states = self._runner.drafter, self._states[slots]
        if drafter.method == "eagle3":
            combined: torch.Tensor = drafter.model.combine_hidden_states(states)
            return combined
        return states

    def _count_slots(self) -> int:
        config = self._runner.kv_cache_config
        group = config.kv_cache_groups[self._runner.drafter.kv_cache_gid]
        return int(config.num_blocks * group.kv_cache_spec.block_size)
