"""vLLM's V2 modules import without a GPU, noisily; its configuration is made up."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import pytest

with warnings.catch_warnings():
    # Marks do not reach what is warned about while modules are imported.
    warnings.simplefilter("ignore")
    import serving.engine.gpu.runner
    import serving.engine.gpu.worker  # noqa: F401 - the import is what is wanted
    from serving.engine.gpu.scheduler import TetrisAsyncScheduler


HERE = Path(__file__).parent

MAX_NUM_SEQS = 8
MAX_TOKENS = 64
DEPTH = 4
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spare these tests the warnings of other people's code."""
    third_party_may_warn = ("ignore", r"error:::(policies|serving|tests)\.")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(*third_party_may_warn))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Model folders; only their configuration is read here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.engine.tiny_models import write_llama_pair
    return write_llama_pair(tmp_path_factory.mktemp("pair"), noise=0.05)


@pytest.fixture
def make_config(pair, monkeypatch):
    """Build vLLM's own configuration, then pretend that a GPU resolved it."""

    def make(
        policy="goodput",
        *,
        graphs=True,
        is_async=True,
        extra_draft_tokens=2,
        capture_sizes=(),
        **engine_args,
    ):
        from vllm import EngineArgs
        from vllm.config import CUDAGraphMode

        tetris = policy == "tetris"
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        config = EngineArgs(
            model=str(pair[0]),
            skip_tokenizer_init=True,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
            max_model_len=256,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=64 << 20,
            additional_config={
                "tetris": {
                    "policy": policy,
                    "draft_tokens": DEPTH - extra_draft_tokens if tetris else DEPTH,
                    "max_draft_tokens": DEPTH,
                }
            },
            speculative_config={
                "method": "draft_model",
                "model": str(pair[1]),
                "num_speculative_tokens": DEPTH,
                "num_speculative_tokens_per_batch_size": [[1, MAX_NUM_SEQS, DEPTH]],
            },
            **engine_args,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = is_async
        config.compilation_config.cudagraph_mode = (
            CUDAGraphMode.FULL_AND_PIECEWISE if graphs else CUDAGraphMode.NONE
        )
        config.compilation_config.cudagraph_capture_sizes = list(capture_sizes)
        # Without Triton vLLM would say V1, unless told.
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        return config

    return make


@pytest.fixture
def make_scheduler(make_config):
    """Build a scheduler with a KV cache of its own."""

    def make(cls=TetrisAsyncScheduler, *, num_blocks=400, **options):
        import torch
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        config = make_config(**options)
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(
            block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        kv_cache = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        return cls(config, kv_cache, StructuredOutputManager(config), block_size=16)

    return make
