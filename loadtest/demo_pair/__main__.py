"""Command line of the demo pair: ``python -m loadtest.demo_pair --help``."""

from __future__ import annotations

import argparse
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
    # Spinning OpenMP threads make a shared machine several times slower, and training
    # forks. Read when torch is imported, hence the imports inside the commands.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 130
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.demo_pair",
        description="Train, evaluate and pad the demo target and draft model.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train", help="train both models (under an hour on two cores; resumes)"
    )
    _add_pair(train)
    train.add_argument("--only", choices=("target", "draft"), help="train just one")
    train.add_argument(
        "--work-dir",
        type=Path,
        default=WORK_DIR,
        help="where checkpoints are kept (default: %(default)s)",
    )
    train.add_argument(
        "--scale",
        type=_positive_float,
        default=1.0,
        help="factor on the number of steps, e.g. 0.05 for a trial (default: 1)",
    )
    train.add_argument(
        "--processes", type=_positive_int, help="processes (default: one a core)"
    )
    train.set_defaults(run=_train)

    evaluate = commands.add_parser(
        "evaluate", help="measure right answers and acceptance on held-out prompts"
    )
    _add_pair(evaluate)
    evaluate.add_argument(
        "--prompts",
        type=_positive_int,
        default=100,
        help="held-out prompts per task (default: %(default)s)",
    )
    evaluate.add_argument(
        "--long-prompts",
        type=_positive_int,
        default=20,
        help="of each task at the end of a long chat (default: %(default)s)",
    )
    evaluate.add_argument("--seed", type=int, default=3, help="seed of the prompts")
    evaluate.add_argument("--tasks", nargs="+", help="only these tasks")
    evaluate.add_argument(
        "--output", type=Path, help="file to write (default: TARGET/evaluation.json)"
    )
    evaluate.add_argument(
        "--threads", type=_positive_int, help="threads (default: one a core)"
    )
    evaluate.set_defaults(run=_evaluate)

    card = commands.add_parser("card", help="write the model cards")
    _add_pair(card)
    card.set_defaults(run=_card)

    pad = commands.add_parser(
        "pad", help="write a costlier copy of the target with the same function"
    )
    pad.add_argument(
        "--parameters",
        type=_parameter_count,
        required=True,
        help="parameters wanted, e.g. 50M, 1B or 8B",
    )
    pad.add_argument("--output", type=Path, required=True, help="directory to write")
    pad.add_argument(
        "--source",
        type=Path,
        default=TARGET_DIR,
        help="model to copy (default: %(default)s)",
    )
    pad.add_argument(
        "--layers", type=_positive_int, help="layers (default: as models of that size)"
    )
    pad.add_argument("--seed", type=int, default=0, help="seed of the added weights")
    pad.set_defaults(run=_pad)

    untrained = commands.add_parser(
        "untrained", help="write a draft model of no use: random weights, same shape"
    )
    untrained.add_argument(
        "--source",
        type=Path,
        default=DRAFT_DIR,
        help="model whose shape and tokenizer to take (default: %(default)s)",
    )
    untrained.add_argument(
        "--output", type=Path, required=True, help="directory to write"
    )
    untrained.add_argument("--seed", type=int, default=0, help="seed of the weights")
    untrained.set_defaults(run=_untrained)
    return parser


def _add_pair(parser: argparse.ArgumentParser) -> None:
    for role, path in (("target", TARGET_DIR), ("draft", DRAFT_DIR)):
        parser.add_argument(
            f"--{role}",
            type=Path,
            default=path,
            help=f"directory of the {role} (default: %(default)s)",
        )


def _positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _positive_float(text: str) -> float:
    number = float(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _parameter_count(text: str) -> int:
    factor = _SUFFIXES.get(text[-1:].upper(), 1.0)
    digits = text[:-1] if factor != 1.0 else text
    try:
        return int(float(digits) * factor)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a count; write 51000000, 51M or 8B"
        ) from None


def _train(options: argparse.Namespace) -> None:
    from .train import train_draft, train_target

    processes = options.processes or os.cpu_count() or 1
    work_dir: Path = options.work_dir
    if options.only != "draft":
        recipe = TARGET.scaled(options.scale)
        train_target(recipe, options.target, work_dir, num_processes=processes)
    if options.only != "target":
        recipe = DRAFT.scaled(options.scale)
        train_draft(
            recipe, options.target, options.draft, work_dir, num_processes=processes
        )


def _evaluate(options: argparse.Namespace) -> None:
    import torch

    from .evaluate import evaluate, write_report

    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    report = evaluate(
        options.target,
        options.draft,
        tasks=options.tasks,
        num_prompts=options.prompts,
        num_long=options.long_prompts,
        seed=options.seed,
    )
    write_report(report, options.output or options.target / "evaluation.json")


def _card(options: argparse.Namespace) -> None:
    from .card import write_cards

    write_cards(options.target, options.draft)


def _untrained(options: argparse.Namespace) -> None:
    from .untrained import write_untrained

    write_untrained(options.source, options.output, seed=options.seed)


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
        f"{options.output}: {shape.num_parameters:,} parameters"
        f" ({shape.num_layers} layers, feed-forward width {shape.intermediate_size}),"
        f" {shape.num_bytes / 1e9:.3g} GB\n"
    )


if __name__ == "__main__":
    sys.exit(main())
