"""vLLM's private names for the CPU worker and its V1 runner; never on a GPU.

Importing vLLM's CPU worker replaces `torch.cuda.Stream`, `torch.cuda.Event`,
`Tensor.pin_memory` and vLLM's own `async_tensor_h2d` for the whole process. A GPU
process that does so is broken; a CPU process must do so before it imports anything that
binds those names. So only what `worker_cls` leads to may import this module, and the
worker comes first in it.
"""

from serving.engine.compat import check_version

check_version()

# isort: off
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402 - after check, before all

# isort: on
from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.models.interfaces import LocalArgmaxMixin  # noqa: E402
from vllm.triton_utils.dispatcher import KernelOverride  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.sample import rejection_sampler  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import (  # noqa: E402
    apply_top_k_top_p,
)
from vllm.v1.spec_decode.draft_model import DraftModelProposer  # noqa: E402
from vllm.v1.spec_decode.eagle import EagleProposer  # noqa: E402
from vllm.v1.spec_decode.llm_base_proposer import (  # noqa: E402
    SpecDecodeBaseProposer,
)
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402
from vllm.v1.worker.gpu_model_runner import (  # noqa: E402
    ExecuteModelState,
    GPUModelRunner,
)

__all__ = [
    "CPUWorker",
    "CUDAGraphMode",
    "CommonAttentionMetadata",
    "DraftModelProposer",
    "EagleProposer",
    "ExecuteModelState",
    "GPUModelRunner",
    "KernelOverride",
    "LocalArgmaxMixin",
    "SamplingMetadata",
    "SpecDecodeBaseProposer",
    "SpecDecodeMetadata",
    "apply_top_k_top_p",
    "rejection_sampler",
    "set_forward_context",
]
