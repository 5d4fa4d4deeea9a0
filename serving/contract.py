"""Which private names of a library we lean on, and whether it still has them.

A table maps `module:Class`, or `module` alone, to its names and what each is for. A row
may hold several names with blanks between them. `name` is an attribute, `name(a, ...)`
a function of these parameters, without `self` and with any others where the dots are,
`name() -> type` one that says it returns that. `@abstract name` are all methods that a
subclass must have.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import CodeType
from typing import Any, Final

Table = Mapping[str, Mapping[str, str]]

_NAME: Final = re.compile(r"(\w+)(\([^)]*\))?(?: -> (.+))?")
_ABSTRACT: Final = "@abstract "


class MovedNamesError(ImportError):
    """A library lacks what this release leans on."""


@dataclass(frozen=True, slots=True)
class Name:
    """One name of a table.

    Attributes:
        name: As the library calls it.
        parameters: Of a function, None where they do not matter.
        returns: The type a function says it returns, None where it does not matter.
        why: What it is for.
    """

    name: str
    parameters: tuple[str, ...] | None
    returns: str | None
    why: str

    def find_difference(
        self, parameters: Sequence[str], returns: str | None
    ) -> str | None:
        """Compare with a function that was found; None if it will do.

        Args:
            parameters: The function's.
            returns: What it says it returns.
        """
        found = tuple(one for one in parameters if one not in {"self", "cls"})
        wanted = self.parameters
        if wanted is not None and not _match(wanted, found):
            return f"takes ({', '.join(found)}), not ({', '.join(wanted)})"
        if self.returns is not None and returns != self.returns:
            return f"returns {returns}, not {self.returns}"
        return None


def read_rows(rows: Mapping[str, str]) -> Iterator[Name]:
    """Yield the names of a class or module, all but those that are abstract."""
    for written, why in rows.items():
        if written.startswith(_ABSTRACT):
            continue
        for name, brackets, returns in _NAME.findall(written):
            parameters = tuple(re.findall(r"[\w.]+", brackets))
            yield Name(name, parameters if brackets else None, returns or None, why)


def read_abstract(rows: Mapping[str, str]) -> frozenset[str] | None:
    """Return the methods that a subclass must have; None where it does not matter."""
    for written in rows:
        if written.startswith(_ABSTRACT):
            return frozenset(written.removeprefix(_ABSTRACT).split())
    return None


def check_names(library: str, version: str, table: Table) -> None:
    """Refuse a library that has moved anything of a table.

    Takes milliseconds, a large class up to a hundred: what its methods set is looked
    for in their code, where a class does not list its attributes.

    Args:
        library: For the message.
        version: The installed one, likewise.
        table: What this process needs.

    Raises:
        MovedNamesError: With every name that moved and what it was for.
    """
    moved = [one for where, rows in table.items() for one in _find_moved(where, rows)]
    if moved:
        raise MovedNamesError(
            f"{library} {version} is not as this release of Tetris Serve expects it:\n"
            + "\n".join(f"  {problem}" for problem in moved)
        )


def _find_moved(where: str, rows: Mapping[str, str]) -> Iterator[str]:
    module, _, class_name = where.partition(":")
    try:
        owner = import_module(module)
        if class_name:
            owner = getattr(owner, class_name)
    except (ImportError, AttributeError) as error:
        yield f"{where} is gone ({error}): {', '.join(rows.values())}"
        return
    wanted = read_abstract(rows)
    abstract: frozenset[str] = getattr(owner, "__abstractmethods__", frozenset())
    if wanted is not None and abstract != wanted:
        yield f"{where} wants {sorted(abstract)} of its subclasses"
    for name in read_rows(rows):
        problem = _find_problem(owner, name)
        if problem is not None:
            yield f"{where}.{name.name} {problem}: {name.why}"


def _find_problem(owner: Any, name: Name) -> str | None:
    if name.parameters is None:
        return None if _has(owner, name.name) else "is gone"
    function = getattr(owner, name.name, None)
    if not callable(function):
        return "is gone"
    signature = inspect.signature(inspect.unwrap(function))
    returns = signature.return_annotation
    return name.find_difference(list(signature.parameters), str(returns))


def _has(owner: Any, name: str) -> bool:
    if hasattr(owner, name):
        return True
    return isinstance(owner, type) and any(
        name in inspect.get_annotations(cls) or _is_set_in(cls, name)
        for cls in owner.__mro__
    )


def _is_set_in(cls: type, name: str) -> bool:
    """Whether a method of a class sets an attribute of this name."""
    for member in vars(cls).values():
        code = getattr(inspect.unwrap(member), "__code__", None)
        if isinstance(code, CodeType) and name in code.co_names:
            for instruction in dis.get_instructions(code):
                if instruction.opname == "STORE_ATTR" and instruction.argval == name:
                    return True
    return False


def _match(wanted: tuple[str, ...], found: tuple[str, ...]) -> bool:
    if not wanted:
        return not found
    if wanted[0] == "...":
        return any(_match(wanted[1:], found[skip:]) for skip in range(len(found) + 1))
    return bool(found) and wanted[0] == found[0] and _match(wanted[1:], found[1:])
