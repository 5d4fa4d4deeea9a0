"""Reads the values of options, for argparse to show what is wrong with them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def number(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return a reader of numbers from `least`, which may be it, to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most and math.isfinite(value)):
            limit = f"{least:g} up" if most == math.inf else f"{least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {limit}")
        return value

    return read


def read_shares(text: str) -> tuple[float, float]:
    """Read `SHARE[:LATER]`."""
    before, _, after = text.partition(":")
    read = number(0.0, 1.0)
    return read(before), read(after or before)


def read_slow(text: str) -> tuple[float, float]:
    """Read `SHARE[:TIMES]`."""
    share, _, times = text.partition(":")
    return number(0.0, 1.0)(share), number(1.0)(times or "2")


def read_depth(text: str) -> int:
    """Read how many drafts a request has in a step."""
    return int(number(0, 16)(text))
