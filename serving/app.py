"""Build the Ray Serve application of one deployment: an ingress and its engines."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from serving.adapters import (
    find_adapter_problems,
    has_adapter,
)
from serving.compat_ray import check_ray
from serving.engine_args import engine_kwargs_of, planner_key_of, replica_env_of
from serving.replica.options import ReplicaOptions
from serving.settings.gguf_files import gguf_files_of
from serving.settings.gguf_models import with_converted_models
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

logger = logging.getLogger("ray.serve")

_INGRESS_HEADROOM: Final = 256
"""Requests the ingress holds beyond what engines run and queue.

The engines' own queue limit must be met first, because its refusal is ours to word;
Serve's refusal at the ingress is plain text.
"""

_FRONT_MAX_REQUESTS: Final = 10_000
_FRONT_TARGET_REQUESTS: Final = 200
"""Requests a front's event loop is to carry at a time."""

_KERNEL_VARIABLES: Final = ("LD_PRELOAD", "VLLM_CPU_OMP_THREADS_BIND", "KMP_BLOCKTIME")


def build(args: dict[str, Any]) -> "Application":
    """Build the application from a deployment file or from inline settings.

    This is the import path for Ray Serve: `serve run serving.app:build
    config=configs/tiny.yaml`, or `import_path: serving.app:build` with `args` in a
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
    if "config" in args:
        overrides = {name: value for name, value in args.items() if name != "config"}
        settings = load_settings(args["config"], overrides)
    else:
        settings = parse_settings(args, "args")
    for finding in settings.findings:
        is_warning = finding.severity == "warning"
        logger.log(logging.WARNING if is_warning else logging.INFO, "%s", finding)
    return settings


def build_app(settings: Settings) -> "Application":
    """Build the application of checked settings.

    GGUF files are converted here, and by every replica on a machine that has not yet.

    Raises:
        SettingsError: The model files are missing or do not belong together.
        MovedNamesError: This Ray is not as the server expects it.
    """
    declared = settings.model
    settings = with_converted_models(settings, logger.info)
    check_servable(settings)
    if settings.http.front == "fleet":
        return _build_fleet(settings)
    check_ray()
    from ray import serve

    from serving.compat_ray import (
        build_llm_deployment,
        make_fastapi_ingress,
        to_model_metadata,
    )
    from serving.front.app import BOARD_ENDPOINTS, ENDPOINTS, TetrisIngress, build_api
    from serving.replica.server import TetrisServer

    gguf_files = {
        name: getattr(settings.model, field)
        for field, name in gguf_files_of(declared).items()
    }
    llm_config = llm_config_of(settings, gguf_files)
    engines = build_llm_deployment(
        llm_config,
        deployment_cls=TetrisServer,
        bind_kwargs={"options": _replica_options(settings)},
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


def _build_fleet(settings: Settings) -> "Application":
    """Build fronts over engine replicas; both keep the names of Ray's own path."""
    from ray import serve

    from serving.compat_ray import (
        build_llm_deployment,
        make_fastapi_ingress,
        to_model_metadata,
    )
    from serving.front.app import BOARD_ENDPOINTS, ENDPOINTS, build_api
    from serving.front.http import Front
    from serving.replica.engine_server import EngineServer

    llm_config = llm_config_of(settings)
    replicas, http = settings.replicas, settings.http
    engines = build_llm_deployment(
        llm_config,
        name_prefix="TetrisServer:",
        deployment_cls=EngineServer,
        bind_kwargs={
            "options": _replica_options(settings),
            # Twice, because an update has both generations of fronts connected.
            "num_slots": 1 + 2 * http.fronts.max,
        },
        # What may wait is the fronts' business, who know which of it is a replay.
        override_serve_options={"max_queued_requests": -1},
    )
    front = serve.deployment(
        make_fastapi_ingress(
            Front,
            endpoint_map=ENDPOINTS | (BOARD_ENDPOINTS if http.board else {}),
            app=build_api(http.max_body_bytes),
        ),
        **front_options_of(settings),
    )
    return front.bind(
        engines,
        model_card=to_model_metadata(settings.model.id, llm_config).model_dump(),
        policy_name=settings.policy.name,
        class_priorities=_class_priorities(settings),
        stream_interval_ms=http.stream_interval_ms,
        min_replicas=replicas.min,
        max_ongoing_requests=replicas.max_ongoing_requests,
        max_queued_requests=replicas.max_queued_requests,
    )


def _replica_options(settings: Settings) -> ReplicaOptions:
    return ReplicaOptions(
        device=settings.engine.device,
        policy_name=settings.policy.name,
        has_snapshots=has_adapter(settings),
        planner_key=planner_key_of(settings),
        class_priorities=_class_priorities(settings),
        hang_timeout_s=settings.replicas.engine_hang_timeout_s,
        load_timeout_s=settings.replicas.start_timeout_s,
        stream_interval_s=1e-3 * settings.http.stream_interval_ms,
        board_text=bool(settings.http.board_text),
    )


def _class_priorities(settings: Settings) -> dict[str, int | None]:
    return {name: one.priority for name, one in settings.policy.classes.items()}


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


def llm_config_of(
    settings: Settings, gguf_files: Mapping[str, str] | None = None
) -> "LLMConfig":
    """Translate settings into Ray Serve's description of an LLM deployment.

    Args:
        settings: The deployment, its models converted.
        gguf_files: The folder that replicas have to find converted, by GGUF file.
    """
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
        # Streams are paced where the engine hands them out.
        experimental_configs={"stream_batching_interval_ms": 0},
        runtime_env={"env_vars": replica_env_of(settings)},
        log_engine_metrics=True,
        **_download_options(settings, dict(gguf_files or {})),
    )


def _download_options(settings: Settings, gguf_files: dict[str, str]) -> dict[str, Any]:
    if not (gguf_files or is_local_path(settings.model.target)):
        return {}
    return {
        "callback_config": {
            "callback_class": "serving.replica.local_models.SkipLocalDownload",
            "callback_kwargs": {"gguf_files": gguf_files},
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


def front_options_of(settings: Settings) -> dict[str, Any]:
    """Options of the deployment of fronts."""
    fronts = settings.http.fronts
    return {
        "name": "TetrisIngress",
        "autoscaling_config": {
            "min_replicas": fronts.min,
            "max_replicas": fronts.max,
            "target_ongoing_requests": _FRONT_TARGET_REQUESTS,
        },
        # Fronts refuse by themselves, in words; Serve would let requests wait where no
        # deadline holds and nothing is said meanwhile.
        "max_ongoing_requests": _FRONT_MAX_REQUESTS,
        "max_constructor_retry_count": settings.replicas.start_attempts,
        "health_check_period_s": settings.replicas.health_check_period_s,
        "health_check_timeout_s": settings.replicas.health_check_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": settings.replicas.drain_timeout_s,
        "ray_actor_options": {
            "num_cpus": 0,
            "runtime_env": {"env_vars": _front_env(settings)},
        },
    }


def _front_env(settings: Settings) -> dict[str, str]:
    """What an engine has, without what is meant for its kernels."""
    env = replica_env_of(settings)
    for name in _KERNEL_VARIABLES:
        env.pop(name, None)
    return env | {"OMP_NUM_THREADS": "1"}


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
