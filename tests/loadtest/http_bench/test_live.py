"""The figures of Locust's web page while a run goes on, and after it."""

from __future__ import annotations

import pytest

from loadtest.http_bench.live import LiveFigures
from loadtest.http_bench.outcome import CUT, TIMEOUT, Outcome


def outcome(end_s: float, **changes: object) -> Outcome:
    """A reply of ten tokens that took half a second."""
    values = {
        "scheduled_s": end_s - 0.5,
        "sent_s": end_s - 0.5,
        "first_s": end_s - 0.4,
        "last_s": end_s,
        "end_s": end_s,
        "output_tokens": 10,
        "prompt_tokens": 7,
        "status": 200,
        "finish_reason": "stop",
    }
    return Outcome(id=f"at {end_s}", workload="mixed", **(values | changes))


def requests_per_s(live: LiveFigures, now_s: float) -> float:
    return float(live.rows(now_s)[-1]["requests_per_s"])


def test_rates_are_those_of_the_latest_half_minute():
    live = LiveFigures()
    for number in range(600):
        live.add(outcome(number / 10))
    assert requests_per_s(live, 60.0) == pytest.approx(10.0, rel=0.01)
    assert requests_per_s(live, 75.0) == pytest.approx(5.0, rel=0.01)
    # A clock that has not begun, or lags behind the workers', makes no rate infinite.
    assert requests_per_s(live, 0.0) == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_rates_are_right_when_requests_come_faster_than_can_be_kept(num_workers):
    live = LiveFigures()
    # Each worker reports its own three seconds at once.
    for begin_s in range(0, 30, 3):
        for worker in range(num_workers):
            for number in range(worker, 3 * 1000, num_workers):
                live.add(outcome(begin_s + number / 1000))
    assert requests_per_s(live, 30.0) == pytest.approx(1000.0, rel=0.01)


def test_the_history_has_a_point_for_every_time_and_none_for_a_stopped_clock():
    live = LiveFigures()
    live.record(0.0)
    live.add(outcome(1.0))
    for now_s in (2.0, 4.04, 4.04, 4.04):
        live.record(now_s)
    assert [point["at_s"] for point in live.history] == [2.0, 4.0]
    assert live.history[0]["requests_per_s"] == 0.5


def test_every_stream_that_broke_off_counts_as_cut():
    live = LiveFigures()
    live.add(outcome(1.0))
    live.add(outcome(1.0, failure=CUT, finish_reason=None))
    live.add(outcome(1.0, failure=TIMEOUT, finish_reason=None))
    live.add(outcome(1.0, failure="http_503", finish_reason=None, status=503))
    row = live.rows(2.0)[-1]
    assert row["cut"] == 2
    assert row["failed"] == 3
