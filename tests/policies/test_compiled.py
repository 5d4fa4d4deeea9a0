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
    return float(done.stdout)


def test_a_constant_changed_in_one_module_reaches_what_another_compiled(
    tmp_path: Path,
):
    copy = tmp_path / "policies"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert survival_of_a_sure_token(tmp_path) > 0.99
    assert list((tmp_path / "cache").rglob("*.nbc"))

    logit = copy / "estimators" / "logit.py"
    logit.write_text(
        logit.read_text().replace("MAX_LOG_ODDS = 8.0", "MAX_LOG_ODDS = 0.0")
    )

    assert survival_of_a_sure_token(tmp_path) == 0.5


def double(number: float) -> float:
    return 2.0 * number


def test_what_was_compiled_once_is_found_on_disk():
    assert compiled(double)(1.0) == 2.0
    again = compiled(double)
    assert again(1.0) == 2.0
    assert sum(again.stats.cache_hits.values()) == 1
