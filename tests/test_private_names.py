"""Private names of vLLM and Ray: in one table per library, and where it says."""

import ast
import importlib.util
import re
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
from upstream_names import find_differences

from serving import compat_ray
from serving.contract import MovedNamesError, check_names
from serving.engine import compat_names, front_names

SERVING = Path(__file__).resolve().parent.parent / "serving"

NAMES = ("compat", "compat_cpu", "compat_names", "front_names")
DOORS = {"compat_ray.py", *(f"engine/{name}.py" for name in NAMES)}
# What the callers of an engine are meant to catch; vLLM offers it nowhere else.
CALLERS_ERRORS = "vllm.v1.engine.exceptions"

PRIVATE = re.compile(r"(vllm\.v1\b|(vllm|ray)\.(\w+\.)*_).*")


@pytest.mark.parametrize(
    ("package", "tables", "whole"),
    [
        ("vllm", (*compat_names.ALL, *front_names.ALL), compat_names.WHOLE),
        ("ray", (compat_ray.RAY,), frozenset()),
    ],
)
def test_all_names_are_where_the_table_says(package, tables, whole):
    # Found without an import, which takes long.
    folder = Path(importlib.util.find_spec(package).origin).parents[1]
    assert not list(find_differences(folder, tables, whole))


def test_nobody_else_reaches_for_private_names():
    found = set()
    for path in SERVING.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [node.value]
            private = [name for name in names if PRIVATE.fullmatch(name)]
            if any(not name.startswith(CALLERS_ERRORS) for name in private):
                found.add(path.relative_to(SERVING).as_posix())
    assert found == DOORS


LIMIT = 3


class Base:
    def inherited(self, first):
        self.set_here = first


class Engine(Base, ABC):
    field: int

    @abstractmethod
    def run(self, step, *, depth=0) -> tuple[int, str]:
        pass


def helper(a, b):
    pass


def test_a_library_as_expected_passes():
    names = {
        "field set_here inherited(first)": "state",
        "run(step, ...) -> tuple[int, str]": "a step",
        "@abstract run": "ours has it",
    }
    table = {f"{__name__}:Engine": names, __name__: {"LIMIT helper(a, b)": "help"}}
    check_names("Upstream", "1", table)


@pytest.mark.parametrize(
    ("where", "wanted", "message"),
    [
        (":Machine", "run", r"Machine is gone \(.*\): a step"),
        (":Engine", "fields", "Engine.fields is gone: a step"),
        (":Engine", "set_there", "Engine.set_there is gone: a step"),
        (":Engine", "inherited()", r"takes \(first\), not \(\): a step"),
        (":Engine", "run(tick, ...)", r"takes \(step, depth\)"),
        (":Engine", "run(step, ...) -> int", r"returns tuple\[int, str\], not int"),
        (":Engine", "@abstract run walk", r"wants \['run'\] of its subclasses"),
        ("", "LIMITS", "LIMITS is gone: a step"),
        ("", "helper(a)", r"takes \(a, b\), not \(a\): a step"),
    ],
)
def test_whatever_moved_is_named_with_what_it_was_for(where, wanted, message):
    with pytest.raises(MovedNamesError, match=f"(?s)Upstream 2 is not.*{message}"):
        check_names("Upstream", "2", {__name__ + where: {wanted: "a step"}})
