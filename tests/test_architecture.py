"""What the linters do not check: who reaches the CPU worker, packaging, lock files.

Import layers are contracts of import-linter, docstrings of ruff (pyproject.toml).
"""

import ast
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("policies", "serving", "loadtest")

COMPAT_CPU = "serving/engine/compat_cpu.py"
# The CPU worker and what it is made of: no process of a GPU may import any of it.
ON_CPU = {
    COMPAT_CPU,
    *(
        f"serving/engine/cpu/{name}.py"
        for name in (
            *("cold_drafter", "drafter", "kernels", "plain_steps", "profile"),
            *("runner", "worker"),
        )
    ),
}


def modules(*packages: str) -> list[str]:
    """Return the paths of all modules of some packages, relative to the root."""
    paths = (path for name in packages for path in (ROOT / name).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def parse(path: str) -> ast.Module:
    """Parse a module given by its path relative to the root."""
    return ast.parse((ROOT / path).read_text("utf-8"))


def imported_names(path: str) -> Iterator[str]:
    """Yield the dotted name of everything that a module imports, at any level."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A path has as many parts above its module as dots a relative import needs.
            above = Path(path).parts[: -node.level] if node.level else ()
            origin = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def reachable(path: str) -> set[str]:
    """Return the modules of the server that a module of it leads to."""
    known, found, pending = set(modules("serving")), {path}, [path]
    while pending:
        # Of `a.b.c`, c may be a module or something in a module.
        for name in imported_names(pending.pop()):
            parts = name.split(".")
            paths = {"/".join(parts) + ".py", "/".join(parts[:-1]) + ".py"}
            new = (paths & known) - found
            found |= new
            pending.extend(new)
    return found


def test_policies_draw_only_from_a_generator_passed_to_them():
    used = {
        node.attr
        for path in modules("policies")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in {"np.random", "numpy.random"}
    }
    used |= {
        name.removeprefix("numpy.random.")
        for path in modules("policies")
        for name in imported_names(path)
        if name.startswith("numpy.random.")
    }
    # With a seed of its caller's: `policies.testing` makes up batches.
    assert used <= {"Generator", "default_rng"}


def test_nothing_but_the_cpu_worker_s_own_parts_leads_to_vllms_cpu_worker():
    found = {path for path in modules("serving") if COMPAT_CPU in reachable(path)}
    assert found == ON_CPU


def test_every_importable_folder_is_listed_for_packaging():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    listed = project["tool"]["setuptools"]["packages"]["find"]["include"]
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert set(listed) == {pattern for name in found for pattern in (name, f"{name}.*")}


def test_folders_with_modules_are_packages():
    folders = {(ROOT / path).parent for path in modules(*PACKAGES)}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


@pytest.mark.parametrize(
    ("group", "name"),
    [("console_scripts", "tetris-serve"), ("vllm.general_plugins", "tetris")],
)
def test_entry_points_lead_to_something_that_can_be_called(group, name):
    [entry_point] = entry_points(group=group, name=name)
    assert callable(entry_point.load())
