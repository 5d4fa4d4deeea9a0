"""A deployment under vLLM's own server: no Ray, no scheduler and worker of ours.

What those cost shows only in a comparison that differs in nothing else. So everything
here is made from what our own replicas are given.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from serving.adapters import PLAIN_POLICIES
from serving.app import check_servable
from serving.engine.compat_names import UNIPROC_EXECUTOR
from serving.engine_args import engine_kwargs_of, replica_env_of
from serving.settings.model import Settings, SettingsError

# Not the `vllm` command: it asks for the metadata of a package called vllm, which the
# build for CPUs does not have.
_SERVER: Final = "vllm.entrypoints.launchers.api_server.entry"

_SWITCHES: Final = frozenset(
    {
        "aggregate_engine_logging",
        "data_parallel_multi_port_external_lb",
        "disable_log_stats",
        "hf_token",
    }
)
"""Arguments without a `--no-` form; not given, they are off."""


def leave_to_vllm(settings: Settings) -> Settings:
    """Return the same settings without our scheduler and worker.

    Raises:
        SettingsError: vLLM has no such policy, or the models cannot be served.
    """
    name = settings.policy.name
    if name not in PLAIN_POLICIES:
        raise SettingsError(
            [
                f"policy.name: vLLM alone has no policy {name}; set policy.name: "
                f"{' or '.join(sorted(PLAIN_POLICIES))}"
            ]
        )
    engine = settings.engine.model_copy(update={"adapter": "off"})
    plain = settings.model_copy(update={"engine": engine})
    check_servable(plain)
    return plain


def plain_command_of(plain: Settings) -> list[str]:
    """Return the command that starts vLLM's server.

    Args:
        plain: Settings from `leave_to_vllm`.
    """
    arguments = {
        "host": plain.http.host,
        "port": plain.http.port,
        "model": plain.model.target,
        "served_model_name": plain.model.id,
        **engine_kwargs_of(plain),
    }
    if plain.engine.device == "cpu" and _num_workers(arguments) == 1:
        # Our replicas run it so; the endpoints shall differ, not the engines.
        arguments["distributed_executor_backend"] = UNIPROC_EXECUTOR
    return [sys.executable, "-m", _SERVER, *flags_of(arguments)]


def plain_env_of(plain: Settings) -> dict[str, str]:
    """Return the environment that goes with the command.

    Args:
        plain: Settings from `leave_to_vllm`.
    """
    # Ray gives an actor as many threads as it has CPUs, and at least one.
    num_threads = max(1, int(plain.replicas.num_cpus))
    return {"OMP_NUM_THREADS": str(num_threads), **replica_env_of(plain)}


def flags_of(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Write vLLM's arguments as flags of its command line.

    Args:
        arguments: Values as Python has them, by name; None stands for the default.

    Yields:
        `--flag` and `--no-flag` for booleans, `--flag=value` or `--flag=JSON`, and
        `--flag value value` for lists.
    """
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is True:
            yield f"--{flag}"
        elif value is False:
            if name not in _SWITCHES:
                yield f"--no-{flag}"
        elif isinstance(value, list | tuple):
            yield f"--{flag}"
            yield from map(_word, value)
        elif value is not None:
            yield f"--{flag}={_word(value)}"


def _num_workers(arguments: Mapping[str, Any]) -> int:
    tensor, pipeline = "tensor_parallel_size", "pipeline_parallel_size"
    return int(arguments.get(tensor, 1)) * int(arguments.get(pipeline, 1))


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)
