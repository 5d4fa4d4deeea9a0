"""The only module that imports vLLM's private names, for one vLLM version.

An upgrade that moves a hook fails here, at import, with a message that says which
version this release supports.
"""

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
