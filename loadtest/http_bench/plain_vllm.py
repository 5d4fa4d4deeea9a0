"""The same model pair under vLLM's own server, for what ours costs on top of it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from loadtest.engine_bench.arms import Arm as Policy
from loadtest.engine_bench.preload import find_preloads

from .errors import LoadTestError

# Not the `vllm` command: it asks for the metadata of a package called vllm, which the
# build for CPUs does not have.
_SERVER = "vllm.entrypoints.launchers.api_server.entry"
_FLAGS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "dtype",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "seed",
    "quantization",
    "tool_call_parser",
    "reasoning_parser",
)
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "KMP_BLOCKTIME": "5",
}
"""As our replicas have it."""


def plain_vllm_command(
    config: Path, policy: Policy, overrides: Iterable[str] = ()
) -> str:
    """Return the shell command that serves a deployment file's pair with vLLM alone.

    Args:
        config: Deployment file; its `model` and `engine` sections become flags.
        policy: `none` or `fixed`, which vLLM has itself.
        overrides: `section.setting=value`, in the place of what the file says.

    Returns:
        The command, with `{port}` where the port goes.

    Raises:
        LoadTestError: If the file cannot be read, or leaves open what they differ in.
    """
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
        for override in overrides:
            _replace(settings, override)
        model, engine = settings["model"], settings["engine"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise LoadTestError(f"--config {config}: cannot be read: {error}") from None
    if engine.get("max_num_seqs") is None:
        raise LoadTestError(
            f"--config {config}: name engine.max_num_seqs; ours and vLLM's own server "
            "have different defaults"
        )
    arguments = ["--model", _locate(model["target"], config)]
    arguments += ["--served-model-name", model["id"], "--enable-prompt-tokens-details"]
    if model.get("tokenizer"):
        arguments += ["--tokenizer", _locate(model["tokenizer"], config)]
    for name in _FLAGS:
        if engine.get(name) is not None:
            arguments += [_flag(name), str(engine[name])]
    if engine.get("enforce_eager"):
        arguments.append("--enforce-eager")
    if engine.get("enable_prefix_caching") is False:
        arguments.append("--no-enable-prefix-caching")
    if engine.get("tool_call_parser"):
        arguments.append("--enable-auto-tool-choice")
    for name, value in (engine.get("extra") or {}).items():
        arguments += [_flag(name), _text(value)]
    if policy.speculates:
        speculation = {
            "method": (settings.get("policy") or {}).get("method", "draft_model"),
            "model": _locate(model["draft"], config),
            "num_speculative_tokens": policy.draft_tokens,
        }
        arguments += ["--speculative-config", json.dumps(speculation)]
    command = ["env", *(f"{k}={v}" for k, v in _environment(settings).items())]
    command += [sys.executable, "-m", _SERVER, "--host", "127.0.0.1", *arguments]
    return f"{shlex.join(command)} --port {{port}}"


def _replace(settings: dict[str, Any], override: str) -> None:
    """Put the value of `section.setting=value` into settings; YAML, as for `up`."""
    path, separator, value = override.partition("=")
    *sections, name = path.split(".")
    if not separator or not sections:
        raise LoadTestError(f"--set {override}: write section.setting=value")
    for section in sections:
        settings = settings.setdefault(section, {})
    settings[name] = yaml.safe_load(value)


def _environment(settings: Mapping[str, Any]) -> dict[str, str]:
    engine = settings["engine"]
    num_cpus = (settings.get("replicas") or {}).get("num_cpus") or 1
    environment = dict(_ENVIRONMENT)
    # Ray gives an actor as many threads as it has CPUs, and at least one.
    threads = engine.get("cpu_threads") or max(1, int(num_cpus))
    environment["OMP_NUM_THREADS"] = str(threads)
    preloads = find_preloads()
    if preloads:
        environment["LD_PRELOAD"] = ":".join(map(str, preloads))
    return environment | (engine.get("env") or {})


def _locate(name: str, config: Path) -> str:
    """Return a folder relative to the file as a path, and a hub id as it is."""
    if name.startswith(("/", "./", "../", "~")):
        return str((config.resolve().parent / Path(name).expanduser()).resolve())
    return name


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
