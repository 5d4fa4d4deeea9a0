"""Command line of the demo pair: ``python -m loadtest.models --help``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .recipe import DRAFT, DRAFT_DIR, TARGET, TARGET_DIR, WORK_DIR

_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9}


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
        options.run(options)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; training goes on from its newest checkpoint\n")
        return 130
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.models",
        description="Train, evaluate and pad the demo target and draft model.",
    )
    pair = argparse.ArgumentParser(add_help=False)
    pair.add_argument(
        "--target",
        type=Path,
        default=TARGET_DIR,
        help="its directory (default: %(default)s)",
    )
    pair.add_argument(
        "--draft",
        type=Path,
        default=DRAFT_DIR,
        help="its directory (default: %(default)s)",
    )
    made = argparse.ArgumentParser(add_help=False)
    made.add_argument("--output", type=Path, required=True, help="directory to write")
    made.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the added weights (default: %(default)s)",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train", parents=[pair], help="train both models (hours on two cores; resumes)"
    )
    train.add_argument("--only", choices=("target", "draft"), help="train just one")
    train.add_argument(
        "--work-dir",
        type=Path,
        default=WORK_DIR,
        help="for checkpoints (default: %(default)s)",
    )
    train.add_argument(
        "--scale",
        type=_scale,
        default=1.0,
        help="of the steps; 0.05 for a trial (default: %(default)s)",
    )
    train.set_defaults(run=_train)

    evaluate = commands.add_parser(
        "evaluate",
        parents=[pair],
        help="measure right answers and acceptance on held-out prompts",
    )
    evaluate.add_argument(
        "--prompts", type=_positive, default=100, help="per task (default: %(default)s)"
    )
    evaluate.add_argument(
        "--long-prompts",
        type=_positive,
        default=20,
        help="per task, after a long chat (default: %(default)s)",
    )
    evaluate.add_argument(
        "--seed", type=int, default=3, help="of the prompts (default: %(default)s)"
    )
    evaluate.add_argument("--tasks", nargs="+", help="only these")
    evaluate.add_argument(
        "--output", type=Path, help="file to write instead of TARGET/evaluation.json"
    )
    evaluate.set_defaults(run=_evaluate)

    card = commands.add_parser("card", parents=[pair], help="write the model cards")
    card.set_defaults(run=_card)

    pad = commands.add_parser(
        "pad",
        parents=[made],
        help="write a costlier copy of the target with the same function",
    )
    pad.add_argument(
        "--parameters", type=_count, required=True, help="wanted, e.g. 50M or 1B"
    )
    pad.add_argument(
        "--source",
        type=Path,
        default=TARGET_DIR,
        help="what to copy (default: %(default)s)",
    )
    pad.add_argument(
        "--layers", type=_positive, help="instead of those usual at that size"
    )
    pad.set_defaults(run=_pad)

    untrained = commands.add_parser(
        "untrained",
        parents=[made],
        help="write a draft model of no use: random weights, same shape",
    )
    untrained.add_argument(
        "--source",
        type=Path,
        default=DRAFT_DIR,
        help="its shape (default: %(default)s)",
    )
    untrained.set_defaults(run=_untrained)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def _scale(text: str) -> float:
    scale = float(text)
    if scale <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return scale


def _count(text: str) -> int:
    factor = _SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        return int(float(text if factor == 1.0 else text[:-1]) * factor)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a count; write 51000000, 51M or 1B"
        ) from None


def _train(options: argparse.Namespace) -> None:
    from .train import train

    target, draft = (one.scaled(options.scale) for one in (TARGET, DRAFT))
    if options.only != "draft":
        train(target, options.target, options.work_dir)
    if options.only != "target":
        train(draft, options.draft, options.work_dir, teacher=options.target)


def _evaluate(options: argparse.Namespace) -> None:
    from .evaluate import evaluate

    report = evaluate(
        options.target,
        options.draft,
        tasks=options.tasks,
        num_prompts=options.prompts,
        num_long=options.long_prompts,
        seed=options.seed,
    )
    output: Path = options.output or options.target / "evaluation.json"
    output.write_text(json.dumps(report, indent=1) + "\n")


def _card(options: argparse.Namespace) -> None:
    from .evaluate import write_cards

    write_cards(options.target, options.draft)


def _pad(options: argparse.Namespace) -> None:
    from .pad import pad_target

    shape = pad_target(
        options.source,
        options.output,
        options.parameters,
        num_layers=options.layers,
        seed=options.seed,
    )
    sys.stdout.write(
        f"{options.output}: {shape.num_parameters:,} parameters ({shape.num_layers} "
        f"layers, feed-forward width {shape.intermediate_size})\n"
    )


def _untrained(options: argparse.Namespace) -> None:
    from .pad import write_untrained

    write_untrained(options.source, options.output, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
