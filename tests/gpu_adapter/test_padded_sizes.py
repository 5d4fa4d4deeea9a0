"""Passes are padded to the sizes of captured graphs, and the planner knows them."""

from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIZES = (1, 2, 4, 8, 16, 24, 32)


@pytest.mark.parametrize("policy", ["dynamic", "goodput"])
def test_the_planner_prices_a_pass_as_the_graph_it_replays(policy, make_scheduler):
    cost = make_scheduler(policy=policy, capture_sizes=SIZES[::-1])._planner.cost
    assert cost.target.at(17) == cost.target.at(24) < cost.target.at(25)
    assert cost.draft_first.at(17) == cost.draft_first.at(24)
    # Larger than any graph.
    assert cost.target.at(33) < cost.target.at(34)


def test_an_engine_without_graphs_pads_nothing(make_scheduler):
    scheduler = make_scheduler(graphs=False, capture_sizes=SIZES)
    assert scheduler._planner.cost.padded_sizes == ()


def test_upstream_pads_every_batch_to_the_next_captured_size():
    """Trimmed batches that decode, by whole graphs; those with prompts, piecewise."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    manager = object.__new__(CudaGraphManager)
    manager.__dict__.update(
        vllm_config=SimpleNamespace(
            speculative_config=None,
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
        ),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=list(SIZES), max_cudagraph_capture_size=SIZES[-1]
        ),
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        max_num_reqs=8,
        decode_query_len=5,
        varlen_decode=True,
        ubatch_runner=None,
        lora_capture_cases=[0],
        _lora_dispatch_map={},
        _candidates={},
        _capture_descs={},
        _graphs_captured=True,
    )
    manager._init_candidates()

    def pad(num_tokens, max_query_len):
        found = manager.dispatch(
            num_reqs=min(8, num_tokens),
            num_tokens=num_tokens,
            uniform_token_count=None,
            num_active_loras=0,
            max_query_len=max_query_len,
        )
        return found.cg_mode, found.num_tokens

    for num_tokens in range(1, SIZES[-1] + 1):
        padded = next(size for size in SIZES if size >= num_tokens)
        assert pad(num_tokens, max_query_len=5) == (CUDAGraphMode.FULL, padded)
        # With a prompt among them.
        assert pad(num_tokens, max_query_len=None) == (CUDAGraphMode.PIECEWISE, padded)
    past = SIZES[-1] + 1
    assert pad(past, max_query_len=5) == (CUDAGraphMode.NONE, past)
