"""vLLM's CPU stand-in for a Triton kernel is repaired before it samples anything."""

import pytest
import torch

from tests.engine.conftest import run_engine

pytestmark = pytest.mark.vllm

TEMPERATURE = torch.tensor([0.7, 0.0, 1.5, 0.3])
CU_NUM_TOKENS = torch.tensor([2, 3, 3, 5], dtype=torch.int32)
PER_TOKEN = torch.tensor([0.7, 0.7, 1.0, 0.3, 0.3])
"""The third request has no draft tokens; temperature 0 becomes 1."""


def test_integer_values_keep_their_type():
    from serving.engine.cpu.kernels import expand_to_tokens

    output = torch.full((5,), -1, dtype=torch.int32)
    top_k = torch.tensor([8, 3, 5, 2], dtype=torch.int32)
    expand_to_tokens(output, top_k, CU_NUM_TOKENS, 0, 0)

    assert output.tolist() == [8, 8, 3, 2, 2]


def test_an_engine_of_ours_expands_temperatures_correctly(tiny_pair):
    """Although each start registers vLLM's own kernels once more."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    current_platform.import_kernels()
    with run_engine(*tiny_pair, policy="fixed", draft_tokens=1):
        per_token = expand_batch_to_tokens(TEMPERATURE, CU_NUM_TOKENS, 5, 0, 1)
    torch.testing.assert_close(per_token, PER_TOKEN)


def test_the_repair_is_still_needed():
    """Fails once vLLM writes its output: then drop `kernels`."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    output = torch.full((5,), torch.nan)
    _expand_kernel_impl(output, TEMPERATURE, CU_NUM_TOKENS, 0, 1)

    assert output.isnan().all()
