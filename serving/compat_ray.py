"""Ray's private names that the server leans on, what for, and the door to them.

All other modules of the server import such names from here. They are looked for when an
application is built and by one contract test, so that an upgrade that moves any fails
there, naming it, and not in a request. `serving.contract` says how a row reads.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from serving.contract import check_names, read_rows

if TYPE_CHECKING:
    from serving.contract import Table

_LLM: Final = "ray.llm._internal"
_SERVE: Final = f"{_LLM}.serve"

RAY: Final[Table] = {
    f"{_SERVE}.core.server.llm_server:LLMServer": {
        "__init__(llm_config, engine_cls, ...)": "our engine",
        "start()": "polling and following the engine begin after it",
        "_start_engine()": "starts an actor for usage statistics besides",
        "sleep(...) wakeup(...) collective_rpc(...)": "may load: a hang is told later",
        "engine": "the running engine",
    },
    f"{_SERVE}.engines.vllm.vllm_engine:VLLMEngine": {
        "start()": "the names it leans on are looked for before it",
        (
            "_start_async_llm_engine(vllm_engine_args, vllm_engine_config, "
            "placement_group)"
        ): "one CPU worker runs in the engine core's process",
        "_engine_client": "the way to the engine core, and whether it lives",
        "_vllm_args": "what a front builds vLLM's handlers with",
    },
    f"{_SERVE}.core.server.builder": {
        (
            "build_llm_deployment(llm_config, name_prefix, bind_kwargs, ..., "
            "deployment_cls)"
        ): "binds the engine replicas",
    },
    f"{_SERVE}.core.ingress.middleware": {
        "SetRequestIdMiddleware": "a request's id, from its header or made",
    },
    f"{_SERVE}.observability.metrics.fast_api_metrics": {
        "metrics_lifespan(app)": "HTTP metrics",
    },
    "ray.serve.context": {
        "_serve_request_context": "leases do not end with the request they are for",
    },
    "ray.serve.context:_RequestContext": {
        "request_id": "under which replicas log a request's leases",
    },
    f"{_SERVE}.constants": {
        "DEFAULT_LLM_ROUTER_HTTP_TIMEOUT": "longest wait for a first token",
    },
    f"{_SERVE}.core.configs.openai_api_models": {
        "to_model_metadata(model_id, ...)": "how `/v1/models` describes a model",
    },
    f"{_LLM}.common.callbacks.base:CallbackBase": {
        "on_before_node_init()": "skips the download of local models",
        "ctx kwargs": "holds the switch; what the deployment configured",
    },
    f"{_LLM}.common.callbacks.base:CallbackCtx": {"run_init_node": "the switch"},
    "ray.serve._private.constants": {
        "SERVE_LOGGER_NAME": "the log that vLLM's set-up would close",
    },
    "ray.serve._private.common": {
        "RUNNING_REQUESTS_KEY": "what a replica reports in place of Serve's count",
    },
    "ray.serve.api": {"delete(name, _blocking)": "draining by Ctrl-C can be cut short"},
    "ray._common.usage.usage_lib": {
        "usage_stats_enabled()": "whether anybody wants usage statistics",
    },
    "ray._private.worker": {"_global_node": "the local Ray"},
    "ray._private.node:Node": {
        "get_logs_dir_path() dead_processes()": "log folder, dead parts",
        (
            "kill_gcs_server(check_alive) start_gcs_server()"
        ): "its GCS goes on where what it knew is in a Redis",
    },
}


def _find_exports() -> dict[str, str]:
    exports = {}
    for where, rows in RAY.items():
        module, _, name = where.partition(":")
        for one in [name] if name else [row.name for row in read_rows(rows)]:
            exports[one] = module
    return exports


_EXPORTS: Final = _find_exports()
"""Module of each name that others may import from here."""


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def local_node() -> Any:
    """Return the node that this process has started; None if it is gone."""
    return import_module("ray._private.worker")._global_node


def check_ray() -> None:
    """Refuse a Ray that has moved what the server leans on.

    Raises:
        MovedNamesError: With every name that moved and what it was for.
    """
    check_names("Ray", version("ray"), RAY)
