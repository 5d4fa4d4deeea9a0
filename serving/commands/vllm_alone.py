"""`tetris-serve vllm`: a deployment under vLLM's own server, to compare with."""

import os
import shlex

from serving.commands.console import Console, complain
from serving.local import ports
from serving.local.plain_vllm import leave_to_vllm, plain_command_of, plain_env_of
from serving.settings.gguf_models import with_converted_models
from serving.settings.model import Settings, SettingsError
from serving.settings.number_format import with_fast_format


def serve_with_vllm(settings: Settings, *, only_print: bool) -> int:
    """Become vLLM's server, or print the command that starts it.

    Args:
        settings: The deployment; of `replicas`, vLLM's server has only one.
        only_print: Whether to leave it at printing.

    Returns:
        The exit code 0, after printing.

    Raises:
        SettingsError: vLLM alone cannot serve this, or would serve whom these settings
            keep out; nothing has been started.
    """
    settings = with_converted_models(settings, complain)
    settings = with_fast_format(settings, lambda chosen: complain(str(chosen)))
    plain = leave_to_vllm(settings)
    command, env = plain_command_of(plain), plain_env_of(plain)
    if only_print:
        variables = [f"{name}={value}" for name, value in env.items()]
        Console().say(shlex.join(["env", *variables, *command]))
        return 0
    _check_access(settings)
    os.environ.update(env)
    os.execv(command[0], command)


def _check_access(settings: Settings) -> None:
    access = settings.http.access
    is_private = ports.is_loopback(settings.http.host)
    is_open = is_private if access.allow_anonymous is None else access.allow_anonymous
    if access.keys_file is not None or not is_open:
        raise SettingsError(
            [
                "http.access: vLLM's own server knows no keys of ours, and would serve "
                "anybody who reaches it; leave http.access.keys_file out, and set "
                "http.host: 127.0.0.1 or http.access.allow_anonymous: true"
            ]
        )
