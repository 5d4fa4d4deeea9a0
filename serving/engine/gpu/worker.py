"""GPU workers, supplied through `worker_cls`: vLLM's own, with our V2 runner."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from serving.engine.compat import GPUWorker, check
from serving.engine.compat_names import GPU_WORKER
from serving.engine.gpu.plain_verification import (
    ATTENTION_BACKEND,
    find_plain_reason,
    find_unfit_backend,
    keep_one_depth,
)

logger = init_logger(__name__)


class TetrisGPUWorker(GPUWorker):
    """A GPU worker whose runner verifies what our scheduler orders."""

    def _make_model_runner(self) -> Any:
        """Switch vLLM's machinery for trimmed batches on, where it can work."""
        check(GPU_WORKER)
        speculative = self.vllm_config.speculative_config
        reason = find_plain_reason(self.vllm_config)
        if reason == "runner_v1":
            logger.warning(
                "vLLM chose its V1 model runner, for which there is no adapter on a "
                "GPU: all drafts are verified, at a constant depth. Unset "
                "VLLM_USE_V2_MODEL_RUNNER=0 or the feature that asked for V1."
            )
            return super()._make_model_runner()
        unfit = find_unfit_backend(self.vllm_config) if reason is None else None
        if unfit is not None:
            reason = ATTENTION_BACKEND
            logger.warning(
                "The attention back end %s plans by lengths that only the device will "
                "know: ask for another, or for none, to have drafts left out.",
                unfit,
            )
        if reason is not None:
            logger.warning(
                "Verifying all drafts, at a constant depth: vLLM cannot leave any out "
                "under this configuration (%s). Counted in tetris_fallbacks_total.",
                reason,
            )
            keep_one_depth(self.vllm_config)
        speculative.enable_adaptive_verification = reason is None
        from serving.engine.gpu.runner import TetrisGPUModelRunner

        return TetrisGPUModelRunner(self.vllm_config, self.device)
