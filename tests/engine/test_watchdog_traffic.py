"""The watchdog under made-up traffic: whom it spares, and when it is over."""

from types import SimpleNamespace

import numpy as np
import pytest

from serving.engine.shared.counters import SpeculationCounters
from serving.engine.shared.request_classes import RequestClasses
from serving.engine.shared.watchdog import Drafts, SpeculationWatchdog

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

NUM_REQS, DEPTH = 16, 4

CLASSES = {"classes": {"interactive": {"priority": 0}, "batch": {"priority": 1}}}

CAUSES = {
    "all": lambda _: True,
    "context": lambda request: request.num_tokens >= 512,
    "class": lambda request: request.priority == 0,
}

TOLD = {"context": "tokens on, ", "class": "class interactive"}


class Traffic:
    """A batch that is always full.

    Drafts have confidences as drafters have them, high and low; requests are harder or
    easier than the confidences say. Each is accepted as that is likely, unless
    `collapsed` says that the drafter is broken for a request: then one in fifty is.
    Requests whose ids are `undrafted` never have drafts.

    Args:
        seed: Of all that is drawn.
        reply: Tokens of a reply, on average.
        reports_confidence: As draft models do.
    """

    def __init__(self, seed, *, reply=300, reports_confidence=True):
        self.rng = np.random.default_rng(seed)
        self.counters = SpeculationCounters("made up", "made up", DEPTH)
        classes = RequestClasses.from_section(CLASSES)
        self.watchdog = SpeculationWatchdog(classes, self.counters)
        self.step = self.num_requests = 0
        self.hardness = 0.0
        self.collapsed = lambda request: False
        self.undrafted = set()
        self.recovered, self.rebuilt = set(), set()
        self._reply, self._reports_confidence = reply, reports_confidence
        self.running = [self._arrive() for _ in range(NUM_REQS)]

    @property
    def num_drafting(self):
        """Requests that had drafts verified in the latest step."""
        return sum(one.num_verified > 0 for one in self.running)

    def opt_out_oldest(self, num_reqs):
        """Let so many never have drafts, nor end."""
        for one in self.running[:num_reqs]:
            one.num_left, one.spec_token_ids = 10**9, []
            self.undrafted.add(one.request_id)

    def can_draft(self, request, _position):
        """Tell whether drafts of a request can be of use."""
        return request.request_id not in self.undrafted

    def _arrive(self):
        self.num_requests += 1
        return SimpleNamespace(
            request_id=f"r{self.num_requests}",
            priority=int(self.rng.integers(2)),
            sampling_params=None,
            num_tokens=int(self.rng.integers(10, 900)),
            num_left=1 + self.rng.geometric(1 / self._reply),
            # What it is harder or easier, in log-odds.
            effect=self.rng.normal(0.0, 0.5),
            topic=self.rng.normal(1.0, 1.0),
            spec_token_ids=[],
            num_verified=0,
            num_new=0,
        )

    def run(self, num_steps):
        """Take some steps."""
        for _ in range(num_steps):
            self._take_step()

    def _take_step(self):
        self.step += 1
        watchdog, running, rng = self.watchdog, self.running, self.rng
        self.recovered |= set(watchdog.take_recovered())
        self.rebuilt |= set(watchdog.take_rebuilds())
        watchdog.begin_step(running, self.can_draft)
        log_odds = np.array([one.topic for one in running])[:, None] - self.hardness
        log_odds = log_odds + rng.normal(0.0, 1.2, (len(running), DEPTH))
        confidence = 1 / (1 + np.exp(-log_odds))
        effect = np.array([one.effect for one in running])[:, None]
        acceptance = 1 / (1 + np.exp(0.3 - 0.8 * log_odds - effect))
        acceptance[[self.collapsed(one) for one in running]] = 0.02
        is_accepted = rng.random(acceptance.shape) < acceptance
        for row, one in enumerate(running):
            one.num_verified = len(one.spec_token_ids)
            own = is_accepted[row, : one.num_verified]
            one.num_new = 1 + int(own.cumprod().sum())
        row_of = {one.request_id: row for row, one in enumerate(running)}
        drafting = [one for one in running if one.num_verified]
        if drafting:

            def locate(some):
                if self._reports_confidence:
                    return Drafts(confidence, [row_of[req_id] for req_id in some])
                return Drafts.without_confidence(len(some), is_due=False)

            requests = {one.request_id: one for one in running}
            req_ids = [one.request_id for one in drafting]
            verified = [one.num_verified for one in drafting]
            accepted = [one.num_new - 1 for one in drafting]
            watchdog.observe(requests, req_ids, verified, accepted, locate)
        for row, one in enumerate(running):
            one.num_tokens += one.num_new
            one.num_left -= one.num_new
            if one.num_left <= 0:
                watchdog.forget(one.request_id)
                running[row] = self._arrive()
        depth = DEPTH
        if watchdog.is_active:
            depth = watchdog.limit_depth(DEPTH, running)
        for one in running:
            has_drafts = one.request_id not in self.undrafted
            one.spec_token_ids = [0] * depth if has_drafts else []


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
    traffic = Traffic(1, reports_confidence=request.param)
    traffic.run(2000)
    assert not traffic.counters.num_quarantines
    return traffic


@pytest.mark.parametrize("reason", CAUSES)
def test_others_draft_on_and_all_do_within_fifty_steps_of_the_end(
    traffic, reason, caplog
):
    assert collapse(traffic, reason) <= 45
    traffic.run(40)
    limited = traffic.watchdog.limits
    spared = [r.request_id for r in traffic.running if not traffic.collapsed(r)]
    assert limited.keys().isdisjoint(spared)
    if reason == "all":
        assert len(limited) >= NUM_REQS - 2
    else:
        assert reason in traffic.counters.num_quarantines
        assert any(TOLD[reason] in line for line in caplog.messages)
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


def test_whoever_is_released_has_the_past_forgotten_and_its_cache_filled():
    """By the first try, which four of the requests are enough for."""
    traffic = Traffic(4, reply=5000)
    traffic.run(2000)
    collapse(traffic, "all")
    traffic.run(4)
    limited = set(traffic.watchdog.limits)
    assert len(limited) > 8
    traffic.collapsed = lambda _: False
    traffic.run(20)
    assert limited <= traffic.recovered
    assert limited <= traffic.rebuilt


def count_steps_with_probes(traffic, num_steps):
    num_tried = 0
    for _ in range(num_steps):
        traffic.run(1)
        num_tried += bool(traffic.watchdog.probes)
    return num_tried


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "found_out"])
def test_only_who_can_have_drafts_is_tried(traffic, is_known):
    """The oldest would come first, and a round of them alone would show nothing.

    That a look-up finds nothing for a request is known only once it has found nothing.
    """
    traffic.opt_out_oldest(4)
    if not is_known:
        traffic.can_draft = lambda *_: True
    collapse(traffic, "all")
    assert 0 < count_steps_with_probes(traffic, 300) < 0.15 * 300
    traffic.collapsed = lambda _: False
    traffic.run(50)
    assert not traffic.watchdog.is_active


def test_nothing_is_drafted_for_tries_while_nobody_can_be_tried(traffic):
    collapse(traffic, "all")
    traffic.opt_out_oldest(NUM_REQS)
    depths = []
    for _ in range(100):
        traffic.run(1)
        # A policy that would rest may.
        depths.append(traffic.watchdog.limit_depth(0, traffic.running))
    assert not any(depths)
    # Somebody comes: the wait is over long since, and the drafter's KV filled anew.
    traffic.undrafted.clear()
    traffic.collapsed = lambda _: False
    traffic.rebuilt.clear()
    traffic.run(10)
    assert not traffic.watchdog.is_active
    assert traffic.rebuilt


def test_what_ends_is_forgotten():
    traffic = Traffic(3)
    traffic.run(500)
    collapse(traffic, "all")
    traffic.run(20)
    for one in traffic.running:
        traffic.watchdog.forget(one.request_id)
    assert not traffic.watchdog.limits
    assert not traffic.watchdog._requests._places
