"""The numbers of tokens a step had better have: what the engine has kernels for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.engine.compat import VllmConfig

CPU_STEP_SIZES: tuple[int, ...] = (
    *range(1, 8),
    *range(8, 16, 2),
    *range(16, 64, 4),
    *range(64, 128, 8),
    *range(128, 257, 16),
)
"""At which a CPU, which pads nothing, finds its kernels again.

oneDNN compiles a matrix product for each number of rows it meets. vLLM 0.32 keeps 32 of
them per layer and oneDNN 1024 per process: 100 numbers of rows, as the layers of two
models are of about ten kinds. Steps of any number of tokens often find what they need
gone: 2 ms of a step of 45 in a target of 100 M parameters with its drafter. No size is
more than a quarter above the last.
"""


def find_captured_sizes(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Return the token counts to which a GPU pads passes, rising; none if it pads none.

    Assumed of vLLM 0.32's V2 runner (`cudagraph_utils.py`): a pass replays the graph of
    the next captured size, whole or piecewise, and larger ones run unpadded. With
    trimmed drafts that holds for every batch that decodes alone: its graphs take any
    mix of lengths. Not followed: without piecewise graphs, steps with prompts are not
    padded; where drafts cannot be trimmed, graphs of equal lengths round on to
    multiples of those; a draft model of its own runs unpadded, but takes a GPU about as
    long for so few tokens more. Eager engines capture nothing.
    """
    compilation = vllm_config.compilation_config
    if not compilation.cudagraph_mode:
        return ()
    return tuple(sorted(compilation.cudagraph_capture_sizes or ()))
