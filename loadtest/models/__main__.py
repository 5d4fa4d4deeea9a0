"""Trains the pair: ``python -m loadtest.models``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from .recipe import DRAFT, DRAFT_DIR, TARGET, TARGET_DIR


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the target on generated chats, and the draft on the target."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.models",
        description="Train the pair anew, which takes hours on two cores.",
    )
    parser.add_argument("--target", type=Path, default=TARGET_DIR, help="directory")
    parser.add_argument("--draft", type=Path, default=DRAFT_DIR, help="directory")
    options = parser.parse_args(arguments)
    # Spinning OpenMP threads make a shared machine several times slower. Read when
    # torch is imported, hence the late import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from .train import train

    train(TARGET, options.target)
    train(DRAFT, options.draft, teacher=options.target)


if __name__ == "__main__":
    main()
