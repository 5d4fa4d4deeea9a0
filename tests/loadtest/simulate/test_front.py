"""The simulated front: turns, places and deadlines, by production's own functions."""

import math

import numpy as np
import pytest

from loadtest.simulate.crowd import draw
from loadtest.simulate.drawn import Drawn
from loadtest.simulate.engine import load_engine
from loadtest.simulate.fleet import run_fleet
from loadtest.simulate.front import EXPIRED, NO_PLACE, SERVED, TOO_LATE, Front


@pytest.fixture(scope="module")
def engine():
    return load_engine("h100-qwen3-1.7b", 0, 8)


def serve(engine, parts, callers, **options):
    drawn, whose = draw(parts, 0)
    options = {"max_queued": 1000, "seed": 0} | options
    return whose, Front(engine, drawn, callers, whose, 2, **options).run()


def test_an_idle_front_changes_nothing(engine):
    """Every request goes on as it comes, so all is as without a front."""
    drawn, whose = draw([(5.0, 300)], 0)
    front = Front(engine, drawn, {"a": math.inf}, whose, 2, max_queued=9, seed=0)
    served = front.run()
    requests = run_fleet(engine, drawn, 2, "ours", 0.0, 0).requests
    assert (served.outcome == SERVED).all()
    np.testing.assert_allclose(
        served.finish_ms, 1e3 * (requests.finish_s - drawn.arrival_s)
    )


def test_who_floods_waits_and_the_other_hardly_does(engine):
    callers = {"quiet": math.inf, "flood": math.inf}
    parts = [(5.0, 100), (200.0, 3000)]
    medians = {}
    for is_fair in (True, False):
        whose, served = serve(engine, parts, callers, is_fair=is_fair)
        quiet, flood = served.ttft_ms[whose == 0], served.ttft_ms[whose == 1]
        medians[is_fair] = np.nanmedian(quiet), np.nanmedian(flood)
    assert medians[True][0] < 0.1 * medians[False][0]
    assert medians[True][0] < 0.1 * medians[True][1]


def test_kept_seats_bring_the_quiet_one_close_to_being_alone():
    """And cost the flood little."""
    engine = load_engine("h100-qwen3-1.7b", 3, 32)
    callers = {"quiet": math.inf, "flood": math.inf}
    parts = [(15.0, 300), (150.0, 3000)]
    p95_ms, served_by = {}, {}
    for keeps in (True, False):
        whose, served = serve(engine, parts, callers, keeps_seats=keeps, max_queued=64)
        p95_ms[keeps] = np.nanquantile(served.ttft_ms[whose == 0], 0.95)
        served_by[keeps] = (served.outcome == SERVED).sum()
    assert p95_ms[True] < 0.5 * p95_ms[False]
    assert served_by[True] > 0.9 * served_by[False]


def test_places_run_out_and_nobody_is_lost(engine):
    _, served = serve(engine, [(500.0, 2000)], {"a": math.inf}, max_queued=4)
    assert set(served.outcome.tolist()) == {SERVED, NO_PLACE}
    np.testing.assert_array_equal(
        np.isfinite(served.finish_ms), served.outcome == SERVED
    )


def test_deadlines_are_refused_early_or_expire(engine):
    callers, parts = {"a": 2000.0}, [(120.0, 2000)]
    _, early = serve(engine, parts, callers)
    _, late = serve(engine, parts, callers, refuses=False)
    assert (early.outcome == TOO_LATE).sum() > 100
    assert (late.outcome == EXPIRED).sum() > 100
    assert not (late.outcome == TOO_LATE).any()
    # What is not refused expires later, or comes too late, and has taken time.
    assert (early.finish_ms <= 2000).sum() > 1.2 * (late.finish_ms <= 2000).sum()


def test_an_idle_fleet_is_known_to_be_idle() -> None:
    """Also where nobody came since the last reply ended."""
    engine = load_engine("h100-qwen3-1.7b", 3, 32)
    arrival_s = np.append(np.zeros(32), 100.0)
    tokens = np.full(33, 20)
    drawn = Drawn(arrival_s, tokens, tokens, np.zeros(33, np.int64))
    callers, whose = {"crowd": math.inf, "late": 300.0}, np.arange(33) // 32
    served = Front(engine, drawn, callers, whose, 2, max_queued=99).run()
    assert (served.outcome == SERVED).all()


def test_requests_have_the_same_luck_in_whatever_order_they_are_sent() -> None:
    """Alone on one seat, a request takes as many steps in either arm."""
    engine = load_engine("h100-qwen3-1.7b", 3, 1)
    tokens = np.full(40, 100)
    drawn = Drawn(np.zeros(40), tokens, tokens, np.zeros(40, np.int64))
    callers, whose = {"a": math.inf, "b": math.inf}, np.repeat([0, 1], [30, 10])
    spans = []
    for is_fair in (True, False):
        front = Front(
            *(engine, drawn, callers, whose, 1),
            max_queued=99,
            is_fair=is_fair,
            keeps_seats=False,
        )
        served = front.run()
        spans.append(served.finish_ms - served.ttft_ms)
        assert (np.diff(front._order) > 0).all() != is_fair
    np.testing.assert_allclose(spans[0], spans[1])


def test_one_can_be_let_in_to_see_what_it_would_have_met(engine):
    callers, parts = {"a": 2000.0}, [(120.0, 2000)]
    _, served = serve(engine, parts, callers)
    refused = int(np.flatnonzero(served.outcome == TOO_LATE)[50])
    _, again = serve(engine, parts, callers, never_refused=refused)
    assert again.outcome[refused] != TOO_LATE
    before = slice(0, refused)
    np.testing.assert_array_equal(again.outcome[before], served.outcome[before])
