"""Private names of vLLM and Ray: in one table per library, and where it says."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from upstream_names import find_differences

from serving import compat_ray
from serving.contract import MovedNamesError, check_names
from serving.engine import compat_names, front_names

SERVING = Path(__file__).resolve().parent.parent / "serving"

DOORS = {"engine/compat.py", "engine/compat_cpu.py", "engine/compat_names.py"}
DOORS |= {"engine/front_names.py"}
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
    assert found == {*DOORS, "compat_ray.py"}


UPSTREAM = """
from abc import ABC, abstractmethod

LIMIT = 3


class Base(ABC):
    def inherited(self, first):
        self.set_here = first


class Engine(Base):
    field: int

    @abstractmethod
    def run(self, step, *, depth=0) -> tuple[int, str]:
        pass


def helper(a, b):
    pass
"""

WANTED = {
    "upstream.core:Engine": {
        "field set_here inherited(first)": "state",
        "run(step, ...) -> tuple[int, str]": "a step",
        "@abstract run": "ours has it",
    },
    "upstream.core": {"LIMIT helper(a, b)": "help"},
}

MOVES = [
    ("class Engine(Base)", "class Machine(Base)", "Engine is gone"),
    ("    field: int\n", "", "Engine.field is gone: state"),
    ("self.set_here", "self.elsewhere", "Engine.set_here is gone: state"),
    ("inherited(self, first)", "inherited(self)", r"takes \(\), not \(first\): state"),
    ("def run(self, step,", "def run(self, tick,", r"takes \(tick, depth\)"),
    ("tuple[int, str]", "int", r"returns .*int.*, not tuple\[int, str\]: a step"),
    ("    @abstractmethod\n", "", r"wants \[\] of its subclasses"),
    ("LIMIT = 3", "", "LIMIT is gone: help"),
    ("def helper(a, b)", "def helper(a, b, c)", r"takes \(a, b, c\), not \(a, b\)"),
]


@pytest.fixture
def write_upstream(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        (tmp_path / "upstream").mkdir(exist_ok=True)
        (tmp_path / "upstream" / "core.py").write_text(text)
        return tmp_path

    yield write
    for name in ("upstream", "upstream.core"):
        sys.modules.pop(name, None)


def test_a_library_as_expected_passes_and_what_is_new_asks_for_a_look(write_upstream):
    folder = write_upstream(UPSTREAM)
    check_names("Upstream", "1", WANTED)
    assert not list(find_differences(folder, [WANTED]))
    folder = write_upstream(UPSTREAM.replace("LIMIT = 3", "LIMIT = MORE = 3"))
    differences = list(find_differences(folder, [WANTED], frozenset({"upstream.core"})))
    assert "upstream.core.MORE is new" in differences


@pytest.mark.parametrize(("before", "after", "message"), MOVES)
def test_whatever_moves_is_named_with_what_it_was_for(
    before, after, message, write_upstream
):
    folder = write_upstream(UPSTREAM.replace(before, after))
    with pytest.raises(MovedNamesError, match=f"(?s)Upstream 2 is not.*{message}"):
        check_names("Upstream", "2", WANTED)
    assert re.search(message, "\n".join(find_differences(folder, [WANTED])))
