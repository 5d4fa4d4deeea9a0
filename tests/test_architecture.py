"""What the linters do not check: packaging, entry points, what an image lacks."""

import ast
import subprocess
import sys
import tomllib
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

MAX_FILE_LINES, MAX_CLASS_LINES, MAX_FIELDS = 400, 250, 12
"""More than one idea has mostly found its way in by then."""


def test_files_and_classes_stay_short():
    long = []
    for folder in ("policies", "serving", "loadtest", "tests", ".ci"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text("utf-8")
            if text.count("\n") > MAX_FILE_LINES:
                long.append(f"{path.relative_to(ROOT)}")
            long += [
                f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ClassDef)
                and node.end_lineno - node.lineno >= MAX_CLASS_LINES
            ]
    assert not long


def test_a_class_of_the_server_keeps_few_things():
    """Counters apart, and models of settings, which are as many as users need."""
    large = {
        node.name: len(fields)
        for path in (ROOT / "serving").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
        and len(fields := find_fields(node)) > MAX_FIELDS
    }
    assert large.keys() == {"SpeculationCounters"}


def find_fields(defined):
    """Return what a class assigns to itself, or declares as a dataclass."""
    fields = {
        node.attr
        for node in ast.walk(defined)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    if any("dataclass" in ast.unparse(one) for one in defined.decorator_list):
        fields |= {
            node.target.id for node in defined.body if isinstance(node, ast.AnnAssign)
        }
    return fields


def test_every_importable_folder_is_listed_for_packaging():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    listed = project["tool"]["setuptools"]["packages"]["find"]["include"]
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert set(listed) == {pattern for name in found for pattern in (name, f"{name}.*")}


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


@pytest.mark.parametrize(
    ("group", "name"),
    [("console_scripts", "tetris-serve"), ("vllm.general_plugins", "tetris")],
)
def test_entry_points_lead_to_something_that_can_be_called(group, name):
    [entry_point] = entry_points(group=group, name=name)
    assert callable(entry_point.load())
