"""Settings that are fine by themselves but contradict each other."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from serving.settings.finding import Finding
from serving.settings.report import did_you_mean

if TYPE_CHECKING:
    from serving.settings.sections import Sections

METHODS_WITH_DRAFT_MODEL: Final = frozenset(
    {"draft_model", "eagle", "eagle3", "dflash"}
)
"""Methods whose drafter has weights of its own, so `model.draft` must be given."""

METHODS_WITHOUT_DRAFT_MODEL: Final = frozenset({"ngram", "suffix"})
"""Methods that draft from text seen before; `mtp` and `dspark` may go either way."""

_ENGINE_SETTING_OF: Final = {
    "model": "model.target",
    "tokenizer": "model.tokenizer",
    "served_model_name": "model.id",
    "trust_remote_code": "model.trust_remote_code",
    "speculative_config": "policy",
    "scheduler_cls": "policy",
    "worker_cls": "policy",
    "additional_config": "policy",
    "distributed_executor_backend": "engine.device",
    "per_request_spec_decode_metrics": "engine.per_request_metrics",
}
"""vLLM arguments we set ourselves, and the setting that governs each."""


def find_disagreements(settings: "Sections") -> Iterator[str]:
    """Yield every contradiction, as `setting: reason; fix`."""
    yield from _pair_disagreements(settings)
    yield from _class_disagreements(settings)
    yield from _engine_disagreements(settings)
    yield from _extra_disagreements(settings)
    yield from _replica_disagreements(settings)


def _pair_disagreements(settings: "Sections") -> Iterator[str]:
    policy = settings.policy
    if policy.params and ":" not in policy.name:
        yield (
            f"policy.params: policy.name: {policy.name} takes none, they are for "
            "module:Class; remove them"
        )
    if policy.name == "none":
        return
    if policy.method in METHODS_WITH_DRAFT_MODEL and settings.model.draft is None:
        yield (
            f"model.draft: is required by policy.method: {policy.method}; name a "
            "draft model, or set policy.name: none to serve without speculation"
        )
    if policy.method in METHODS_WITHOUT_DRAFT_MODEL and settings.model.draft:
        yield (
            f"model.draft: policy.method: {policy.method} drafts without a model; "
            "remove it, or set policy.method: draft_model"
        )
    own = {"method", "model", "num_speculative_tokens", "draft_sample_method"}
    for name in sorted(own & set(policy.extra)):
        yield f"policy.extra.{name}: is set by the policy section; remove it"
    length = "draft_tokens" if policy.name == "fixed" else "max_draft_tokens"
    if policy.name == "tetris" and policy.num_speculative_tokens < policy.draft_tokens:
        yield (
            f"policy.max_draft_tokens: must be ≥ policy.draft_tokens "
            f"({policy.draft_tokens}, got {policy.max_draft_tokens})"
        )
    if policy.num_speculative_tokens >= settings.engine.max_model_len:
        yield (
            f"policy.{length}: drafts must be shorter than "
            f"engine.max_model_len ({settings.engine.max_model_len}, got "
            f"{policy.num_speculative_tokens})"
        )


def _class_disagreements(settings: "Sections") -> Iterator[str]:
    owners: dict[int, str] = {}
    for name, own in settings.policy.classes.items():
        if own.priority is None:
            continue
        if own.priority in owners:
            yield (
                f"policy.classes.{name}.priority: {own.priority} belongs to "
                f"policy.classes.{owners[own.priority]} already; give each class one "
                "of its own"
            )
        owners[own.priority] = name
    scheduling = settings.engine.extra.get("scheduling_policy", "priority")
    if owners and scheduling != "priority":
        yield (
            f"engine.extra.scheduling_policy: must be priority (got {scheduling}) for "
            "policy.classes with a priority; remove it here, or the priorities there"
        )


def _gpu_disagreements(settings: "Sections") -> Iterator[str]:
    num_gpus, share = settings.replicas.num_gpus, settings.engine.gpu_memory_utilization
    if not num_gpus:
        yield "replicas.num_gpus: must be > 0 with engine.device: gpu; set it to 1"
    elif num_gpus > 1:
        yield (
            "replicas.num_gpus: must be ≤ 1, what each worker gets of a GPU (got "
            f"{num_gpus:g}); for several in one replica set "
            "engine.tensor_parallel_size"
        )
    elif num_gpus < 1 and (share is None or share > num_gpus):
        yield (
            f"engine.gpu_memory_utilization: must be ≤ replicas.num_gpus ({num_gpus:g})"
            ", or engines that share a GPU find no memory; set it to a little less"
        )


def _engine_disagreements(settings: "Sections") -> Iterator[str]:
    engine = settings.engine
    if engine.device == "cpu":
        if engine.kv_cache_memory_bytes is None:
            yield (
                "engine.kv_cache_memory_bytes: is required on the CPU, where vLLM "
                "would otherwise take most of the machine's memory; set the "
                "size of the KV cache, e.g. 512Mi"
            )
        if settings.replicas.num_gpus:
            yield (
                "replicas.num_gpus: must be 0 with engine.device: cpu; set "
                "engine.device: gpu to run on GPUs"
            )
        if engine.gpu_memory_utilization is not None:
            yield (
                "engine.gpu_memory_utilization: has no use with engine.device: "
                "cpu; set engine.kv_cache_memory_bytes"
            )
    else:
        yield from _gpu_disagreements(settings)
    batched = engine.max_num_batched_tokens
    if batched is not None and batched < engine.max_num_seqs:
        yield (
            "engine.max_num_batched_tokens: must be ≥ engine.max_num_seqs "
            f"({engine.max_num_seqs}, got {batched})"
        )
    if engine.extra.get("data_parallel_size", 1) != 1:
        yield (
            "engine.extra.data_parallel_size: must be 1, because vLLM drops its "
            "draft-depth hook under data parallelism; raise replicas.max instead"
        )
    policy, stages = settings.policy, engine.extra.get("pipeline_parallel_size", 1)
    if stages != 1 and policy.name != "none" and policy.method == "draft_model":
        yield (
            f"engine.extra.pipeline_parallel_size: must be 1 (got {stages}) with "
            "policy.method: draft_model, because vLLM 0.32 cannot run a whole model "
            "on a last stage; set engine.tensor_parallel_size, or draft with a "
            "head such as eagle3"
        )


def _extra_disagreements(settings: "Sections") -> Iterator[str]:
    extra = settings.engine.extra
    if not extra:
        return
    own = type(settings.engine).model_fields.keys() - {"extra"}
    known = _engine_argument_names()
    for name in extra:
        if name in _ENGINE_SETTING_OF:
            reason = f"is set by {_ENGINE_SETTING_OF[name]}; remove it here"
        elif name in own:
            reason = f"write it as engine.{name}"
        elif known is not None and name not in known:
            reason = "vLLM has no such engine argument" + did_you_mean(name, known)
        else:
            continue
        yield f"engine.extra.{name}: {reason}"


def find_idle_seats(settings: "Sections") -> Iterator[Finding]:
    """Yield a warning where an engine has seats that no request can come to."""
    seats, most = (
        settings.engine.max_num_seqs,
        settings.replicas.max_ongoing_requests,
    )
    if most < seats:
        yield Finding(
            "warning",
            "replicas.max_ongoing_requests",
            f"lets {most} requests to an engine of {seats} seats "
            f"(engine.max_num_seqs); set it to {2 * seats}",
        )


def _replica_disagreements(settings: "Sections") -> Iterator[str]:
    replicas = settings.replicas
    if replicas.max < replicas.min:
        yield (
            f"replicas.max: must be ≥ replicas.min ({replicas.min}, got {replicas.max})"
        )
    if replicas.target_ongoing_requests > replicas.max_ongoing_requests:
        yield (
            "replicas.target_ongoing_requests: must be ≤ "
            f"replicas.max_ongoing_requests ({replicas.max_ongoing_requests}, got "
            f"{replicas.target_ongoing_requests:g}); autoscaling would never act"
        )
    access = settings.http.access
    if access.allow_anonymous and access.keys_file is not None:
        yield (
            "http.access.allow_anonymous: with keys_file nobody is let in without a "
            "key; remove one of the two"
        )
    fronts = settings.http.fronts
    if fronts.max < fronts.min:
        yield f"http.fronts.max: must be ≥ http.fronts.min ({fronts.min})"
    ports = (
        settings.http.port,
        settings.http.dashboard_port,
        settings.http.metrics_port,
    )
    if len(set(ports)) < len(ports):
        yield "http: port, dashboard_port and metrics_port must differ"


def _engine_argument_names() -> frozenset[str] | None:
    """Names of vLLM's engine arguments, or None where vLLM is not installed."""
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.cli_args import FrontendArgs
    except ImportError:
        return None
    return frozenset(
        field.name
        for args in (AsyncEngineArgs, FrontendArgs)
        for field in dataclasses.fields(args)
    )
