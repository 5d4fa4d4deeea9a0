"""Readers of command-line values; their errors say what would be right."""

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def read_positive(text: str) -> int:
    """Read a whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def read_minutes(text: str) -> float:
    """Read a time limit."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes above 0")
    return minutes


def one(read: Callable[[str], T]) -> Callable[[str], T]:
    """Make a reader whose ValueErrors keep their words, which argparse would drop."""

    def read_one(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_one


def each(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Make a reader of a list separated by commas, which must hold something."""

    def read_each(text: str) -> tuple[T, ...]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise argparse.ArgumentTypeError(f"{text!r} names nothing")
        return tuple(map(one(read), parts))

    return read_each
