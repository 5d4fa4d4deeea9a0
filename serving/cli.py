"""The `tetris-serve` command."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from serving.commands.bench import add_bench_command
from serving.commands.drain import add_drain_command
from serving.settings.model import (
    Environment,
    Settings,
    SettingsError,
    load_settings,
    parse_value,
)

_EXIT_BAD_SETTINGS = 2
_DEFAULT_CONFIG = "configs/demo.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; those of the process when None.

    Returns:
        The exit code: 0 for success, 1 for a failure, 2 for settings that cannot work.
    """
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except SettingsError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return _EXIT_BAD_SETTINGS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tetris-serve",
        description="Serve a language model with speculative decoding on Ray Serve.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser(
        "up",
        help="serve a deployment on this machine until Ctrl-C",
        description=(
            "Start Ray, serve one deployment, print how to reach it, and stop "
            "everything on Ctrl-C. Settings are taken from --set, then --port and the "
            "environment variable PORT, then the file."
        ),
    )
    _add_serve_options(up)
    up.set_defaults(run=_up)

    vllm = commands.add_parser(
        "vllm",
        help="serve the same with vLLM's own server, to compare with",
        description=(
            "Serve one replica of a deployment with vLLM's own server: the same "
            "settings as flags, no Ray, no scheduler and worker of ours. Only for the "
            "policies that vLLM has itself, none and fixed."
        ),
    )
    _add_serve_options(vllm)
    vllm.add_argument(
        "--print", action="store_true", help="print the command instead of running it"
    )
    vllm.set_defaults(run=_vllm)

    doctor = commands.add_parser(
        "doctor",
        help="check this machine and the model pair",
        description=(
            "Check Python, packages, device, memory, ports and the model pair. "
            "Exits with 1 if anything would keep the deployment from working."
        ),
    )
    _add_config_option(doctor)
    _add_set_option(doctor)
    doctor.set_defaults(run=_doctor)

    check = commands.add_parser(
        "check",
        help="validate a deployment file and its models",
        description="Validate a deployment file without starting anything.",
    )
    check.add_argument("config", metavar="CONFIG", help="deployment file (YAML)")
    _add_set_option(check)
    check.set_defaults(run=_check)

    add_bench_command(commands)
    add_drain_command(commands)
    return parser


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    _add_config_option(parser)
    parser.add_argument("--host", help="address to listen on (http.host)")
    parser.add_argument(
        "--port", type=_port, help="HTTP port (http.port; or the variable PORT)"
    )
    parser.add_argument("--policy", help="verification policy (policy.name)")
    _add_set_option(parser)


def _add_config_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        default=_DEFAULT_CONFIG,
        metavar="FILE",
        help=f"deployment file (default: {_DEFAULT_CONFIG})",
    )


def _add_set_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="NAME=VALUE",
        type=_override,
        help="replace a setting, e.g. --set policy.draft_tokens=4 (repeatable)",
    )


def _port(text: str) -> int | None:
    if not text:  # `make serve` passes an unset PORT on as an empty argument.
        return None
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"must be from 1 to 65535 (got {text})")
    return int(text)


def _override(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or "." not in name:
        raise argparse.ArgumentTypeError(
            f"must be section.setting=value, e.g. policy.name=fixed (got {text})"
        )
    return name, parse_value(value)


def _load(args: argparse.Namespace, **options: Any) -> Settings:
    given = {name.replace("_", "."): v for name, v in options.items() if v is not None}
    return load_settings(args.config, {**given, **dict(args.overrides)})


def _load_to_serve(args: argparse.Namespace) -> Settings:
    port = args.port or Environment.read().port
    return _load(args, http_host=args.host, http_port=port, policy_name=args.policy)


def _up(args: argparse.Namespace) -> int:
    from serving.commands.up import up

    return up(_load_to_serve(args))


def _vllm(args: argparse.Namespace) -> int:
    from serving.commands.vllm_alone import serve_with_vllm

    settings = _load_to_serve(args)
    return serve_with_vllm(settings, only_print=args.print)


def _doctor(args: argparse.Namespace) -> int:
    from serving.commands.doctor import doctor

    return doctor(_load(args))


def _check(args: argparse.Namespace) -> int:
    from serving.commands.check import check

    return check(args.config, _load(args))


if __name__ == "__main__":
    sys.exit(main())
