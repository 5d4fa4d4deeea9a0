"""The `tetris-serve` command."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.commands.bench import add_bench_command
from serving.commands.drain import add_drain_command
from serving.commands.keys import add_keys_command
from serving.commands.status import add_status_command
from serving.settings.model import (
    Environment,
    Settings,
    SettingsError,
    dump_settings,
    load_settings,
    parse_value,
)

_EXIT_BAD_SETTINGS = 2
_DEFAULT_CONFIG = "configs/smollm2.yaml"
_FILE_ENDINGS = (".yaml", ".yml")


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
            "everything on Ctrl-C. Of a model alone, device and limits are found. "
            "Settings are taken from --set, then --port and the environment variable "
            "PORT, then the file or what was found."
        ),
    )
    _add_serve_options(up)
    up.add_argument(
        "--print-config",
        action="store_true",
        help="print the deployment file and exit; --config reads it",
    )
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
    _add_deployment_options(doctor)
    doctor.add_argument(
        "--bundle",
        type=Path,
        metavar="FILE.tar.gz",
        help="write versions, settings without secrets, metrics and the ends of the "
        "logs into an archive for whoever looks for a fault",
    )
    doctor.set_defaults(run=_doctor)

    check = commands.add_parser(
        "check",
        help="validate a deployment file and its models",
        description="Validate a deployment file without starting anything.",
    )
    _add_deployment_options(check)
    check.set_defaults(run=_check)

    add_bench_command(commands)
    add_drain_command(commands)
    add_keys_command(commands)
    add_status_command(commands)
    return parser


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    _add_deployment_options(parser)
    parser.add_argument("--host", help="address to listen on (http.host)")
    parser.add_argument(
        "--port", type=_port, help="HTTP port (http.port; or the variable PORT)"
    )
    parser.add_argument("--policy", help="verification policy (policy.name)")


def _add_deployment_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model folder, GGUF file or hub id; or a deployment file (.yaml)",
    )
    what.add_argument(
        "--config",
        metavar="FILE",
        help=f"deployment file (default: {_DEFAULT_CONFIG})",
    )
    parser.add_argument(
        "--draft", metavar="MODEL", help="drafter, named as MODEL is (model.draft)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="NAME=VALUE",
        type=_override,
        help="replace a setting, e.g. --set policy.max_draft_tokens=4 (repeatable)",
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


def _source_of(args: argparse.Namespace) -> str:
    return args.model or args.config or _DEFAULT_CONFIG


def _load(args: argparse.Namespace, **options: Any) -> Settings:
    from serving.settings.for_model import path_of, settings_for

    given = {name.replace("_", "."): v for name, v in options.items() if v is not None}
    overrides = {**given, **dict(args.overrides)}
    source = _source_of(args)
    if source == args.model and not source.endswith(_FILE_ENDINGS):
        draft = args.draft or overrides.get("model.draft")
        return settings_for(source, draft, overrides)
    if args.draft is not None:
        overrides = {"model.draft": path_of(args.draft), **overrides}
    return load_settings(source, overrides)


def _load_to_serve(args: argparse.Namespace) -> Settings:
    port = args.port or Environment.read().port
    settings = _load(args, http_host=args.host, http_port=port, policy_name=args.policy)
    for finding in settings.findings:
        print(f"{finding.severity}: {finding}", file=sys.stderr)
    return settings


def _up(args: argparse.Namespace) -> int:
    settings = _load_to_serve(args)
    if args.print_config:
        sys.stdout.write(dump_settings(settings))
        return 0
    from serving.commands.up import up

    return up(settings)


def _vllm(args: argparse.Namespace) -> int:
    from serving.commands.vllm_alone import serve_with_vllm

    settings = _load_to_serve(args)
    return serve_with_vllm(settings, only_print=args.print)


def _doctor(args: argparse.Namespace) -> int:
    settings = _load(args, http_port=Environment.read().port)
    if args.bundle is not None:
        from serving.commands.bundle import bundle

        return bundle(settings, args.bundle)
    from serving.commands.doctor import doctor

    return doctor(settings)


def _check(args: argparse.Namespace) -> int:
    from serving.commands.check import check

    return check(_source_of(args), _load(args))


if __name__ == "__main__":
    sys.exit(main())
