"""Machine code is never old, and nothing is left to compile while requests wait."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import policies
from policies.compiled import compiled
from policies.decisions.select import select_drafts
from policies.registry import POLICY_NAMES, build_planner
from policies.types import DraftBatch, EngineLimits, PolicySpec
from policies.warmup import warm_up
from tests.policies.made_up import MAX_DEPTH, MadeUpEngine
from tests.policies.made_up_steps import MadeUpStep

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


def run(folder):
    """Return a sure token's survival and the price after a sample, in a new process."""
    environment = {key: os.environ[key] for key in {"PATH", "HOME"} & os.environ.keys()}
    environment["NUMBA_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-c", PROGRAM]
    printed = subprocess.check_output(command, cwd=folder, env=environment, text=True)
    survival, price_ms = printed.split()
    return float(survival), float(price_ms)


def test_what_changed_in_one_module_reaches_what_others_compiled(tmp_path):
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


def double(number):
    return 2.0 * number


def test_what_was_compiled_once_is_found_on_disk():
    assert compiled(double)(1.0) == 2.0
    again = compiled(double)
    assert again(1.0) == 2.0
    assert sum(again.stats.cache_hits.values()) == 1


def count_compiled():
    """Count for each compiled function for how many kinds of arguments it was."""
    return {
        f"{name}.{attribute}": len(value.signatures)
        for name, module in list(sys.modules.items())
        if name.startswith("policies.")
        for attribute, value in vars(module).items()
        if hasattr(value, "signatures")
    }


@pytest.mark.parametrize("policy", sorted(set(POLICY_NAMES) - {"none"}))
@pytest.mark.parametrize("padded_sizes", [(), (1, 2, 4, 8, 16, 32, 64)])
def test_nothing_is_left_to_compile(policy, padded_sizes):
    spec = PolicySpec(policy, MAX_DEPTH - 1, max_draft_tokens=MAX_DEPTH)
    may = {"skips_drafter": True, "exits_early": True}
    limits = EngineLimits(512, 64, padded_sizes=padded_sizes, **may)
    warm_up(spec, limits)
    before = count_compiled()
    assert sum(before.values()) > 0

    for sampled in (False, True):
        planner = build_planner(spec, limits)
        MadeUpEngine(6).run(planner, 100, sampled=sampled)
    for has_classes in (False, True):
        planner, timing = build_planner(spec, limits), None
        rng = np.random.default_rng(0)
        for number in range(250):
            num_reqs, depth = 5 - number % 2, spec.max_depth
            step = MadeUpStep(rng, num_reqs, depth, has_classes=has_classes)
            timing = step.time(step.run(planner, timing))
    planner.import_state(planner.export_state())
    for num_decodes in (3, 4):
        planner.select(DraftBatch(np.array([2, 0, 1]), None, num_decodes=num_decodes))
        planner.choose_depth(3)
    select_drafts(np.full((3, 2), 0.5, dtype=np.float32), np.array([2, 0, 1]), 2)
    assert count_compiled() == before
