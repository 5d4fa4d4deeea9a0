"""Compare the tables of private names with another version of vLLM or Ray.

    python .ci/upstream_names.py FOLDER

FOLDER holds `vllm` or `ray` as a wheel does: `pip download vllm==X --no-deps`, then
unzip its Python files. They are read as syntax trees and never imported, so any machine
will do. Prints what an upgrade would have to change; status 1 if there is anything.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from serving import compat_ray  # noqa: E402 - after the path
from serving.contract import Name, Table, read_abstract, read_rows  # noqa: E402
from serving.engine import compat_names, front_names  # noqa: E402

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Scope:
    """What a class or module defines.

    Attributes:
        functions: By name.
        attributes: Everything else that is set, methods' `self.name` included.
        abstract: Functions that a subclass must have.
    """

    functions: dict[str, Function] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    abstract: set[str] = field(default_factory=set)

    @property
    def names(self) -> set[str]:
        """All of them."""
        return self.attributes | self.functions.keys()


class Tree:
    """The syntax trees of one library."""

    def __init__(self, root: Path) -> None:
        """Read below a folder, as it is needed."""
        self._root = root

    @cache  # noqa: B019 - lives as long as the process
    def parse(self, module: str) -> ast.Module | None:
        """Return a module's tree, None if there is no such module."""
        path = self._root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text("utf-8"))
        return None

    def find(self, where: str) -> Scope | None:
        """Return what a part of a table is now, None if it is gone."""
        module, _, class_name = where.partition(":")
        if class_name:
            found = self._find_class(module, class_name)
            return None if found is None else self._read_class(*found)
        tree = self.parse(module)
        return None if tree is None else _read_module(tree)

    def _find_class(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Follow a name to the module that defines it."""
        tree = self.parse(module)
        if tree is None:
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self._find_class(node.module, alias.name)
        return None

    def _read_class(self, module: str, node: ast.ClassDef) -> Scope:
        scope = Scope()
        for base in reversed(node.bases):
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            found = self._find_class(module, name)
            if found is not None and found[1] is not node:
                inherited = self._read_class(*found)
                scope.functions |= inherited.functions
                scope.attributes |= inherited.attributes
                scope.abstract |= inherited.abstract
        for member in node.body:
            if isinstance(member, Function):
                scope.functions[member.name] = member
                is_abstract = "abstractmethod" in map(
                    ast.unparse, member.decorator_list
                )
                (scope.abstract.add if is_abstract else scope.abstract.discard)(
                    member.name
                )
        scope.attributes |= set(_targets(node.body)) | set(_attributes_of_self(node))
        return scope


def _read_module(tree: ast.Module) -> Scope:
    scope = Scope(attributes=set(_targets(tree.body)))
    for node in tree.body:
        if isinstance(node, Function):
            scope.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            scope.attributes.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            scope.attributes |= {alias.asname or alias.name for alias in node.names}
    return scope


def _targets(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _attributes_of_self(node: ast.ClassDef) -> Iterator[str]:
    for child in ast.walk(node):
        if (
            isinstance(child, ast.Attribute)
            and isinstance(child.ctx, ast.Store)
            and ast.unparse(child.value) == "self"
        ):
            yield child.attr


def find_differences(
    root: Path, tables: Iterable[Table], whole: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yield a line for each name of a table that is not there, or not as it was.

    Args:
        root: Folder that holds the library's package.
        tables: As `serving.contract` describes them.
        whole: Parts whose new names are told as well.
    """
    tree = Tree(root)
    for where, rows in ((w, r) for table in tables for w, r in table.items()):
        scope = tree.find(where)
        if scope is None:
            yield f"{where} is gone: {', '.join(rows.values())}"
            continue
        abstract = read_abstract(rows)
        if abstract is not None and scope.abstract != abstract:
            yield f"{where} wants {sorted(scope.abstract)} of its subclasses"
        known = set()
        for name in read_rows(rows):
            known.add(name.name)
            problem = _compare(scope, name)
            if problem is not None:
                yield f"{where}.{name.name} {problem}: {name.why}"
        if where in whole:
            for added in sorted(scope.names - known):
                if not added.startswith("__"):
                    yield f"{where}.{added} is new"


def _compare(scope: Scope, name: Name) -> str | None:
    function = scope.functions.get(name.name)
    if function is None:
        return None if name.name in scope.names and not name.parameters else "is gone"
    args = function.args
    parameters = [one.arg for one in args.posonlyargs + args.args]
    parameters += [args.vararg.arg] if args.vararg else []
    parameters += [one.arg for one in args.kwonlyargs]
    parameters += [args.kwarg.arg] if args.kwarg else []
    returns = None if function.returns is None else ast.unparse(function.returns)
    return name.find_difference(parameters, returns)


def main(arguments: list[str]) -> int:
    """Compare whichever of the two libraries a folder holds."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    root = Path(arguments[0])
    if not any((root / library).is_dir() for library in ("vllm", "ray")):
        print(f"{root} holds neither vllm nor ray: name the folder above")
        return 2
    differences: list[str] = []
    if (root / "vllm").is_dir():
        tables = (*compat_names.ALL, *front_names.ALL)
        differences += find_differences(root, tables, compat_names.WHOLE)
    if (root / "ray").is_dir():
        differences += find_differences(root, [compat_ray.RAY])
    print("\n".join(differences))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
