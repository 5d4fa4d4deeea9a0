"""Markdown tables out of lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def make_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table; every line has as many cells as the header."""
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def format_value(value: Any, form: str) -> str:
    """Format a value, or show that there is none."""
    return "-" if value is None else format(value, form)
