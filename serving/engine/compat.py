"""The only module that imports vLLM's private names, for one vLLM version.

An upgrade that moves a hook fails here, at import, with a message that says which
version this release supports. Names that only the GPU adapter needs are imported when
it asks for them: they take seconds that a CPU engine need not spend.
"""

from importlib import import_module
from typing import Any

from serving.engine.version import find_vllm_mismatch

_mismatch = find_vllm_mismatch()
if _mismatch is not None:
    raise ImportError(_mismatch)

from vllm.config import CUDAGraphMode, VllmConfig  # noqa: E402 - after the check
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.triton_utils.dispatcher import KernelOverride  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine import EngineCoreOutputs  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.sample import rejection_sampler  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import (  # noqa: E402
    apply_top_k_top_p,
)
from vllm.v1.spec_decode.draft_model import DraftModelProposer  # noqa: E402
from vllm.v1.spec_decode.llm_base_proposer import (  # noqa: E402
    SpecDecodeBaseProposer,
)
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402

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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CPUWorker",
    "CUDAGraphMode",
    "CommonAttentionMetadata",
    "DraftModelProposer",
    "DraftTokenIds",
    "EngineCore",
    "EngineCoreOutputs",
    "GPUModelRunner",
    "KernelOverride",
    "ModelRunnerOutput",
    "Request",
    "SamplingMetadata",
    "Scheduler",
    "SchedulerOutput",
    "SpecDecodeBaseProposer",
    "SpecDecodeMetadata",
    "VllmConfig",
    "apply_top_k_top_p",
    "rejection_sampler",
    "set_forward_context",
]
