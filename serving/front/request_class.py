"""Which class a request belongs to, and by when it is wanted, decided where it enters.

A request names its class itself, in `vllm_xargs.request_class`; where API keys are on,
its key does, whatever the request says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from serving.front.caller import caller

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.settings.policy_section import RequestClassSettings

REQUEST_CLASS_XARG: Final = "request_class"
DEFAULT_CLASS: Final = "default"
"""The scheduler reads the same; it may not be imported where vLLM is missing."""

DEADLINE_XARG: Final = "deadline_ms"
"""Of the request's last token, from when the front has read it."""


MAX_DEADLINE_MS: Final = 1e12
"""Thirty years; larger integers might be no floats."""


@dataclass(frozen=True, slots=True)
class ClassShare:
    """What a front knows of a class.

    Attributes:
        weight: Of its share of the replicas' time, > 0.
        priority: vLLM's, None for that which a request brings.
        deadline_ms: Of requests that bring none; None for no deadline.
    """

    weight: float = 1.0
    priority: int | None = None
    deadline_ms: float | None = None


def read_shares(
    classes: Mapping[str, RequestClassSettings],
) -> dict[str, ClassShare]:
    """Return what fronts know of the classes in a deployment's settings."""
    return {
        name: ClassShare(one.weight, one.priority, one.deadline_ms)
        for name, one in classes.items()
    }


def refuse_priorities(classes: Mapping[str, ClassShare]) -> None:
    """Refuse classes with priorities, where engines were started without any.

    Raises:
        ValueError: vLLM would refuse every request that has one.
    """
    if wrong := [name for name, one in classes.items() if one.priority is not None]:
        raise ValueError(
            f"policy.classes.{wrong[0]}.priority: no class had one when the engines "
            "started; redeploy instead"
        )


def find_class(
    extra_args: Mapping[str, Any], priority: int, classes: Mapping[str, ClassShare]
) -> str:
    """Return a request's class: by name, else by priority, else the default.

    Args:
        extra_args: The request's `vllm_xargs`.
        priority: The request's.
        classes: By name.
    """
    named = extra_args.get(REQUEST_CLASS_XARG)
    if isinstance(named, str) and named in classes:
        return named
    for name, one in classes.items():
        if one.priority == priority:
            return name
    return DEFAULT_CLASS


def claim_class(request: Any, classes: Mapping[str, ClassShare]) -> None:
    """Give a request that came with a key the key's class, and no priority of its own.

    Args:
        request: An OpenAI request body.
        classes: By name; a key's that is among them no more is none.
    """
    whose = caller.get()
    if whose is None:
        return
    xargs = dict(request.vllm_xargs or {})
    xargs.pop(REQUEST_CLASS_XARG, None)
    if whose.request_class in classes:
        xargs[REQUEST_CLASS_XARG] = whose.request_class
    request.vllm_xargs = xargs or None
    request.priority = 0


def find_unknown_class(request: Any, classes: Mapping[str, ClassShare]) -> str | None:
    """Tell what is wrong with the class a request names.

    Args:
        request: An OpenAI request body.
        classes: By name.

    Returns:
        A sentence that names the field and the fix; None if nothing is wrong.
    """
    named = _named_class(request)
    if named is None or (isinstance(named, str) and named in classes):
        return None
    known = ", ".join(sorted(classes)) or "none are configured"
    return (
        f"vllm_xargs.{REQUEST_CLASS_XARG}: no such class {str(named)[:100]!r}; "
        f"leave it out, or name one of policy.classes ({known})"
    )


def set_priority(request: Any, classes: Mapping[str, ClassShare]) -> None:
    """Give a request the priority of the class it names, if the class has one."""
    named = _named_class(request)
    if isinstance(named, str) and named in classes:
        priority = classes[named].priority
        if priority is not None:
            request.priority = priority


def set_deadline(request: Any) -> str | None:
    """Move a request's `deadline_ms` to where the front reads it.

    It may stand beside the other fields or in `vllm_xargs`, which goes before.

    Returns:
        What is wrong with it, a sentence that names the field; None if nothing is.
    """
    xargs = getattr(request, "vllm_xargs", None) or {}
    where = "vllm_xargs." if DEADLINE_XARG in xargs else ""
    given = xargs.get(DEADLINE_XARG, (request.model_extra or {}).get(DEADLINE_XARG))
    if given is None:
        return None
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not (is_number and 0 < given < MAX_DEADLINE_MS):
        return (
            f"{where}{DEADLINE_XARG}: must be a number of milliseconds above 0, below "
            f"{MAX_DEADLINE_MS:.0e}"
        )
    request.vllm_xargs = {**xargs, DEADLINE_XARG: float(given)}
    return None


def _named_class(request: Any) -> Any:
    return (getattr(request, "vllm_xargs", None) or {}).get(REQUEST_CLASS_XARG)
