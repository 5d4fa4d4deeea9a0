"""vLLM's handlers in a front: no device, and no weights."""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest

from serving.replica.kinship import Kin
from tests.conftest import run

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "configs" / "models"

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# In a process of its own: it knows no device.
FRONTS_PROCESS = """
import asyncio, sys, cloudpickle
from vllm import platforms
from vllm.platforms.interface import UnspecifiedPlatform
from vllm.platforms.cpu import CpuPlatform
platforms._current_platform = UnspecifiedPlatform()
# Of this wheel's kernels, the default would load those for AVX-512 on any processor.
platforms._current_platform.import_kernels = CpuPlatform.import_kernels

async def main():
    from serving.front.fleet_client import FleetClient
    from serving.front.vllm_app import build_app_state
    from vllm.exceptions import GracefulHTTPError
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    with open(sys.argv[1], "rb") as file:
        hello = cloudpickle.load(file)
    opened = asyncio.Event()

    class Stream:
        async def __aiter__(self):
            await asyncio.Event().wait()
            yield
        def cancel(self):
            pass

    client = FleetClient(
        front=b"f", kin=hello["kin"], supported_tasks=("generate",),
        open_stream=lambda *_, **__: opened.set() or Stream(),
        max_requests=lambda _: 1,
    )
    state = await build_app_state(hello, client)
    assert not state.engine_client.errored
    create = state.openai_serving_completion.create_completion

    def ask(n):
        return create(CompletionRequest(model="demo", prompt="Count", n=n), None)

    asking = asyncio.create_task(ask(1))
    # Its prompt has been made tokens of.
    await opened.wait()
    for n in (1, 2):
        try:
            await ask(n)
        except GracefulHTTPError as error:
            print("refused with", error.http_status.value)
    processor = state.engine_client.output_processor
    kept = (
        processor.request_states, processor.external_req_ids, processor.parent_requests
    )
    print("kept", *map(len, kept))
    asking.cancel()
    client.shutdown()
    print("served on", type(platforms.current_platform).__name__)

asyncio.run(main())
"""


def test_a_host_without_a_device_can_be_a_front_that_forgets_whom_it_refuses(tmp_path):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    draft = {"method": "draft_model", "model": str(MODELS / "demo-draft")}
    args = AsyncEngineArgs(
        model=str(MODELS / "demo-target"),
        served_model_name=["demo"],
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        speculative_config={**draft, "num_speculative_tokens": 2},
    )
    both = vars(FrontendArgs()) | vars(args)
    # What an engine's process tells a front.
    hello = {
        "vllm_version": "0.32.0",
        "kin": Kin("x", 1),
        "config": cloudpickle.dumps(args.create_engine_config()),
        "args": cloudpickle.dumps(argparse.Namespace(**both)),
        "supported_tasks": ("generate",),
    }
    file = tmp_path / "hello"
    file.write_bytes(cloudpickle.dumps(hello))
    done = run(sys.executable, "-c", FRONTS_PROCESS, file)
    assert "served on UnspecifiedPlatform" in done.stdout
    assert done.stdout.count("refused with 503") == 2
    assert "kept 1 1 0" in done.stdout


def test_what_is_no_text_comes_with_every_request():
    """Of a front's engines, another may have had it before."""
    from vllm.config import MultiModalConfig, ParallelConfig
    from vllm.multimodal.cache.factories import processor_cache_from_config

    from serving.front.vllm_app import send_images_whole

    multimodal = MultiModalConfig()
    model = SimpleNamespace(
        supports_multimodal_inputs=True,
        multimodal_config=multimodal,
        get_multimodal_config=lambda: multimodal,
        get_inputs_embeds_size=lambda: 1,
    )
    config = SimpleNamespace(model_config=model, parallel_config=ParallelConfig())
    assert processor_cache_from_config(config) is not None
    send_images_whole(config)
    assert processor_cache_from_config(config) is None
