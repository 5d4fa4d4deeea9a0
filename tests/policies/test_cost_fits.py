"""What a trend takes from samples of a clock that wanders."""

from __future__ import annotations

import numpy as np

from policies.cost_fits import Trend, fit_trend


def fit(xs: np.ndarray, ys: np.ndarray) -> Trend:
    trend = Trend()
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        trend = fit_trend(trend, x, y)
    return trend


def read(trend: Trend, x: float) -> float:
    return trend.level + trend.slope * x


def test_a_line_is_found() -> None:
    xs = np.random.default_rng(0).uniform(0.2, 0.8, 300)
    trend = fit(xs, 0.5 + 1.5 * xs)
    assert abs(trend.slope - 1.5) < 0.1
    assert abs(read(trend, 0.5) - 1.25) < 0.02


def test_counts_that_came_up_on_a_slow_machine_hardly_look_dear() -> None:
    # By turns slower and faster by half, and steps carry more tokens while it is slow.
    rng = np.random.default_rng(0)
    phase = np.sin(2 * np.pi * np.arange(600) / 200)
    xs = 0.5 + 0.1 * phase + rng.normal(0.0, 0.03, 600)
    ys = (1.0 + 0.5 * phase) * rng.lognormal(0.0, 0.03, 600)
    over_all = np.polyfit(xs, ys, 1)[0]
    assert over_all > 4.0
    assert abs(fit(xs, ys).slope) < over_all / 2


def test_the_slope_stays_where_it_was_while_nothing_varies() -> None:
    trend = fit(np.full(100, 0.5), np.full(100, 1.3))
    assert trend.slope == 0.0
    assert abs(read(trend, 0.5) - 1.3) < 0.01
