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

# What `early_exit` compiled from `logit`, and a table for a class of `cost_filter`.
PROGRAM = """
import pathlib
import numpy as np
import policies
from policies.decisions.early_exit import _take_in_pass
from policies.estimators.cost_table import CostTable

assert pathlib.Path(policies.__file__).parent == pathlib.Path("policies").resolve()
worth, nothing = np.ones(1), np.zeros(1)
_take_in_pass(worth, np.ones(1), nothing, 1.0, 0.0, nothing, 0.0)
table = CostTable(8, first_ms=10.0, per_unit_ms=1.0)
table.observe(4, 20.0)
print(worth[0], table.at(4))
"""


def run(folder: Path) -> tuple[float, float]:
    """Return a sure token's survival and the price after a sample, in a new process."""
    environment = {
        key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env=environment | {"NUMBA_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    survival, price_ms = done.stdout.split()
    return float(survival), float(price_ms)


def test_what_changed_in_one_module_reaches_what_others_compiled(tmp_path: Path):
    """A constant that is another one, and a class that is gone."""
    copy = tmp_path / "policies"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    survival, price_ms = run(tmp_path)
    assert survival > 0.99
    assert list((tmp_path / "cache").rglob("*.nbc"))

    for name, old, new in (
        ("logit", "MAX_LOG_ODDS = 8.0", "MAX_LOG_ODDS = 0.0"),
        ("cost_filter", "NoiseState", "StateOfNoise"),
        ("cost_table", "NoiseState", "StateOfNoise"),
    ):
        module = copy / "estimators" / f"{name}.py"
        source = module.read_text()
        assert old in source
        module.write_text(source.replace(old, new))

    assert run(tmp_path) == (0.5, price_ms)


def double(number: float) -> float:
    return 2.0 * number


def test_what_was_compiled_once_is_found_on_disk():
    assert compiled(double)(1.0) == 2.0
    again = compiled(double)
    assert again(1.0) == 2.0
    assert sum(again.stats.cache_hits.values()) == 1
