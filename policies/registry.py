"""Which planner a name stands for: our own, or anybody's as `module:Class`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from policies.baselines import DynamicPlanner, FixedPlanner, TetrisPlanner
from policies.goodput import GoodputPlanner
from policies.planner import Planner
from policies.types import EngineLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.types import PolicySpec

_BUILDERS: dict[str, Callable[[PolicySpec, EngineLimits], Planner]] = {
    "fixed": lambda spec, _: FixedPlanner(spec.draft_tokens),
    "tetris": lambda spec, _: TetrisPlanner(spec.draft_tokens, spec.max_draft_tokens),
    "dynamic": lambda spec, limits: DynamicPlanner(spec.max_draft_tokens, limits),
    "goodput": lambda spec, limits: GoodputPlanner.build(
        spec.max_draft_tokens, limits, spec.latency_target_ms
    ),
}

POLICY_NAMES: tuple[str, ...] = ("none", *_BUILDERS)
"""Our own; `none` starts the engine without a drafter."""


def build_planner(spec: PolicySpec, limits: EngineLimits | None = None) -> Planner:
    """Build the planner a specification names.

    Args:
        spec: The policy and its numbers. Of `module:Class` the class is called with
            `max_depth=max_draft_tokens`, `limits=limits` and the specification's
            `params`.
        limits: The engine's; defaults suit tests and simulations.

    Raises:
        ValueError: If the name is unknown or has no planner, a number is out of range,
            or the class does not take its parameters.
    """
    if spec.name in {"fixed", "tetris"} and spec.draft_tokens < 1:
        raise ValueError(f"draft_tokens must be >= 1, got {spec.draft_tokens}")
    least = spec.draft_tokens if spec.name == "tetris" else 1
    if spec.max_depth < least:
        raise ValueError(
            f"max_draft_tokens must be >= {least}, got {spec.max_draft_tokens}"
        )
    limits = limits or EngineLimits()
    if spec.name in _BUILDERS:
        if spec.params:
            raise ValueError(
                f"policy {spec.name!r} takes no params; they are for module:Class"
            )
        return _BUILDERS[spec.name](spec, limits)
    build: Callable[..., Planner] = load_planner_class(spec.name)
    try:
        return build(max_depth=spec.max_draft_tokens, limits=limits, **spec.params)
    except TypeError as error:
        raise ValueError(
            f"policy {spec.name!r} cannot be built from max_depth, limits and params "
            f"{dict(spec.params)}: {error}"
        ) from error


def load_planner_class(name: str) -> type[Planner]:
    """Import the class that `module:Class` names.

    Raises:
        ValueError: If it has no such form, cannot be imported, or is no `Planner`.
    """
    module_name, colon, class_name = name.partition(":")
    if not (colon and module_name and class_name.isidentifier()):
        raise ValueError(
            f"policy {name!r} has no planner; choose one of {sorted(_BUILDERS)}, or "
            "name a class as module:Class"
        )
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"policy {name!r} cannot be imported: {error}; install its package "
            "wherever the engine runs"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Planner)):
        raise ValueError(f"policy {name!r} is no subclass of policies.planner.Planner")
    return found
