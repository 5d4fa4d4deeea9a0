"""vLLM's private names for plugin, schedulers and the GPU adapter; one vLLM version.

An upgrade that moves a hook fails here, at import, with a message that says which
version this release supports. The plugin brings this module into every vLLM process, on
whatever device, so it imports only what vLLM's own engine core has imported by then.
Names that only the GPU adapter needs are imported when it asks for them; those of the
CPU worker, whose import replaces parts of `torch.cuda`, are in `compat_cpu`.
"""

from importlib import import_module
from typing import Any

from serving.engine.version import find_vllm_mismatch


def check_version() -> None:
    """Refuse any vLLM but the supported one.

    Raises:
        ImportError: It is another, or none.
    """
    mismatch = find_vllm_mismatch()
    if mismatch is not None:
        raise ImportError(mismatch)


check_version()

from vllm.config import VllmConfig  # noqa: E402 - after the check
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine import EngineCoreOutputs  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

_V2 = "vllm.v1.worker.gpu"

_GPU_NAMES = {
    "AdaptiveVerificationManager": f"{_V2}.spec_decode.adaptive_verification",
    "AsyncModelRunnerOutput": "vllm.v1.outputs",
    "AsyncScheduler": "vllm.v1.core.sched.async_scheduler",
    "DraftModelSpeculator": f"{_V2}.spec_decode.speculator",
    "OnlineAcceptanceEstimator": f"{_V2}.spec_decode.acceptance_estimator",
    "StandaloneARSpeculator": f"{_V2}.spec_decode.standalone_ar.speculator",
    "StepTimingCollector": f"{_V2}.async_utils",
    "StepTimingSample": f"{_V2}.async_utils",
    "TargetDependentARSpeculator": f"{_V2}.spec_decode.target_dependent_ar.speculator",
    "async_copy_to_np": f"{_V2}.async_utils",
    "async_tensor_h2d": "vllm.utils.torch_utils",
    "get_tp_group": "vllm.distributed.parallel_state",
    "stream": f"{_V2}.async_utils",
}
"""Where the GPU adapter's names are."""

_RENAMED = {
    "GPUWorker": ("vllm.v1.worker.gpu_worker", "Worker"),
    "GPUModelRunnerV2": (f"{_V2}.model_runner", "GPUModelRunner"),
}
"""Names whose vLLM name means something else beside the others here."""


def __getattr__(name: str) -> Any:
    if name in _GPU_NAMES:
        return getattr(import_module(_GPU_NAMES[name]), name)
    if name in _RENAMED:
        module, original = _RENAMED[name]
        return getattr(import_module(module), original)
    if name == "async_llm":  # The engine's client: an engine core never imports it.
        return import_module("vllm.v1.engine.async_llm")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DraftTokenIds",
    "EngineCore",
    "EngineCoreOutputs",
    "ModelRunnerOutput",
    "Request",
    "Scheduler",
    "SchedulerOutput",
    "VllmConfig",
    "check_version",
]
