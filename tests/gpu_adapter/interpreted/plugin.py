"""Lets vLLM's V2 model runner work on the CPU: Triton's interpreter runs its kernels.

Loaded with `pytest -p`, before anything imports vLLM. vLLM 0.32 itself runs this runner
on CPUs for which Triton has a back end (`vllm/v1/worker/cpu`); the interpreter takes
the place of that back end, which no package index has.

Real are the runner, its kernels, drafters and samplers, the asynchronous scheduler and
everything of ours. Stood in for are streams (by vLLM: work is done when it is asked
for), events (`HostEvent`) and CUDA graphs (`graphs`).
"""

# ruff: noqa: E402 - the order is the point

import os
import time
from types import SimpleNamespace

os.environ.update(
    TRITON_INTERPRET="1",
    # Functions that vLLM compiles run as they are.
    TORCHDYNAMO_DISABLE="1",
    VLLM_USE_V2_MODEL_RUNNER="1",
)

import torch
import triton.language as tl
from triton.backends import Backend, backends
from triton.language.extra import libdevice
from triton.runtime import interpreter

backends["cpu"] = Backend(compiler=None, driver=None)

# Once for all: the interpreter would put its own functions into the language anew in
# every call from kernel to function, which takes a third of all time.
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda _function: interpreter._LangPatchScope()
# Nor is anything to be copied back: kernels work on the tensors themselves.
interpreter.GridExecutor._restore_args_dev = lambda *_: None
# As on a GPU, where nobody looks for integers that overflow: hashes mean to.
object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)

import vllm.v1.sample.ops.topk_topp_sampler as top_k_top_p
import vllm.v1.worker.cpu_worker  # noqa: F401 - replaces parts of torch.cuda
from vllm.config import CUDAGraphMode
from vllm.platforms.cpu import CpuPlatform

from tests.gpu_adapter.interpreted.graphs import CAPTURED_TOKENS, stand_in_for_graphs

OUR_SCHEDULER = "serving.engine.gpu.scheduler.TetrisAsyncScheduler"


class HostEvent:
    """A mark that is passed when it is made, timed by the host's clock."""

    def __init__(self, *args, **kwargs):
        self._time_s = 0.0

    def record(self, *args):
        self._time_s = time.perf_counter()

    def query(self):
        return True

    def synchronize(self, *args):
        """Return at once."""

    wait = synchronize

    def elapsed_time(self, end):
        return 1e3 * (end._time_s - self._time_s)


torch.cuda.Event = HostEvent

graphs_wanted = CUDAGraphMode.FULL_DECODE_ONLY
"""What a GPU's platform would resolve; tests may ask for none, as `enforce_eager`."""

resolve_for_cpu = CpuPlatform.check_and_update_config


def resolve_as_for_gpu(vllm_config):
    """Keep what a GPU's platform leaves on and the CPU's turns off."""
    resolve_for_cpu(vllm_config)
    if vllm_config.scheduler_config.scheduler_cls == OUR_SCHEDULER:
        vllm_config.scheduler_config.async_scheduling = True
        compilation = vllm_config.compilation_config
        compilation.cudagraph_mode = graphs_wanted
        if graphs_wanted != CUDAGraphMode.NONE:
            compilation.cudagraph_capture_sizes = list(CAPTURED_TOKENS)
            compilation.max_cudagraph_capture_size = CAPTURED_TOKENS[-1]


CpuPlatform.check_and_update_config = staticmethod(resolve_as_for_gpu)
stand_in_for_graphs()

# The interpreter cannot run this one kernel; vLLM has the same without Triton.
top_k_top_p.HAS_TRITON = False


def log1p(x):
    """Return log(1 + x), also of small numbers: NVIDIA's is not for the interpreter."""
    sum_ = 1.0 + x
    return tl.where(sum_ == 1.0, x, tl.log(sum_) * x / (sum_ - 1.0))


libdevice.log1p = log1p
