"""Build the Ray Serve application of one deployment: fronts and engine replicas."""

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from serving.adapters import (
    find_adapter_problems,
    has_adapter,
)
from serving.compat_ray import check_ray
from serving.engine_args import engine_kwargs_of, planner_key_of, replica_env_of
from serving.replica.options import ReplicaOptions
from serving.settings.finding import Finding
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

FRONTS: Final = "TetrisFront"
ENGINES: Final = "TetrisEngine"
"""Deployments' names, the latter before that of the model; labels of all metrics."""

_FRONT_MAX_REQUESTS: Final = 10_000
_FRONT_TARGET_REQUESTS: Final = 200
"""Requests a front's event loop is to carry at a time."""

_ENGINE_VARIABLES: Final = (
    *("LD_PRELOAD", "VLLM_CPU_OMP_THREADS_BIND", "KMP_BLOCKTIME"),
    "VLLM_REGEX_COMPILATION_TIMEOUT_S",
)


def build(args: dict[str, Any]) -> "Application":
    """Build the application from a deployment file or from inline settings.

    This is the import path for Ray Serve: `serve run serving.app:build
    config=configs/tiny.yaml http.access.allow_anonymous=true`, or `import_path:
    serving.app:build` with `args` in a Serve config file.

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

    GGUF files are converted here, and by all on machines that have not yet.

    Raises:
        SettingsError: The model files are missing or do not belong together.
        MovedNamesError: This Ray is not as the server expects it.
    """
    declared = settings.model
    settings = with_converted_models(settings, logger.info)
    check_servable(settings)
    check_access(settings)
    check_ray()
    from ray import serve

    from serving.compat_ray import build_llm_deployment, to_model_metadata
    from serving.front.access import AccessOptions
    from serving.front.app import build_front
    from serving.front.request_class import read_shares
    from serving.replica.server import EngineServer

    gguf_files = {
        name: getattr(settings.model, field)
        for field, name in gguf_files_of(declared).items()
    }
    llm_config = llm_config_of(settings, gguf_files)
    replicas, http = settings.replicas, settings.http
    build = time.time_ns()
    policy_classes = settings.policy.classes
    engines = build_llm_deployment(
        llm_config,
        name_prefix=f"{ENGINES}:",
        deployment_cls=EngineServer,
        bind_kwargs={
            "options": _replica_options(settings, build),
            # An update has both generations of fronts connected, and streams that wait
            # for an engine may have kept one from before.
            "num_slots": 1 + 3 * http.fronts.max,
        },
    )
    front = serve.deployment(
        build_front(
            http.max_body_bytes,
            has_board=http.board,
            access=AccessOptions(
                http.access.keys_file, http.access.redis_url, set(policy_classes)
            )
            if http.access.keys_file is not None
            else None,
        ),
        **front_options_of(settings),
    )
    return front.bind(
        engines,
        model_card=to_model_metadata(settings.model.id, llm_config).model_dump(),
        build=build,
        policy_name=settings.policy.name,
        classes=read_shares(policy_classes),
        stream_interval_ms=http.stream_interval_ms,
        min_replicas=replicas.min,
        max_ongoing_requests=replicas.max_ongoing_requests,
        max_queued_requests=replicas.max_queued_requests,
        gguf_files=gguf_files,
    )


def _replica_options(settings: Settings, build: int) -> ReplicaOptions:
    return ReplicaOptions(
        device=settings.engine.device,
        policy_name=settings.policy.name,
        max_depth=settings.policy.num_speculative_tokens,
        has_snapshots=has_adapter(settings),
        planner_key=planner_key_of(settings),
        hang_timeout_s=settings.replicas.engine_hang_timeout_s,
        load_timeout_s=settings.replicas.start_timeout_s,
        board_text=bool(settings.http.board_text),
        build=build,
    )


def check_servable(settings: Settings) -> None:
    """Refuse settings that cannot work, before anything is started.

    Raises:
        SettingsError: One line for each reason.
    """
    findings = find_problems(settings)
    problems = [str(one) for one in findings if one.severity == "error"]
    if problems:
        raise SettingsError(problems)


def find_problems(settings: Settings) -> list[Finding]:
    """Say whether engines can run these models under this policy."""
    return [*check_models(settings), *find_adapter_problems(settings)]


def check_access(settings: Settings) -> None:
    """Refuse to serve anybody who calls, unless somebody has said so.

    Ray decides on the address, so this knows none: with HAProxy, 0.0.0.0 unless told.

    Raises:
        SettingsError: Nobody has decided who may call.
    """
    access = settings.http.access
    if access.allow_anonymous is None and access.keys_file is None:
        raise SettingsError(
            [
                "http.access: anybody who reaches the server could use it; make a key "
                "with `tetris-serve keys new --file keys.json NAME` and set "
                "http.access.keys_file, or set http.access.allow_anonymous: true"
            ]
        )
    if access.allow_anonymous is False and access.keys_file is None:
        raise SettingsError(
            ["http.access.keys_file: is required with allow_anonymous: false"]
        )


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
    autoscaling: dict[str, Any] = {
        "min_replicas": replicas.min,
        "max_replicas": replicas.max,
        # No initial_replicas: an update would scale the fleet to it, whatever its load.
        # Without a replica at all, a front's hello has Serve start one.
        "target_ongoing_requests": replicas.target_ongoing_requests,
        "upscale_delay_s": replicas.upscale_delay_s,
        "downscale_delay_s": replicas.downscale_delay_s,
    }
    if replicas.target_token_ms is not None:
        autoscaling["policy"] = {
            "policy_function": "serving.autoscaler:TokenTimeScaling",
            "policy_kwargs": {
                "target_token_ms": replicas.target_token_ms,
                "usual_capacity": replicas.target_ongoing_requests,
            },
        }
    return {
        "autoscaling_config": autoscaling,
        "request_router_config": {
            "request_router_class": "serving.front.router:LeaseRouter"
        },
        "max_ongoing_requests": replicas.max_ongoing_requests,
        # What may wait is the fronts' business, who know which of it is a replay.
        "max_queued_requests": -1,
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
        "name": FRONTS,
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
        # They cost little, and before its successor runs nobody would listen.
        "max_surge_percent": 100,
        "graceful_shutdown_wait_loop_s": 0.5,
        # If an update replaces the only engine too, requests wait for the next one.
        "graceful_shutdown_timeout_s": settings.replicas.drain_timeout_s
        + settings.replicas.start_timeout_s,
        "ray_actor_options": {
            "num_cpus": 0,
            "label_selector": fronts.label_selector,
            "runtime_env": {"env_vars": _front_env(settings)},
        },
    }


def _front_env(settings: Settings) -> dict[str, str]:
    """What an engine has, without what is meant for it alone."""
    env = replica_env_of(settings)
    for name in _ENGINE_VARIABLES:
        env.pop(name, None)
    return env | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
