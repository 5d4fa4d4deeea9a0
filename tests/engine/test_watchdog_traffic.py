"""The watchdog under made-up traffic: whom it spares, and when it is over."""

import pytest

from tests.engine.made_up_traffic import MadeUpTraffic

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

NUM_REQS = 16

CAUSES = {
    "all": lambda _: True,
    "context": lambda request: request.num_tokens >= 512,
    "class": lambda request: request.priority == 0,
}


def collapse(traffic, reason):
    """Break the drafter for some; return after how many steps that was noticed."""
    traffic.collapsed = CAUSES[reason]
    before = traffic.step
    while not traffic.counters.num_quarantines:
        traffic.run(1)
        assert traffic.step < before + 50
    return traffic.step - before


@pytest.fixture(params=[True, False], ids=["confidence", "none"])
def traffic(request):
    """Requests whose drafter has worked for a while."""
    traffic = MadeUpTraffic(NUM_REQS, 1, reports_confidence=request.param)
    traffic.run(2000)
    assert not traffic.counters.num_quarantines
    return traffic


@pytest.mark.parametrize("reason", CAUSES)
def test_others_draft_on_and_all_do_within_fifty_steps_of_the_end(traffic, reason):
    assert collapse(traffic, reason) <= 45
    traffic.run(40)
    limited = traffic.watchdog.limits
    assert all(
        traffic.collapsed(r) or r.request_id not in limited for r in traffic.running
    )
    if reason == "all":
        assert len(limited) >= NUM_REQS - 2
    else:
        assert reason in traffic.counters.num_quarantines
    num_healthy = num_spared = num_broken = num_wasted = 0
    for _ in range(100):
        traffic.run(1)
        for one in traffic.running:
            is_broken = traffic.collapsed(one)
            num_broken += is_broken
            num_wasted += is_broken and one.num_verified > 0
            # Who has just come has no drafts yet.
            num_healthy += not is_broken and one.num_new > 0
            num_spared += not is_broken and one.num_verified > 0
    assert num_wasted < 0.15 * num_broken
    assert num_spared >= 0.9 * num_healthy
    traffic.collapsed = lambda _: False
    traffic.run(50)
    assert not traffic.watchdog.is_active
    traffic.run(2)
    assert traffic.num_drafting >= NUM_REQS - 2


def test_a_mix_that_changed_is_learnt_and_not_left_without_drafts(traffic):
    """From one step to the next all text is much harder, and stays so."""
    traffic.hardness = 2.5
    traffic.run(1500)
    assert sum(traffic.counters.num_quarantines.values()) <= 4
    num_drafting = 0
    for _ in range(500):
        traffic.run(1)
        num_drafting += traffic.num_drafting
    assert num_drafting > 0.9 * 500 * NUM_REQS


def test_planners_learn_nothing_of_requests_under_quarantine():
    traffic = MadeUpTraffic(NUM_REQS, 2)
    traffic.run(2000)
    collapse(traffic, "class")
    traffic.run(1)
    limited = set(traffic.watchdog.limits)
    assert limited
    assert limited <= {r.request_id for r in traffic.running if r.priority == 0}
    learnt = {req_id for req_id, is_learnt in traffic.learns if is_learnt}
    assert learnt
    assert not learnt & limited


def test_whoever_is_released_has_the_past_forgotten_and_its_cache_filled():
    """By the first try, which four of the requests are enough for."""
    traffic = MadeUpTraffic(NUM_REQS, 4, reply=5000)
    traffic.run(2000)
    collapse(traffic, "all")
    traffic.run(4)
    limited = set(traffic.watchdog.limits)
    assert len(limited) > 8
    traffic.collapsed = lambda _: False
    traffic.run(20)
    assert limited <= traffic.recovered
    assert limited <= traffic.rebuilt


def test_what_ends_is_forgotten():
    traffic = MadeUpTraffic(NUM_REQS, 3)
    traffic.run(500)
    collapse(traffic, "all")
    traffic.run(20)
    for one in traffic.running:
        traffic.watchdog.forget(one.request_id)
    assert not traffic.watchdog.limits
    assert not traffic.watchdog._places
