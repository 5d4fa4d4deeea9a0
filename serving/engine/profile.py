"""Times a few forward passes at start-up, so that costs need not be guessed."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from policies.cost import CostProfile
from serving.engine.compat import SpecDecodeBaseProposer

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.engine.compat import GPUModelRunner

logger = init_logger(__name__)

_NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_NUM_REPEATS = 3
_TIME_LIMIT_S = 3.0


def profile_passes(runner: GPUModelRunner) -> CostProfile | None:
    """Time the target and one drafter pass at a few token counts.

    Dummy passes carry no context and no sampling; what they miss is learnt from the
    first real steps. Stops after a few seconds: a large model is profiled at fewer
    counts rather than started late.

    Returns:
        The profile; None if a pass fails, which must not keep the engine from serving.
    """
    try:
        profile: CostProfile = _profile(runner)
        return profile
    except Exception:
        logger.warning("Start-up profile failed; costs are learnt live", exc_info=True)
        return None


@torch.inference_mode()
def _profile(runner: GPUModelRunner) -> CostProfile:
    drafter = getattr(runner, "drafter", None)
    if not isinstance(drafter, SpecDecodeBaseProposer):
        drafter = None
    deadline_s = time.perf_counter() + _TIME_LIMIT_S
    counts: list[int] = []
    target_ms: list[float] = []
    draft_ms: list[float] = []
    for num_tokens in _NUM_TOKENS:
        too_many = num_tokens > runner.max_num_tokens
        if too_many or time.perf_counter() > deadline_s:
            break
        counts.append(num_tokens)
        target_ms.append(_time_ms(partial(_run_target, runner, num_tokens)))
        if drafter is not None:
            # vLLM's dummy run of the target drafts as well, all passes.
            passes_ms = _time_ms(partial(drafter.dummy_run, num_tokens))
            target_ms[-1] = max(target_ms[-1] - passes_ms, 1e-3)
            draft_ms.append(passes_ms / drafter.num_speculative_tokens)
    return CostProfile(tuple(counts), tuple(target_ms), tuple(draft_ms))


def _run_target(runner: GPUModelRunner, num_tokens: int) -> None:
    hidden_states, _ = runner._dummy_run(num_tokens)
    runner.model.compute_logits(hidden_states[:num_tokens])


def _time_ms(run: Callable[[], None]) -> float:
    """Return the fastest of a few runs: the others waited for something else."""
    fastest_s = float("inf")
    for _ in range(_NUM_REPEATS):
        start_s = time.perf_counter()
        run()
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    return 1e3 * fastest_s
