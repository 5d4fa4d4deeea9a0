"""Which class a request belongs to, decided where it enters.

A request names its class itself, in `vllm_xargs.request_class`. Whatever authenticates
clients belongs in front of this: it overwrites that field by what the client's key may
claim, and everything behind follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

REQUEST_CLASS_XARG = "request_class"
"""The scheduler reads the same key; it may not be imported where vLLM is missing."""


def find_unknown_class(
    request: Any, class_priorities: Mapping[str, int | None]
) -> str | None:
    """Tell what is wrong with the class a request names.

    Args:
        request: An OpenAI request body.
        class_priorities: vLLM priority by name of class.

    Returns:
        A sentence that names the field and the fix; None if nothing is wrong.
    """
    named = _named_class(request)
    if named is None or (isinstance(named, str) and named in class_priorities):
        return None
    known = ", ".join(sorted(class_priorities)) or "none are configured"
    return (
        f"vllm_xargs.{REQUEST_CLASS_XARG}: no such class {str(named)[:100]!r}; "
        f"leave it out, or name one of policy.classes ({known})"
    )


def set_priority(request: Any, class_priorities: Mapping[str, int | None]) -> None:
    """Give a request the priority of the class it names, if the class has one."""
    named = _named_class(request)
    if isinstance(named, str) and class_priorities.get(named) is not None:
        request.priority = class_priorities[named]


def _named_class(request: Any) -> Any:
    return (getattr(request, "vllm_xargs", None) or {}).get(REQUEST_CLASS_XARG)
