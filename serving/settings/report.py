"""Faults found by pydantic, in words that name the setting and the fix."""

import difflib
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from serving.settings.names import own_name_of, spellings_of


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
                yield f"{name}: unknown setting{_suggestion(location, root)}"
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
                # A section's own check names the setting within it.
                inside = _section_at(location, root) is not None
                yield f"{name}{'.' if inside else ': '}{text}" if name else text
                continue
            case _:
                message = fault["msg"][0].lower() + fault["msg"][1:]
                reason = f"{message} (got {fault['input']!r})"
        purpose = _purpose_of(location, root)
        yield f"{name}: {reason}" + (f"; set {purpose}" if purpose else "")


def _section_at(location: list[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the section at a place; the parts of a mapping of sections are names."""
    section: Any = root
    for part in location:
        if get_origin(section) is dict:
            section = get_args(section)[1]
        elif _is_section(section) and part in section.model_fields:
            section = section.model_fields[part].annotation
        else:
            return None
    return section if _is_section(section) else None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _fields_at(location: list[str], root: type[BaseModel]) -> frozenset[str]:
    section = _section_at(location, root)
    return frozenset(section.model_fields) if section else frozenset()


def _suggestion(location: list[str], root: type[BaseModel]) -> str:
    """Say which setting an unknown one was meant to be, as the end of a sentence."""
    name = own_name_of(location[-1])
    elsewhere = [
        f"{section}.{name}"
        for section in root.model_fields
        if name in _fields_at([section], root)
    ]
    if len(location) > 1 and elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    known = _fields_at(location[:-1], root)
    foreign = {other for field in known for other in spellings_of(field)[1:]}
    close = difflib.get_close_matches(location[-1], foreign, n=1, cutoff=0.8)
    return did_you_mean(location[-1], frozenset(close) or known)


def _purpose_of(location: list[str], root: type[BaseModel]) -> str | None:
    if len(location) < 2:
        return None
    for end in range(len(location), 1, -1):
        section = _section_at(location[: end - 1], root)
        field = section.model_fields.get(location[end - 1]) if section else None
        if field is not None:
            return field.description
    return None


def did_you_mean(name: str, known: frozenset[str]) -> str:
    """Suggest what a misspelt name was meant to be, as the end of a sentence."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(sorted(known))}" if len(known) <= 32 else ""
