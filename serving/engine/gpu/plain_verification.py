"""Where trimming drafts on the device is not possible, and drafts are all verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.engine.compat import VllmConfig

METHODS_V2 = frozenset({"draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"})
"""Drafters whose confidence vLLM's V2 runner keeps on the device."""

METHODS_ON_TARGETS_POSITIONS = frozenset({"eagle", "eagle3", "mtp"})
"""Heads that vLLM has draft as far as the target's positions go, however short the
checkpoint says that its context is, and makes fit for it."""

_PARALLEL_METHODS = frozenset({"dflash", "dspark"})

ATTENTION_BACKEND = "attention_backend"
"""Reason found only by the worker: attention that plans by lengths known on the host,
or that cannot bear requests of different lengths in one captured graph."""


NO_CONFIDENCE = "no_confidence"
"""Reason found only when the drafter is loaded: a checkpoint without the confidence
head that its method has instead of logits."""


def drafts_in_one_pass(vllm_config: VllmConfig) -> bool:
    """Tell whether the drafter makes all its tokens in a single forward pass."""
    speculative = vllm_config.speculative_config
    return bool(
        speculative.method in _PARALLEL_METHODS
        or speculative.parallel_drafting
        # One graph runs all modules, whatever the depth.
        or speculative.use_multi_module_mtp()
    )


def keep_one_depth(vllm_config: VllmConfig) -> None:
    """Let graphs be captured for full drafts alone: without trimming, all are full."""
    speculative = vllm_config.speculative_config
    most = vllm_config.scheduler_config.max_num_seqs
    depth = speculative.num_speculative_tokens
    speculative.num_speculative_tokens_per_batch_size = [[1, most, depth]]


def find_plain_reason(vllm_config: VllmConfig) -> str | None:
    """Find out why vLLM cannot trim drafts on the device under this configuration.

    The same conditions under which vLLM 0.32 refuses `enable_adaptive_verification`,
    asked before it is switched on, so that an engine can start without.

    Returns:
        A label for logs and metrics; None if nothing is in the way.
    """
    speculative = vllm_config.speculative_config
    parallel = vllm_config.parallel_config
    graphs = vllm_config.compilation_config.cudagraph_mode
    reasons = {
        "runner_v1": not vllm_config.use_v2_model_runner,
        "method": speculative.method not in METHODS_V2,
        "local_argmax": bool(
            speculative.use_local_argmax_reduction and speculative.method != "dspark"
        ),
        "lora": vllm_config.lora_config is not None,
        "pipeline_parallel": parallel.pipeline_parallel_size > 1,
        "eager": not graphs.has_full_cudagraphs(),
        "batch_sharded_sampling": bool(parallel.enable_batch_sharded_sampling),
        "sampling_mask": bool(vllm_config.model_config.return_sampling_mask),
        "routed_experts": bool(vllm_config.aux_output_config.enabled),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def find_unfit_backend(vllm_config: VllmConfig) -> str | None:
    """Find an attention back end that was asked for and cannot follow the device.

    vLLM refuses to load a model with one while `enable_adaptive_verification` is on.
    Where it chooses itself, it chooses one that can. For workers alone: back ends ask
    what device they are on, and their import may take seconds.

    Returns:
        Its name; None if there is none.
    """
    from vllm.config import set_current_vllm_config

    attention = vllm_config.attention_config
    speculative = vllm_config.speculative_config
    asked_for = [attention.backend, *attention.backend_per_kind.values()]
    if speculative.method != "dspark":
        # DSpark's head always runs blocks of full length.
        asked_for.append(speculative.attention_backend)
    with set_current_vllm_config(vllm_config):
        for backend in asked_for:
            if backend is not None and not _follows_device(backend):
                return str(backend.name)
    return None


def _follows_device(backend: Any) -> bool:
    try:
        found = backend.get_class()
    except (ImportError, OSError, ValueError):
        return True  # vLLM says better what is missing.
    return bool(found.supports_device_cpu_query_lens_mismatch())
