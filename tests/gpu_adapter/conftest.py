"""vLLM's V2 modules import without a GPU, noisily; its configuration is made up."""

import warnings

import pytest

with warnings.catch_warnings():
    # Marks do not reach what is warned about while modules are imported.
    warnings.simplefilter("ignore")
    import serving.engine.gpu.runner
    import serving.engine.gpu.worker  # noqa: F401 - the import is what is wanted
    from serving.engine.gpu.scheduler import TetrisAsyncScheduler
    from tests.engine import stand_in_worker
    from tests.engine.tiny_models import write_llama_pair, write_tokenizer


MAX_NUM_SEQS = 8
MAX_TOKENS = 64
DEPTH = 4
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Model folders; most tests here read their configuration alone."""
    made = write_llama_pair(tmp_path_factory.mktemp("pair"), noise=0.05)
    write_tokenizer(made[0])
    return made


@pytest.fixture
def make_scheduler(pair, monkeypatch):
    """Build a scheduler by vLLM's own configuration, as if a GPU had resolved it."""

    def make(
        policy="goodput",
        *,
        graphs=True,
        is_async=True,
        extra_draft_tokens=2,
        capture_sizes=(),
        **engine_args,
    ):
        from vllm import envs
        from vllm.config import CUDAGraphMode

        draft_tokens = DEPTH - extra_draft_tokens if policy == "tetris" else DEPTH
        tetris = {"policy": policy, "draft_tokens": draft_tokens}
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        config = stand_in_worker.make_config(
            *pair,
            tetris | {"max_draft_tokens": DEPTH},
            depth=DEPTH,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
            **engine_args,
        )
        config.scheduler_config.async_scheduling = is_async
        config.compilation_config.cudagraph_mode = (
            CUDAGraphMode.FULL_AND_PIECEWISE if graphs else CUDAGraphMode.NONE
        )
        config.compilation_config.cudagraph_capture_sizes = list(capture_sizes)
        # Without Triton vLLM would say V1, unless told; an engine that lives in this
        # process has it remember what the environment was.
        envs.disable_envs_cache()
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        return stand_in_worker.make_scheduler(
            TetrisAsyncScheduler, config, num_blocks=400
        )

    return make
