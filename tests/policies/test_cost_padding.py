"""Step costs of an engine that pads its passes to certain sizes."""

from __future__ import annotations

import numpy as np
import pytest

from policies.estimators.cost_table import CostTable
from policies.goodput import GoodputPlanner
from policies.registry import build_planner
from policies.types import CostProfile, DraftBatch, EngineLimits, PolicySpec

SIZES = (*range(8, 257, 8),)


@pytest.mark.parametrize(("low", "high"), [(1, 32), (57, 136)])
def test_a_staircase_shows_as_one_where_the_engine_pads(low: int, high: int):
    table = CostTable(512, first_ms=1, per_unit_ms=1, padded_sizes=SIZES)
    rng = np.random.default_rng(1)
    for _ in range(3000):
        count = int(rng.integers(low, high + 1))
        noise = rng.lognormal(0, 0.02)
        table.observe(count, noise * (20.0 + 10.0 * -(-count // 8)))
    tops = np.arange(low + 7, high + 1, 8.0)
    expected = 20.0 + 10.0 * tops / 8
    # From the first token of a stair to the last; the next one is 10 ms up. The level
    # follows the last samples and their noise.
    expected *= table.predict(tops).mean() / expected.mean()
    assert table.predict(tops - 7) == pytest.approx(expected, abs=2.5)
    assert table.predict(tops) == pytest.approx(expected, abs=2.5)
    assert table.predict(tops).mean() == pytest.approx(20 + 1.25 * tops.mean(), 0.05)


def test_one_look_up_and_many_agree_and_larger_counts_are_not_padded():
    table = CostTable(64, first_ms=1.0, per_unit_ms=1.0, padded_sizes=(8, 16))
    counts = np.array([-1.0, 0.0, 0.5, 1.0, 8.0, 8.5, 16.0, 16.5, 17.0, 40.0, 100.0])
    padded = [0.0, 0.0, 8.0, 8.0, 8.0, 16.0, 16.0, 16.5, 17.0, 40.0, 100.0]
    assert table.predict(counts) == pytest.approx(padded)
    assert [table.at(count) for count in counts.tolist()] == pytest.approx(padded)
    assert float(table.predict(9.0)) == pytest.approx(16.0)
    assert table.predict(counts.reshape(1, -1)).shape == (1, counts.size)


def test_a_profile_is_kept_as_it_was_measured_at_every_size():
    table = CostTable(300, first_ms=1.0, per_unit_ms=1.0, padded_sizes=SIZES)
    measured_ms = tuple(10.0 + (size // 64) * 7.0 for size in SIZES)
    table.fit_profile(SIZES, measured_ms)
    assert table.predict(np.array(SIZES, dtype=float)) == pytest.approx(measured_ms)
    assert table.at(57) == pytest.approx(measured_ms[SIZES.index(64)])
    assert table.export_state()["knots"] == [*SIZES, 300]


@pytest.mark.parametrize("policy", ["dynamic", "goodput"])
def test_planners_price_padded_what_is_padded(policy: str):
    limits = EngineLimits(max_tokens=512, max_reqs=64, padded_sizes=SIZES)
    cost = build_planner(PolicySpec(policy, max_draft_tokens=4), limits).cost
    for table in (cost.target, cost.draft_first):
        assert table.at(57) == table.at(64) < table.at(65)
    # Counts of requests.
    for table in (cost.draft_next, cost.host):
        assert table.at(57) < table.at(64)


def test_drafts_fill_a_stair_and_do_not_begin_one():
    limits = EngineLimits(max_tokens=512, max_reqs=64, padded_sizes=SIZES)
    planner = GoodputPlanner.build(1, limits)
    target_ms = tuple(10.0 + 0.5 * size for size in SIZES)
    planner.fit_profile(CostProfile(SIZES, target_ms, (0.5,) * len(SIZES)))
    num_reqs = 61
    rng = np.random.default_rng(2)
    for _ in range(50):
        planner.choose_depth(num_reqs)
        confidence = rng.uniform(0.02, 0.9, (num_reqs, 1))
        batch = DraftBatch(
            num_draft_tokens=np.ones(num_reqs, dtype=np.int64),
            confidence=confidence,
            num_decodes=num_reqs,
        )
        selection = planner.select(batch)
        num_tokens = num_reqs + int(selection.num_admitted.sum())
        assert num_tokens in SIZES or selection.is_probe
