"""A worker on the CPU with the runner that our GPU worker makes."""

import vllm.v1.worker.cpu.model_runner as cpu_v2
import vllm.v1.worker.gpu.spec_decode.adaptive_verification as upstream
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import _num_workspace_lanes
from vllm.v1.worker.workspace import init_workspace_manager

from serving.engine.gpu.worker import TetrisGPUWorker

# Of the dummy steps that are timed; interpreted ones are slow.
upstream._PROFILE_REPLAYS = 1


class InterpretedWorker(CPUWorker):
    """vLLM's CPU worker; the V2 runner it makes is ours."""

    def init_device(self):
        """Make the runner as `TetrisGPUWorker` does."""
        theirs = cpu_v2.CPUModelRunner
        cpu_v2.CPUModelRunner = lambda *_: TetrisGPUWorker._make_model_runner(self)
        try:
            super().init_device()
        finally:
            cpu_v2.CPUModelRunner = theirs
        num_lanes = _num_workspace_lanes(self.vllm_config, self.use_v2_model_runner)
        init_workspace_manager(self.device, 1, num_lanes)

    def compile_or_warm_up_model(self):
        """Capture graphs and time dummy steps as vLLM's GPU worker does."""
        times = super().compile_or_warm_up_model()
        self.model_runner.capture_model()
        return times
