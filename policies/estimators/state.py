"""Reads what another engine's planner learnt, and refuses what cannot be true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

STATE_VERSION = 2
"""Of what `export_state` returns; another one means something else."""


def check_version(state: Mapping[str, Any]) -> None:
    """Refuse a state that was written for other code.

    Raises:
        ValueError: It is of another version, or none.
    """
    version = state.get("version") if isinstance(state, dict) else None
    if not (_is_number(version) and version == STATE_VERSION):
        raise ValueError(
            f"state of version {version!r}, this planner reads {STATE_VERSION}"
        )


def read_part(state: Mapping[str, Any], name: str) -> Any:
    """Return a part of a state.

    Raises:
        ValueError: It is not there.
    """
    if not isinstance(state, dict) or name not in state:
        raise ValueError(f"state lacks {name!r}")
    return state[name]


def read_array(
    state: Mapping[str, Any],
    name: str,
    *,
    size: int | None = None,
    least: float = 0.0,
    most: float,
) -> NDArray[np.float64]:
    """Return a list of numbers of a state.

    Args:
        state: What was exported.
        name: Of the list.
        size: How many there must be; None for any number but 0.
        least: Smallest that makes sense.
        most: Largest that does.

    Returns:
        `[size]`, float64, C-contiguous.

    Raises:
        ValueError: It is missing, of another size, or not all of it is a number in
            range.
    """
    values = read_part(state, name)
    is_flat = isinstance(values, (list, tuple)) and all(map(_is_number, values))
    if not is_flat or len(values) == 0:
        raise ValueError(f"state's {name!r} must be a list of numbers")
    if size is not None and len(values) != size:
        raise ValueError(f"state's {name!r} holds {len(values)} numbers, not {size}")
    # As plain numbers: an integer may be larger than float64 can hold. NaN is not <=.
    if not all(least <= value <= most for value in values):
        raise ValueError(f"state's {name!r} must lie in {least:g}..{most:g}")
    return np.array(values, dtype=np.float64)


def read_number(
    state: Mapping[str, Any], name: str, *, least: float = 0.0, most: float
) -> float:
    """Return one number of a state; raises as `read_array`."""
    value = read_part(state, name)
    if not (_is_number(value) and least <= value <= most):
        raise ValueError(f"state's {name!r} must be a number in {least:g}..{most:g}")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
