"""Times a few forward passes at start-up, so that costs need not be guessed."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from policies.types import CostProfile
from serving.engine.compat_cpu import SpecDecodeBaseProposer

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.engine.compat_cpu import GPUModelRunner

logger = init_logger(__name__)

_NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_NUM_ROUNDS = 6
_TIME_LIMIT_S = 3.0
_MANY_TOKENS = 32
"""Passes over more are left out of all but the first and the last two rounds: one takes
as long as several over few, which decide most and of which a single timing says little.
"""


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
    counts = [count for count in _NUM_TOKENS if count <= runner.max_num_tokens]
    target_ms = [float("inf")] * len(counts)
    passes_ms = [float("inf")] * len(counts)
    deadline_s = time.perf_counter() + _TIME_LIMIT_S
    num_seen = 0
    # Round by round, not count by count: a neighbour's burst then spoils one round of
    # many counts, not all of one, which would look dear for good. The fastest run of
    # each count counts; the others waited for something else.
    for number in range(_NUM_ROUNDS):
        is_whole = number in {0, _NUM_ROUNDS - 2, _NUM_ROUNDS - 1}
        for index, num_tokens in enumerate(counts):
            if time.perf_counter() > deadline_s:
                break
            if num_tokens > _MANY_TOKENS and not is_whole:
                continue
            run_target = partial(_run_target, runner, num_tokens)
            target_ms[index] = min(target_ms[index], _time_ms(run_target))
            if drafter is not None:
                run_drafter = partial(drafter.dummy_run, num_tokens)
                passes_ms[index] = min(passes_ms[index], _time_ms(run_drafter))
            num_seen = max(num_seen, index + 1)
    counts, target_ms = counts[:num_seen], target_ms[:num_seen]
    if drafter is None:
        return CostProfile(tuple(counts), tuple(target_ms))
    # vLLM's dummy run of the target drafts as well, all passes.
    passes_ms = passes_ms[:num_seen]
    target_only = [
        max(both - passes, 1e-3)
        for both, passes in zip(target_ms, passes_ms, strict=True)
    ]
    in_one_pass = bool(drafter.parallel_drafting)
    num_passes = 1 if in_one_pass else drafter.num_speculative_tokens
    draft_ms = tuple(ms / num_passes for ms in passes_ms)
    return CostProfile(tuple(counts), tuple(target_only), draft_ms, in_one_pass)


def _run_target(runner: GPUModelRunner, num_tokens: int) -> None:
    hidden_states, _ = runner._dummy_run(num_tokens)
    runner.model.compute_logits(hidden_states[:num_tokens])


def _time_ms(run: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start_s)
