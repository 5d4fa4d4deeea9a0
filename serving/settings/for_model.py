"""A deployment for nothing but a model's name, as `vllm serve MODEL` takes it.

What is found: the device, the model's context, room for the KV cache on a CPU, the
drafting method, and limits in proportion. Everything can be replaced by its name.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from serving.engine.version import find_built_device
from serving.settings.gguf_files import find_gguf, is_gguf
from serving.settings.gguf_models import folder_for
from serving.settings.gpus import count_gpus
from serving.settings.model import (
    Settings,
    SettingsError,
    is_local_path,
    parse_settings,
)
from serving.settings.model_files import ModelFiles
from serving.settings.sections import read_model_name

_MAX_MODEL_LEN: Final = {"cpu": 8192, "gpu": 32_768}
"""Longest context taken unasked: a request of more would need a cache to match."""

_MAX_NUM_SEQS: Final = {"cpu": 16, "gpu": 128}
_CPU_BATCHED_TOKENS: Final = 2048
_LONG_START_S: Final = 1800
"""Time to download weights, or to capture a GPU's graphs."""

_CPU_CACHE_SHARE: Final = 4
"""One in so many parts of the memory that is free goes to the KV cache at most."""

_CACHE_STEP_BYTES: Final = 64 << 20
_UNKNOWN_TOKEN_BYTES: Final = 128 << 10
_UNKNOWN_CONTEXT: Final = 2048
_BLOCK_TOKENS: Final = 16


def settings_for(
    target: str, draft: str | None, overrides: Mapping[str, Any]
) -> Settings:
    """Find settings for a model on this machine.

    Args:
        target: A folder, a GGUF file or a hub id, as in `model.target`; a folder that
            is there may be written without `./`. Of a hub id the configuration is
            downloaded unless it is in the local cache.
        draft: The same for the drafter; None for none.
        overrides: Values by dotted name that replace what is found.

    Raises:
        SettingsError: The model has no configuration that can be read, or what is
            found does not go with the overrides.
    """
    target, draft = path_of(target), draft and path_of(draft)
    device = overrides.get("engine.device") or ("gpu" if _has_gpu() else "cpu")
    if device not in _MAX_NUM_SEQS:
        device = "cpu"  # which the settings' own check is about to refuse
    configs = {"target": _read_config(target, "model.target")}
    if draft:
        configs["draft"] = _read_config(draft, "model.draft")
    method = _method_of(draft, configs["draft"]) if draft else None
    num_seqs = _number(overrides, "engine.max_num_seqs", _MAX_NUM_SEQS[device])
    contexts = [_context_of(configs["target"]), _MAX_MODEL_LEN[device]]
    if draft and device == "gpu" and method is None:
        # vLLM has it draft for whatever is served there.
        contexts.append(_context_of(configs["draft"]))
    engine: dict[str, Any] = {
        "device": device,
        "max_model_len": min(contexts),
        "max_num_seqs": num_seqs,
    }
    replicas: dict[str, Any] = {
        "target_ongoing_requests": max(1, num_seqs * 3 // 4),
        "max_ongoing_requests": 2 * num_seqs,
        "max_queued_requests": 4 * num_seqs,
    }
    if device == "gpu" or not (is_gguf(target) or is_local_path(target)):
        replicas["start_timeout_s"] = _LONG_START_S
    if device == "gpu":
        engine["gpu_memory_utilization"] = 0.9
        replicas["num_gpus"] = 1
    else:
        engine |= _cpu_limits(engine, overrides, list(configs.values()))
    data = {
        "model": {"id": _id_of(target), "target": target},
        "engine": engine,
        "replicas": replicas,
    }
    if draft:
        data["model"]["draft"] = draft
        if method is not None:
            data["policy"] = {"method": method}
    return parse_settings(data, target, overrides=overrides)


def path_of(name: str) -> str:
    """Return a folder or file that is there as a path, and any other name as it is."""
    if is_local_path(name) or Path(name).exists():
        return str(Path(name).expanduser().resolve())
    return str(read_model_name(name))


def _has_gpu() -> bool:
    """Whether there is one, and not the vLLM for processors."""
    with contextlib.suppress(Exception):
        return find_built_device() != "cpu" and count_gpus() > 0
    return False


def _id_of(target: str) -> str:
    if is_gguf(target):
        return Path(target).stem
    return Path(target).name if is_local_path(target) else target


def _number(overrides: Mapping[str, Any], name: str, otherwise: int) -> int:
    value = overrides.get(name)
    return value if type(value) is int and value > 0 else otherwise


def _read_config(name: str, setting: str) -> dict[str, Any]:
    from transformers import PretrainedConfig

    source, options = name, {}
    try:
        if is_gguf(name):
            file = find_gguf(name)
            source = str(folder_for(file))
            if not Path(source).is_dir():
                source, options = str(file.parent), {"gguf_file": file.name}
        config: dict[str, Any]
        config, _ = PretrainedConfig.get_config_dict(source, **options)
    except Exception as error:  # Whatever a file that is cut short leads a reader to.
        reason = str(error).partition("\n")[0]
        raise SettingsError(
            [
                f"{setting}: no configuration of {name} can be read: {reason}; give a "
                "folder, a GGUF file or a hub id"
            ]
        ) from None
    if not config:
        raise SettingsError(
            [f"{setting}: {name} has no config.json; give the folder of a model"]
        )
    return config


def _context_of(config: dict[str, Any]) -> int:
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        context = ModelFiles("", config, None).max_context
        if isinstance(context, int) and context >= _BLOCK_TOKENS:
            return context
    return _UNKNOWN_CONTEXT


def _method_of(draft: str, config: Mapping[str, Any]) -> str | None:
    """Tell a head from a whole model; None for the latter."""
    words = json.dumps([Path(draft).name, config.get("architectures")]).lower()
    return next((name for name in ("eagle3", "eagle") if name in words), None)


def _cpu_limits(
    engine: Mapping[str, Any],
    overrides: Mapping[str, Any],
    configs: list[dict[str, Any]],
) -> dict[str, Any]:
    """Give the cache what all requests may need, as far as memory goes."""
    models = (ModelFiles("", config, None) for config in configs)
    token_bytes = sum(one.kv_token_bytes or _UNKNOWN_TOKEN_BYTES for one in models)
    length = _number(overrides, "engine.max_model_len", engine["max_model_len"])
    room = psutil.virtual_memory().available // _CPU_CACHE_SHARE
    wanted = engine["max_num_seqs"] * length * token_bytes
    steps = min(-(-wanted // _CACHE_STEP_BYTES), room // _CACHE_STEP_BYTES)
    cache = max(1, steps) * _CACHE_STEP_BYTES
    fitting = cache // token_bytes // _BLOCK_TOKENS * _BLOCK_TOKENS
    return {
        "max_model_len": max(_BLOCK_TOKENS, min(engine["max_model_len"], fitting)),
        "max_num_batched_tokens": max(_CPU_BATCHED_TOKENS, engine["max_num_seqs"]),
        "kv_cache_memory_bytes": cache,
        # Compiling wants a compiler, and minutes.
        "enforce_eager": True,
    }
