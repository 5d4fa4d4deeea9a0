"""The token counts to which a GPU pads a forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.engine.compat import VllmConfig


def find_captured_sizes(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Return the token counts to which a GPU pads passes, rising; none if it pads none.

    Assumed of vLLM 0.32's V2 runner (`cudagraph_utils.py`): a pass replays the graph of
    the next captured size, whole or piecewise, and larger ones run unpadded. With
    trimmed drafts that holds for every batch that decodes alone: its graphs take any
    mix of lengths. Not followed: without piecewise graphs, steps with prompts are not
    padded; where drafts cannot be trimmed, graphs of equal lengths round on to
    multiples of those; a draft model of its own runs unpadded, but takes a GPU about as
    long for so few tokens more; a head's first pass has whole graphs for drafts of
    equal lengths alone, so that it takes longer once a draft was left out. Eager
    engines capture nothing.
    """
    compilation = vllm_config.compilation_config
    if not compilation.cudagraph_mode:
        return ()
    return tuple(sorted(compilation.cudagraph_capture_sizes or ()))
