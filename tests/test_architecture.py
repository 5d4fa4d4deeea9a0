"""What the linters do not check: who reaches the CPU worker, packaging, lock files.

Import layers are contracts of import-linter, docstrings of ruff (pyproject.toml).
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import (
    PackageNotFoundError,
    entry_points,
    packages_distributions,
    version,
)
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from serving import cli
from serving.commands import bench

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
            *("recovery", "runner", "target_states", "worker"),
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


SERVER_WITHOUT = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys(sys.argv[1:])
for package in ("policies", "serving"):
    folder = importlib.import_module(package).__path__
    for found in pkgutil.walk_packages(folder, package + "."):
        importlib.import_module(found.name)
"""


@pytest.mark.slow
def test_the_server_imports_nothing_that_only_the_load_test_installs():
    device = "cpu" if version("torch").endswith("+cpu") else "gpu"
    locks = ROOT / "configs" / "requirements"
    pins = {
        name: {line.split("==")[0] for line in file.read_text("utf-8").splitlines()}
        for name in (device, "loadtest")
        for file in [locks / f"{name}.txt"]
    }
    absent = [
        module
        for module, names in packages_distributions().items()
        if not {canonicalize_name(name) for name in names} - pins["loadtest"]
        and not {canonicalize_name(name) for name in names} & pins[device]
    ]
    assert {"locust", "flask", "gevent", "scipy", "pandas", "matplotlib"} <= {*absent}
    subprocess.run([sys.executable, "-c", SERVER_WITHOUT, *absent], check=True)


@pytest.mark.parametrize(
    ("group", "name"),
    [("console_scripts", "tetris-serve"), ("vllm.general_plugins", "tetris")],
)
def test_entry_points_lead_to_something_that_can_be_called(group, name):
    [entry_point] = entry_points(group=group, name=name)
    assert callable(entry_point.load())


def test_a_benchmark_says_what_to_install_before_it_starts(monkeypatch, capsys):
    def find_version(name):
        if name in {"locust", "matplotlib"}:
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(bench, "version", find_version)
    assert cli.main(["bench", "http", "--help"]) == 1
    errors = capsys.readouterr().err
    assert "tetris-serve[loadtest]; missing: locust, matplotlib." in errors
    assert "`make bench` and `make loadtest` install it" in errors
