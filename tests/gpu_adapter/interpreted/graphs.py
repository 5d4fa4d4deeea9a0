"""Stand-ins for CUDA graphs: what was captured runs again, on the same tensors.

As in a graph, a replay sees nothing but the tensors it was captured with: whatever a
step wants to change, it has to write into them.
"""

from functools import partial
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import CUDAGraphMode
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

CAPTURED_TOKENS = (1, 2, 4, 8, 16, 24, 32, 40)


class StandInGraph:
    """A captured step."""

    def __init__(self, forward):
        self._forward = forward
        self.num_replays = 0

    def replay(self):
        self.num_replays += 1
        self._forward(CUDAGraphMode.NONE)


@torch.inference_mode()
def capture(manager, create_forward_fn, *args, **kwargs):
    """Run each shape twice, as vLLM does, and keep it."""
    for desc in manager._capture_descs.get(CUDAGraphMode.FULL, ()):
        create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
        forward = create_forward_fn(desc, warmup=False)
        forward(CUDAGraphMode.NONE)
        manager.graphs[desc] = StandInGraph(forward)
    manager._graphs_captured = True


class LiveMetadata(CPUAttentionMetadata):
    """Plans by the lengths that its tensors hold when it is used.

    The CPU's attention plans when metadata is built; back ends that know graphs write
    their plan into tensors, or make it in the kernel.
    """

    _plan: Any

    def __getattribute__(self, name):
        if name == "scheduler_metadata":
            return object.__getattribute__(self, "_plan")()
        return object.__getattribute__(self, name)


def build_live(builder, common_prefix_len, common_attn_metadata, fast_build=False):
    """Build metadata as vLLM does, then let it plan anew."""
    metadata = build(builder, common_prefix_len, common_attn_metadata, fast_build)
    metadata.__class__ = LiveMetadata
    metadata._plan = partial(
        ops.cpu_attn_get_scheduler_metadata,
        num_reqs=common_attn_metadata.num_reqs,
        num_heads=builder.num_heads,
        num_kv_heads=builder.num_kv_heads,
        head_dim=builder.head_dim,
        seq_lens=metadata.seq_lens,
        dtype=builder.dtype,
        query_start_loc=metadata.query_start_loc,
        causal=metadata.causal,
        sliding_window_size=builder.window_size,
        isa=builder.isa,
        enable_kv_split=False,
        dynamic_causal=metadata.dynamic_causal,
        kv_cache_dtype=builder.kv_cache_dtype,
    )
    return metadata


build = CPUAttentionMetadataBuilder.build


def stand_in_for_graphs():
    """Replace what captures graphs, and let the CPU's attention take part.

    It takes the lengths of requests from the device, as it must.
    """
    CudaGraphManager.capture = capture
    CpuPlatform.graph_pool_handle = lambda self: None
    CPUAttentionMetadataBuilder.build = build_live
    CPUAttentionMetadataBuilder._cudagraph_support = AttentionCGSupport.ALWAYS
