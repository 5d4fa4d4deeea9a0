"""What may import what, and what the package says about itself."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("policies", "serving", "loadtest")

# What would let a policy see a clock, a global random generator, the environment or
# the outside world.
IMPURE = frozenset(
    {
        "asyncio",
        "datetime",
        "io",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
        "secrets",
        "socket",
        "subprocess",
        "threading",
        "time",
        "uuid",
        "warnings",
    }
)
# What the callers of an engine are meant to catch; vLLM offers it nowhere else.
CALLERS_ERRORS = "vllm.v1.engine.exceptions."

# The only importers of vLLM's private names, the second on the CPU alone.
COMPAT, COMPAT_CPU = "serving/engine/compat.py", "serving/engine/compat_cpu.py"
# The CPU worker and what it is made of: no process of a GPU may import any of it.
ON_CPU = {
    COMPAT_CPU,
    *(
        f"serving/engine/{name}.py"
        for name in (
            *("cold_drafter", "cpu_kernels", "plain_steps", "profile", "runner_v1"),
            "worker",
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


@pytest.mark.parametrize("path", modules("policies"))
def test_policies_import_only_numpy_and_pure_parts_of_the_standard_library(path):
    allowed = (sys.stdlib_module_names - IMPURE) | {"numpy", "policies"}
    if path == "policies/compiled.py":
        allowed |= {"numba"}
    imported = {name.partition(".")[0] for name in imported_names(path)}
    assert imported <= allowed


@pytest.mark.parametrize("path", modules("policies"))
def test_policies_draw_only_from_a_generator_passed_to_them(path):
    used = {
        node.attr
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in {"np.random", "numpy.random"}
    }
    used |= {
        name.removeprefix("numpy.random.")
        for name in imported_names(path)
        if name.startswith("numpy.random.")
    }
    assert used <= {"Generator"}


def test_value_types_shared_by_policies_depend_on_no_other_policy():
    imported = imported_names("policies/batch.py")
    assert not [name for name in imported if name.startswith("policies")]


@pytest.mark.parametrize("path", modules("serving"))
def test_only_the_compatibility_modules_import_private_vllm_names(path):
    private = {
        name
        for name in imported_names(path)
        if name.startswith("vllm.")
        and (name.startswith("vllm.v1.") or "._" in name)
        and not name.startswith(CALLERS_ERRORS)
    }
    assert not private or path in {COMPAT, COMPAT_CPU}


def test_nothing_but_the_cpu_worker_s_own_parts_leads_to_vllms_cpu_worker():
    found = {path for path in modules("serving") if COMPAT_CPU in reachable(path)}
    assert found == ON_CPU


@pytest.mark.parametrize("path", modules("loadtest"))
def test_load_tests_do_not_import_the_server(path):
    imported = {name.partition(".")[0] for name in imported_names(path)}
    assert "serving" not in imported


@pytest.mark.parametrize("path", modules(*PACKAGES))
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(parse(path))


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
