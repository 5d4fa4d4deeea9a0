"""Faults found by pydantic, in words that name the setting and the fix."""

import difflib
from collections.abc import Iterator

from pydantic import BaseModel, ValidationError


def describe(error: ValidationError, root: type[BaseModel]) -> Iterator[str]:
    """Word every fault that pydantic has found.

    Args:
        error: What validation raised.
        root: The model that was validated.

    Yields:
        `setting: reason; fix` for each fault.
    """
    for fault in error.errors():
        location = [str(part) for part in fault["loc"]]
        name = ".".join(location)
        context = fault.get("ctx", {})
        match fault["type"]:
            case "missing":
                reason = "is required"
            case "extra_forbidden":
                known = _fields_at(location[:-1], root)
                yield f"{name}: unknown setting{did_you_mean(location[-1], known)}"
                continue
            case "greater_than_equal":
                reason = f"must be ≥ {context['ge']} (got {fault['input']})"
            case "greater_than":
                reason = f"must be > {context['gt']} (got {fault['input']})"
            case "less_than_equal":
                reason = f"must be ≤ {context['le']} (got {fault['input']})"
            case "literal_error":
                reason = f"must be {context['expected']} (got {fault['input']!r})"
            case "value_error":
                text = str(context["error"])
                yield f"{name}.{text}" if name else text
                continue
            case _:
                message = fault["msg"][0].lower() + fault["msg"][1:]
                reason = f"{message} (got {fault['input']!r})"
        purpose = _purpose_of(location, root)
        yield f"{name}: {reason}" + (f"; set {purpose}" if purpose else "")


def _fields_at(location: list[str], root: type[BaseModel]) -> frozenset[str]:
    section = root
    for part in location:
        annotation = section.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return frozenset()
        section = annotation
    return frozenset(section.model_fields)


def _purpose_of(location: list[str], root: type[BaseModel]) -> str | None:
    if len(location) < 2 or location[0] not in root.model_fields:
        return None
    section = root.model_fields[location[0]].annotation
    if not (isinstance(section, type) and issubclass(section, BaseModel)):
        return None
    field = section.model_fields.get(location[1])
    return field.description if field else None


def did_you_mean(name: str, known: frozenset[str]) -> str:
    """Suggest what a misspelt name was meant to be, as the end of a sentence."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(sorted(known))}" if len(known) <= 32 else ""
