"""Readers of command-line values; their errors say what would be right."""

import argparse


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
    if minutes <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes above 0")
    return minutes
