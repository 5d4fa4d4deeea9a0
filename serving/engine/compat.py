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

_FRONT_NAMES = {
    # The front stands in for the engine core below a stock `AsyncLLM`, which builds its
    # client by `EngineCoreClient.make_async_mp_client` (patched while it does).
    "AsyncLLM": "vllm.v1.engine.async_llm",
    "EngineCoreClient": "vllm.v1.engine.core_client",
    # A request's way to the engine core and the outputs' way back, as vLLM packs them.
    "EngineCoreRequest": "vllm.v1.engine",
    "EngineCoreRequestType": "vllm.v1.engine",
    "FinishReason": "vllm.v1.engine",
    "MsgpackDecoder": "vllm.v1.serial_utils",
    "MsgpackEncoder": "vllm.v1.serial_utils",
    # Its `ENGINE_CORE_DEAD` is the engine's last word in every output.
    "EngineCoreProc": "vllm.v1.engine.core",
    "Executor": "vllm.v1.executor",
    "get_open_zmq_ipc_path": "vllm.utils.network_utils",
    "maybe_register_config_serialize_by_value": "vllm.transformers_utils.config",
    # A refusal that vLLM's handlers answer with the status it carries.
    "GracefulHTTPError": "vllm.exceptions",
    "RayPrometheusStatLogger": "vllm.v1.metrics.ray_wrappers",
    "StatLoggerBase": "vllm.v1.metrics.loggers",
    "init_app_state": "vllm.entrypoints.launchers.api_server.app_state",
    # What makes an engine go on where another stopped (`engine.shared.replay`).
    "CachedRequestState": "vllm.v1.worker.gpu_input_batch",
    "StructuredOutputManager": "vllm.v1.structured_output",
    "WorkerWrapperBase": "vllm.v1.worker.worker_base",
}
"""Names of the front and the token channel, and why."""

FRONT_ATTRIBUTES = {
    # Hands on a request without putting its own `client_index` into it.
    "vllm.v1.engine.core_client": "AsyncMPClient._send_input",
    # The grammar's position and the reasoning state of a request that goes on.
    "vllm.v1.structured_output": "StructuredOutputManager._get_constraint_bounds",
    # The engine's processes, whose end is watched.
    "vllm.v1.engine.utils": "CoreEngineProcManager.sentinels",
    # Ends a request that no engine can serve; the error goes into the queue that its
    # entry in `request_states` has.
    "vllm.v1.engine.output_processor": "OutputProcessor.abort_requests",
    # Says, among other things, which models an engine may share requests with.
    "vllm.config": "ModelConfig.compute_hash",
}
"""Attributes of vLLM's objects that are used without being imported, by module."""

_MODULES = {
    # Its `launch_core_engines` is given more outputs while a replica starts its engine;
    # `AsyncMPClient._send_input` hands on requests whose `client_index` is ours.
    "core_client": "vllm.v1.engine.core_client",
}
"""Modules in which a name is replaced for a moment."""


def __getattr__(name: str) -> Any:
    module = _GPU_NAMES.get(name) or _FRONT_NAMES.get(name)
    if module is not None:
        return getattr(import_module(module), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
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
