"""Hours of made-up outcomes: no false alarm, and few steps to a true one."""

import numpy as np
import pytest

from policies.estimators.acceptance_watch import AcceptanceWatch, bucket_of

pytestmark = pytest.mark.faults

DEPTH = 4

STEPS_OF_AN_HOUR = 90_000
"""At 25 a second."""


def draw_outcomes(num_reqs, num_steps, *, seed, spread=0.6, reply=150):
    """Draw what becomes of drafts, as `AcceptanceWatch.observe` takes it.

    Requests last for 150 steps on average and are of two classes, one of which is
    harder. Confidences are right but for what a request is harder or easier, by a
    standard deviation of `spread` in log-odds, and for a drift that goes up and down
    twice.
    """
    rng = np.random.default_rng(seed)
    shape = num_steps, num_reqs
    begins = rng.random(shape) < 1.0 / reply
    begins[0] = True
    number = begins.cumsum(axis=0) - 1 + np.arange(num_reqs) * num_steps
    _, slot = np.unique(number, return_inverse=True)
    slot = slot.reshape(shape)
    num_requests = slot.max() + 1
    class_index = rng.integers(0, 2, num_requests)[slot]
    own = rng.normal(0.0, spread, num_requests)[slot]
    topic = rng.normal(1.0, 1.0, num_requests)[slot] - 0.7 * class_index
    drift = 0.5 * np.sin(np.linspace(0.0, 4.0 * np.pi, num_steps))[:, None]
    log_odds = topic[..., None] + rng.normal(0.0, 1.2, (*shape, DEPTH))
    confidence = 1.0 / (1.0 + np.exp(-log_odds))
    harder = (own + drift)[..., None]
    acceptance = 1.0 / (1.0 + np.exp(0.3 - 0.8 * log_odds - harder))
    is_accepted = rng.random(acceptance.shape) < acceptance
    num_accepted = is_accepted.cumprod(axis=2).sum(axis=2)
    gained = (1 + num_accepted).cumsum(axis=0)
    start = np.maximum.accumulate(np.where(begins, gained, 0), axis=0)
    context = rng.integers(10, 900, num_requests)[slot] + gained - start
    rows = np.arange(num_steps * num_reqs).reshape(shape)
    verified = np.full(shape, DEPTH)
    outcomes = (rows, slot, class_index, context, verified, num_accepted)
    flat = np.array([one.ravel() for one in outcomes], dtype=np.int64)
    return confidence.reshape(-1, DEPTH), flat


def watch_for(num_slots):
    """Return a watch with room for so many requests."""
    watch = AcceptanceWatch()
    watch.reset_request(num_slots - 1)
    return watch


@pytest.mark.parametrize("num_reqs", [1, 4, 16])
@pytest.mark.parametrize("reports_confidence", [True, False])
def test_an_hour_of_mixed_load_raises_no_alarm(num_reqs, reports_confidence):
    confidence, outcomes = draw_outcomes(num_reqs, STEPS_OF_AN_HOUR, seed=num_reqs)
    watch = watch_for(int(outcomes[1].max()) + 1)
    if not reports_confidence:
        confidence = np.empty((0, 0))
    assert watch.observe(confidence, outcomes, 1) is None
    assert watch.suspicion.max() < 21.0


def find_collapse(num_reqs, seed):
    """Let one draft in fifty be accepted after a while; return when and what is told.

    Of requests that are all well known.
    """
    confidence, outcomes = draw_outcomes(num_reqs, 2000, seed=seed, reply=1e9)
    later = 1900 * num_reqs
    num_left = outcomes.shape[1] - later
    outcomes[5, later:] = np.random.default_rng(seed).random(num_left) < 0.02
    watch = watch_for(num_reqs)
    known = np.ascontiguousarray(outcomes[:, :later])
    assert watch.observe(confidence, known, 0) is None
    for step in range(1, 101):
        begin = later + (step - 1) * num_reqs
        own = np.ascontiguousarray(outcomes[:, begin : begin + num_reqs])
        alarm = watch.observe(confidence, own, step)
        if alarm is not None:
            return step, alarm
    return 101, None


@pytest.mark.parametrize(("num_reqs", "usual"), [(1, 45), (4, 12), (16, 3)])
def test_a_collapse_is_found_out_within_so_many_steps(num_reqs, usual):
    """A single request may be one that was accepted little before."""
    found = [find_collapse(num_reqs, seed) for seed in range(20)]
    assert np.median([step for step, _ in found]) <= usual
    for _, alarm in found:
        if alarm is not None:
            assert alarm.cell.position == 0
            assert alarm.num_accepted < alarm.num_expected / 3
            assert bucket_of(alarm.from_context) == alarm.cell.bucket
    assert num_reqs == 1 or all(alarm for _, alarm in found)


def test_what_changes_slowly_becomes_the_usual():
    """Acceptance falls to a tenth over a hundred thousand drafts."""
    confidence, outcomes = draw_outcomes(8, 20_000, seed=2, spread=0.0, reply=1e9)
    num_rows = outcomes.shape[1]
    rng = np.random.default_rng(0)
    is_spoilt = rng.random(num_rows) < np.linspace(0.0, 0.9, num_rows)
    outcomes[5, is_spoilt] = 0
    assert watch_for(8).observe(confidence, outcomes, 0) is None


def test_a_hard_request_alone_is_no_alarm_and_several_at_once_are():
    confidence, outcomes = draw_outcomes(4, 3000, seed=3)
    num_known = int(outcomes[1].max()) + 1
    hopeless = np.ascontiguousarray(outcomes[:, -400:])
    hopeless[5] = 0

    def see(num_requests):
        watch = watch_for(num_known + num_requests)
        assert watch.observe(confidence, outcomes, 0) is None
        hopeless[1] = num_known + np.arange(400) % num_requests
        return watch.observe(confidence, hopeless[:, :100].copy(), 1)

    assert see(1) is None
    assert see(8) is not None


def test_what_is_no_confidence_teaches_nothing_and_disturbs_nobody():
    confidence, outcomes = draw_outcomes(4, 500, seed=5)
    watch, spoilt = watch_for(int(outcomes[1].max()) + 1), confidence.copy()
    spoilt[::7, 0] = np.nan
    spoilt[::11, 1] = 1.5
    watch.observe(spoilt, outcomes, 0)
    assert np.isfinite(watch.usual).all()
    assert 0 < watch.usual[1].sum() < (outcomes[4] * 4).sum()
