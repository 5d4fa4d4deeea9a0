"""Gives an object that vLLM built, with no factory to override, a subclass of ours."""

from __future__ import annotations

from typing import Any


def reclass(instance: Any, behaviour: type) -> bool:
    """Insert `behaviour` in front of an instance's class.

    The object keeps its state and gains methods that call `super()`.

    Returns:
        False if it was there already.
    """
    cls = type(instance)
    if issubclass(cls, behaviour):
        return False
    instance.__class__ = type(f"Tetris{cls.__name__}", (behaviour, cls), {})
    return True
