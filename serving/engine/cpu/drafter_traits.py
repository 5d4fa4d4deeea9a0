"""What an engine's drafter can do, read from vLLM's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.engine.compat import VllmConfig

GREEDY_BELOW = 1e-5
"""vLLM's own threshold below which a temperature means argmax."""

_PASS_METHODS = frozenset({"draft_model", "eagle", "eagle3", "mtp"})
"""Drafters that are models: a pass for each token, and logits in it."""

_STOPPING_METHODS = frozenset({"draft_model", "eagle", "eagle3"})
"""Drafters whose every pass moves the positions on, which is where a draft may end;
some `mtp` models keep theirs."""

_CATCHING_UP_METHODS = frozenset({"eagle", "eagle3"})
"""Heads that are left out at depth 0, for what they read of the target is kept."""


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """What can be asked of a drafter.

    Attributes:
        max_depth: Deepest draft.
        max_model_len: Tokens of prompt and output that it takes; never more than the
            target.
        makes_passes: Each token costs a pass, so that a shorter draft saves some.
        has_one_depth: vLLM's proposer insists on it; trimming is all there is.
        is_sampled: Drafts are drawn, not the most probable tokens.
        reports_confidence: The worker tells how sure it was.
        can_be_skipped: At depth 0 it can be left out altogether.
        exits_early: A draft can end between two passes.
    """

    max_depth: int
    max_model_len: int
    makes_passes: bool
    has_one_depth: bool
    is_sampled: bool
    reports_confidence: bool
    can_be_skipped: bool
    exits_early: bool

    @classmethod
    def read(
        cls, vllm_config: VllmConfig, max_depth: int, target_limit: int
    ) -> DrafterTraits:
        """Read them from an engine's configuration.

        Args:
            vllm_config: With a drafter.
            max_depth: Deepest draft.
            target_limit: Tokens of prompt and output that the target takes.
        """
        speculative = vllm_config.speculative_config
        method: str = speculative.method
        makes_passes = method in _PASS_METHODS
        limit = getattr(speculative.draft_model_config, "max_model_len", None)
        if not makes_passes or limit is None:
            limit = target_limit
        reports_confidence = makes_passes and not (
            speculative.use_local_argmax_reduction
            or speculative.use_heterogeneous_vocab
            or speculative.parallel_drafting
        )
        return cls(
            max_depth=max_depth,
            max_model_len=min(int(limit), target_limit),
            makes_passes=makes_passes,
            has_one_depth=method == "suffix",
            is_sampled=speculative.draft_sample_method == "probabilistic",
            reports_confidence=reports_confidence,
            # One that drafts all tokens in a single pass has no record of its own.
            can_be_skipped=not speculative.parallel_drafting
            and (
                speculative.uses_draft_model()
                or (
                    method in _CATCHING_UP_METHODS
                    and not vllm_config.model_config.is_multimodal_model
                )
            ),
            exits_early=reports_confidence
            and method in _STOPPING_METHODS
            and vllm_config.parallel_config.tensor_parallel_size == 1,
        )
