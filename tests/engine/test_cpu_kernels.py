"""vLLM's CPU stand-in for a Triton kernel is repaired before it samples anything."""

import numpy as np
import pytest
import torch

from tests.engine.checks import draw_prompts, greedy
from tests.engine.conftest import run_engine

pytestmark = pytest.mark.vllm

TEMPERATURE = torch.tensor([0.7, 0.0, 1.5, 0.3])
CU_NUM_TOKENS = torch.tensor([2, 3, 3, 5], dtype=torch.int32)
PER_TOKEN = torch.tensor([0.7, 0.7, 1.0, 0.3, 0.3])
"""The third request has no draft tokens; temperature 0 becomes 1."""


def test_our_engine_samples_by_them_and_times_its_passes(tiny_pair, plain, monkeypatch):
    """Although each start registers vLLM's own kernels once more.

    At the end, for dummy passes leave a cache in disorder.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    from serving.engine.cpu import profile as module

    prompts, params = draw_prompts(6), greedy()
    expected = plain.answer(prompts, params)
    current_platform.import_kernels()
    # A drafter of a single pass, which takes a way of its own through vLLM.
    args = {"policy": "fixed", "draft_tokens": 1, "max_num_batched_tokens": 64}
    with run_engine(*tiny_pair, **args) as engine:
        per_token = expand_batch_to_tokens(TEMPERATURE, CU_NUM_TOKENS, 5, 0, 1)
        answers = engine.answer(prompts, params)
        num_accepted = engine.counters.num_accepted_tokens
        profile = module.profile_passes(engine.runner)
        timed: list[int] = []
        with monkeypatch.context() as counted:
            counted.setattr(module, "_run_target", lambda _, n: timed.append(n))
            module.profile_passes(engine.runner)
        monkeypatch.setattr(engine.runner, "_dummy_run", lambda _: 1 / 0)
        broken = module.profile_passes(engine.runner)
    torch.testing.assert_close(per_token, PER_TOKEN)
    assert answers == expected
    assert num_accepted > 0
    assert profile.num_tokens == (1, 2, 4, 8, 16, 32, 64)
    times_ms = np.array([profile.target_ms, profile.draft_ms])
    assert times_ms.shape == (2, len(profile.num_tokens))
    assert (np.isfinite(times_ms) & (times_ms > 0.0)).all()
    # Short passes, which decide most, are timed oftener than those that take long.
    assert [timed.count(n) for n in (1, 32, 64)] == [6, 6, 3]
    # An engine that cannot be profiled serves all the same.
    assert broken is None


def test_the_repair_is_still_needed():
    """Fails once vLLM writes its output: then drop `kernels`."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    output = torch.full((5,), torch.nan)
    _expand_kernel_impl(output, TEMPERATURE, CU_NUM_TOKENS, 0, 1)

    assert output.isnan().all()
