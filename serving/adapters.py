"""Which scheduler and worker a deployment's engines run: ours or vLLM's own."""

from collections.abc import Iterator
from typing import Any, Final

from policies.registry import load_planner_class
from serving.engine.gpu.plain_verification import METHODS_V2
from serving.settings.finding import Finding
from serving.settings.model import Settings
from serving.settings.policy_section import PolicySettings

_CLASSES: Final = {
    "cpu": {
        "scheduler_cls": "serving.engine.cpu.scheduler.TetrisScheduler",
        "worker_cls": "serving.engine.cpu.worker.TetrisCPUWorker",
    },
    "gpu": {
        "scheduler_cls": "serving.engine.gpu.scheduler.TetrisAsyncScheduler",
        "worker_cls": "serving.engine.gpu.worker.TetrisGPUWorker",
    },
}
"""Import paths by device; both of a pair or neither."""

PLAIN_POLICIES: Final = frozenset({"none", "fixed"})
"""What vLLM's own scheduler does, though without figures for our metrics."""

_GPU_ONLY_METHODS: Final = frozenset({"dflash", "dspark"})


def has_adapter(settings: Settings) -> bool:
    """Tell whether our scheduler and worker run in the engines.

    On a GPU, `fixed` is left to vLLM unless `engine.adapter: on` asks for ours, which
    has not been run on a GPU yet.
    """
    policy, engine = settings.policy.name, settings.engine
    if policy == "none" or engine.adapter == "off":
        return False
    return engine.device == "cpu" or engine.adapter == "on" or policy != "fixed"


def adapter_kwargs_of(settings: Settings) -> dict[str, str]:
    """Return vLLM's engine arguments that name our classes; {} for vLLM's own."""
    return dict(_CLASSES[settings.engine.device]) if has_adapter(settings) else {}


def depth_schedule_of(settings: Settings) -> list[list[int]]:
    """Return vLLM's table of draft lengths by batch size, for the depths we may choose.

    Our schedulers set the length themselves and read nothing from this table. Setting
    it gives them the hook, and stops vLLM from padding new requests with drafts that
    nobody selected. On a GPU vLLM captures graphs of the drafter for the lengths that
    occur in it, so there it names them all.
    """
    depth, max_num_seqs = (
        settings.policy.num_speculative_tokens,
        settings.engine.max_num_seqs,
    )
    varies = settings.policy.name not in {"fixed", "tetris"}
    if settings.engine.device == "cpu" or not varies:
        return [[1, max_num_seqs, depth]]
    first = max(1, depth - max_num_seqs + 1)
    shallower = [
        [size, size, length] for size, length in enumerate(range(first, depth), start=1)
    ]
    return [*shallower, [len(shallower) + 1, max_num_seqs, depth]]


def find_adapter_problems(settings: Settings) -> Iterator[Finding]:
    """Yield every reason why these settings cannot be served."""
    policy, engine = settings.policy, settings.engine
    if ":" in policy.name:
        try:
            load_planner_class(policy.name)
        except ValueError as error:
            yield Finding("error", "policy.name", str(error))
    if engine.adapter == "off" and policy.name not in PLAIN_POLICIES:
        yield Finding(
            "error",
            "engine.adapter",
            f"off leaves the engine to vLLM, which has no policy {policy.name}; set "
            "policy.name: fixed, or engine.adapter: auto",
        )
    if engine.device == "cpu" and policy.method in _GPU_ONLY_METHODS:
        yield Finding(
            "error",
            "policy.method",
            f"{policy.method} does not run on engine.device: cpu; set policy.method: "
            "draft_model, or engine.device: gpu",
        )
    if engine.device != "gpu" or not has_adapter(settings):
        return
    if policy.method not in METHODS_V2:
        yield Finding(
            "error",
            "policy.method",
            f"{policy.method} reports no confidence on a GPU, so that {policy.name} "
            "cannot choose among its drafts; set policy.name: fixed, or "
            "policy.method: draft_model",
        )
    if engine.extra.get("async_scheduling", True) in (False, None):
        yield Finding(
            "error",
            "engine.extra.async_scheduling",
            f"must not be off with policy.name: {policy.name} on a GPU; remove it, or "
            "set policy.name: fixed",
        )


def policy_config_of(policy: PolicySettings) -> dict[str, Any]:
    """Return the policy as it travels inside vLLM's configuration."""
    return {
        "policy": policy.name,
        "draft_tokens": policy.draft_tokens,
        "max_draft_tokens": policy.num_speculative_tokens,
        "latency_target_ms": policy.latency_target_ms,
        "params": policy.params,
        "watchdog": policy.watchdog,
        "audit": policy.audit,
        # Deadlines are the fronts' business.
        "classes": {
            name: one.model_dump(exclude={"deadline_ms"})
            for name, one in policy.classes.items()
        },
    }
