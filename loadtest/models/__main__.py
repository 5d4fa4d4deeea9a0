"""Trains, evaluates and describes the pair: ``python -m loadtest.models``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from .recipe import DRAFT, DRAFT_DIR, TARGET, TARGET_DIR


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both models, measure them on held-out prompts, and write their cards."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.models",
        description="Train (hours on two cores), evaluate and describe the pair.",
    )
    parser.add_argument("--target", type=Path, default=TARGET_DIR, help="directory")
    parser.add_argument("--draft", type=Path, default=DRAFT_DIR, help="directory")
    text = "of the pair that is there"
    parser.add_argument("--evaluate-only", action="store_true", help=text)
    options = parser.parse_args(arguments)
    # Spinning OpenMP threads make a shared machine several times slower. Read when
    # torch is imported, hence the late imports.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from .evaluate import evaluate, write_cards
    from .train import train

    if not options.evaluate_only:
        train(TARGET, options.target)
        train(DRAFT, options.draft, teacher=options.target)
    evaluate(options.target, options.draft)
    write_cards(options.target, options.draft)


if __name__ == "__main__":
    main()
