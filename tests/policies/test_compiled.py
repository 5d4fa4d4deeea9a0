"""Machine code is never older than any module that it was compiled from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import policies
from policies.compiled import compiled

PACKAGE = Path(policies.__file__).parent


def survival_of_a_sure_token(folder: Path) -> float:
    """Return, in a process of its own, what `stopping` compiled from `logit`."""
    program = """
import pathlib
import numpy as np
import policies
assert pathlib.Path(policies.__file__).parent == pathlib.Path("policies").resolve()
from policies.decisions.early_exit import _take_in_pass
worth, nothing = np.ones(1), np.zeros(1)
_take_in_pass(worth, np.ones(1), nothing, 1.0, 0.0, nothing, 0.0)
print(worth[0])
"""
    return float(run(program, folder))


def copy_package(folder: Path) -> Path:
    """Copy the package, without anything compiled."""
    copy = folder / "policies"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def run(program: str, folder: Path) -> str:
    """Run a program on the package copied to a folder, and return what it prints."""
    environment = {
        key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment | {"NUMBA_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_constant_changed_in_one_module_reaches_what_another_compiled(
    tmp_path: Path,
):
    copy = copy_package(tmp_path)
    assert survival_of_a_sure_token(tmp_path) > 0.99
    assert list((tmp_path / "cache").rglob("*.nbc"))

    logit = copy / "estimators" / "logit.py"
    logit.write_text(
        logit.read_text().replace("MAX_LOG_ODDS = 8.0", "MAX_LOG_ODDS = 0.0")
    )

    assert survival_of_a_sure_token(tmp_path) == 0.5


def price_after_a_sample(folder: Path) -> float:
    """Return, in a process of its own, what a cost table made of one sample."""
    program = """
from policies.estimators.cost_table import CostTable
table = CostTable(8, first_ms=10.0, per_unit_ms=1.0)
table.observe(4, 20.0)
print(table.at(4))
"""
    return float(run(program, folder))


def test_what_was_compiled_for_a_class_that_is_gone_is_compiled_anew(tmp_path: Path):
    copy = copy_package(tmp_path)
    before = price_after_a_sample(tmp_path)
    for name in ("cost_filter", "cost_table"):
        module = copy / "estimators" / f"{name}.py"
        module.write_text(module.read_text().replace("NoiseState", "StateOfNoise"))

    assert price_after_a_sample(tmp_path) == before


def double(number: float) -> float:
    return 2.0 * number


def test_what_was_compiled_once_is_found_on_disk():
    assert compiled(double)(1.0) == 2.0
    again = compiled(double)
    assert again(1.0) == 2.0
    assert sum(again.stats.cache_hits.values()) == 1
