"""Ray's private names that the server leans on, and why; one Ray version.

Whatever is not here is Ray's public interface. `find_missing_names` says which of them
an upgrade has moved.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

_SERVE_LLM = "ray.llm._internal.serve"

FRONT_NAMES: Final = {
    f"{_SERVE_LLM}.core.server.builder:build_llm_deployment": (
        "binds the engine replicas under a name and options of ours"
    ),
    f"{_SERVE_LLM}.core.server.llm_server:LLMServer._start_engine": (
        "the replica's base class; takes an engine class, as `engine_cls`"
    ),
    f"{_SERVE_LLM}.engines.vllm.vllm_engine:VLLMEngine._start_async_llm_engine": (
        "where the engine core is launched; our engine gives it more outputs there and "
        "reads `_engine_client` and `_vllm_args` afterwards"
    ),
    f"{_SERVE_LLM}.core.ingress.ingress:make_fastapi_ingress": (
        "mounts the front's methods as routes"
    ),
    f"{_SERVE_LLM}.core.configs.openai_api_models:to_model_metadata": (
        "how `/v1/models` describes the model"
    ),
    f"{_SERVE_LLM}.core.configs.openai_api_models:ChatCompletionRequest": (
        "vLLM's request bodies, which Serve can pickle"
    ),
}
"""What the front and its replicas lean on: `module:attribute`, and why."""


def find_missing_names() -> list[str]:
    """Return the names that this Ray does not have."""
    return [name for name in FRONT_NAMES if not _exists(name)]


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        found = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True
