"""Fleets that grow and shrink, and what is committed of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from loadtest.simulate.autoscale import SCALERS, Growth, make_scaler, run_growing
from loadtest.simulate.drawn import Drawn
from loadtest.simulate.engine import load_engine
from loadtest.simulate.fleet import Metrics, Targets
from loadtest.simulate.load import Load, draw_requests, parse_arrivals
from loadtest.simulate.show import FOLDER, SHOWN, marks

ENGINE = load_engine("h100-qwen3-1.7b", 3)


def grow(scaler: str, target: float, load: str, growth: Growth) -> Metrics:
    shape = Load(parse_arrivals(load), hard_before=0.2, hard_after=0.8)
    rate_per_s = 1.2 * ENGINE.capacity_per_s(shape)
    drawn = draw_requests(shape, 40_000, rate_per_s, 1)
    decide = make_scaler(scaler, target, ENGINE, 0.2)
    return run_growing(ENGINE, drawn, decide, growth, Targets(100, 5), 1)[0]


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_steady_load_gets_the_replicas_that_its_target_says(scaler: str) -> None:
    growth = Growth(8, start_s=10, up_delay_s=0, down_delay_s=20)
    roomy, tight = (
        grow(scaler, target, "poisson", growth)
        for target in ((8, 60) if scaler == "target-ongoing" else (1.5, 4))
    )
    assert roomy["replica_hours"] > 1.1 * tight["replica_hours"]
    assert roomy["tpot_p99_ms"] < tight["tpot_p99_ms"]
    # 379 s of 1.2 replicas at the least.
    assert tight["replica_hours"] > 379 * 1.2 / 3600


def test_replicas_that_start_later_serve_later() -> None:
    soon, late = (
        grow("target-ongoing", 30, "diurnal=8", Growth(8, start_s, 0, 20))
        for start_s in (1, 100)
    )
    assert soon["ttft_p99_ms"] < late["ttft_p99_ms"]


def test_nobody_pays_for_replicas_while_nobody_comes() -> None:
    arrival_s = np.append(np.linspace(0, 0.1, 100), 3600)
    tokens = np.full(101, 100)
    drawn = Drawn(arrival_s, tokens, tokens, np.zeros(101, np.int64))
    decide = make_scaler("target-ongoing", 10, ENGINE, 0)
    growth = Growth(8, down_delay_s=60)
    found = run_growing(ENGINE, drawn, decide, growth, Targets(100, 5), 1)[0]
    assert 1 < found["replica_hours"] < 1.5


def test_a_replica_that_drains_is_paid_beside_the_one_that_starts() -> None:
    tokens = np.full(3, 10), np.array([20_000, 20_000, 1])
    drawn = Drawn(np.array([0.0, 0.0, 30.0]), *tokens, np.zeros(3, np.int64))
    growth = Growth(2, start_s=10, up_delay_s=0, down_delay_s=0)
    found, _, paid = run_growing(
        *(ENGINE, drawn, lambda now_s, *_: 1 if now_s < 15 else 2),
        *(growth, Targets(100, 5), 1),
    )
    assert paid == [2, 2, 3, 3, 2, 2]
    assert found["at_limit"] == 4 / 6


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_shows_the_committed_runs(name: str) -> None:
    text = (FOLDER / "README.md").read_text("utf-8")
    begin, end = marks(name)
    shown = text.partition(begin)[2].partition(end)[0]
    found = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    assert shown == SHOWN[name][1](found)
