"""The adapter's own settings, as they travel inside vLLM's configuration."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from policies.types import PolicySpec
from serving.draft_lengths import read_old_lengths

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm import SamplingParams

    from serving.engine.compat import VllmConfig

logger = logging.getLogger(__name__)

ADDITIONAL_CONFIG_KEY = "tetris"
"""Our section of vLLM's `additional_config`."""

SPECULATION_XARG = "speculative_decoding"
"""Key in a request's `vllm_xargs` with which it switches speculation off."""

_OFF = frozenset({"off", "false", "no", "0"})


def read_policy(
    vllm_config: VllmConfig, section: Mapping[str, Any] | None = None
) -> PolicySpec:
    """Read the policy from an engine's configuration, or from another section for it.

    Raises:
        ValueError: If the section is missing or incomplete, no drafter is configured,
            the engine cannot draft as deep as the policy asks, or data parallelism
            inside the engine is on.
    """
    if section is None:
        section = (vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG_KEY)
    if not section:
        raise ValueError(
            f"additional_config[{ADDITIONAL_CONFIG_KEY!r}] is missing: name the policy "
            "and its draft_tokens or max_draft_tokens there"
        )
    try:
        name = str(section["policy"])
        section, old_names = read_old_lengths(name, section)
        for sentence in old_names:
            logger.warning("additional_config[%r].%s", ADDITIONAL_CONFIG_KEY, sentence)
        is_fixed = name in {"fixed", "tetris"}
        spec = PolicySpec(
            name,
            draft_tokens=int(section["draft_tokens"]) if is_fixed else 0,
            max_draft_tokens=0 if name == "fixed" else int(section["max_draft_tokens"]),
            latency_target_ms=section.get("latency_target_ms"),
            params=section.get("params") or {},
            audit=float(section.get("audit") or 0.0),
        )
    except KeyError as error:
        raise ValueError(
            f"additional_config[{ADDITIONAL_CONFIG_KEY!r}] lacks {error}"
        ) from None
    _check_engine(spec, vllm_config)
    return spec


def _check_engine(spec: PolicySpec, vllm_config: VllmConfig) -> None:
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise ValueError(
            f"policy {spec.name!r} needs a drafter: set speculative_config, or use "
            "policy 'none' with vLLM's own scheduler"
        )
    if vllm_config.parallel_config.data_parallel_size > 1:
        raise ValueError(
            "data_parallel_size > 1 inside an engine is not supported: vLLM drops the "
            "draft-depth hook there. Run more replicas instead "
            "(deployment.autoscaling.max_replicas)"
        )
    if not speculative.num_speculative_tokens_per_batch_size:
        raise ValueError(
            "speculative_config.num_speculative_tokens_per_batch_size is unset: "
            "without it vLLM pads new requests with drafts nobody selected. Set it to "
            "[[1, max_num_seqs, num_speculative_tokens]]"
        )
    if speculative.num_speculative_tokens < spec.max_depth:
        raise ValueError(
            f"policy {spec.name!r} drafts {spec.max_depth} tokens but "
            "speculative_config.num_speculative_tokens is "
            f"{speculative.num_speculative_tokens}: raise it or lower the policy"
        )
    if speculative.method == "suffix" and (
        spec.max_depth < speculative.num_speculative_tokens
    ):
        raise ValueError(
            f"policy {spec.name!r} drafts {spec.max_depth} tokens, but vLLM's suffix "
            f"drafts up to {speculative.num_speculative_tokens}, as this engine was "
            "started: redeploy with the other length"
        )


def wants_watchdog(section: Mapping[str, Any]) -> bool:
    """Tell whether our section of a configuration wants acceptance watched."""
    return bool(section.get("watchdog", True))


def opts_out(extra_args: Mapping[str, Any] | None) -> bool:
    """Tell whether a request switched speculation off for itself."""
    if not extra_args:
        return False
    return str(extra_args.get(SPECULATION_XARG, "on")).lower() in _OFF


def find_stop_token_ids(params: SamplingParams | None) -> set[int | None]:
    """Return the tokens that end a request as soon as they are emitted."""
    if params is None:
        return set()
    return {params.eos_token_id, *(params.stop_token_ids or ())}
