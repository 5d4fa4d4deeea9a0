"""What an audit finds out from the real scheduler, whose worker's costs are known."""

import pytest

pytestmark = pytest.mark.vllm

NUM_REQS, DEPTH = 8, 4
NUM_WAVES = 24
"""Of requests that come and go together: each takes about 85 steps."""


def run_waves(tiny_pair, num_waves=NUM_WAVES, confidence=None, **section):
    """Return the scheduler after waves of requests; the first is drafted for so."""
    from tests.engine import stand_in_worker

    section = {"num_reqs": NUM_REQS, "depth": DEPTH, "policy": "fixed"} | section
    scheduler = stand_in_worker.make_cpu_scheduler(tiny_pair, **section)
    worker = stand_in_worker.StandInWorker()
    if confidence is not None:
        execute = worker.execute

        def execute_unsure(output):
            sampled, drafts = execute(output)
            drafts.confidence[:1] = confidence
            return sampled, drafts

        worker.execute = execute_unsure
    for number in range(num_waves):
        wave = {"prefix": f"{number}-", "prompt_len": 10, "max_tokens": 240}
        stand_in_worker.add_requests(scheduler, NUM_REQS, **wave)
        # As engines do: the last step of a wave is empty.
        while scheduler.has_requests():
            worker.step(scheduler)
    return scheduler


@pytest.mark.parametrize("confidence", [None, float("nan")])
def test_the_gain_is_what_the_workers_costs_make_it(
    tiny_pair, no_host_time, confidence
):
    """Though nothing be learnt of drafts, for one of them cannot be judged."""
    scheduler = run_waves(tiny_pair, audit=0.2, confidence=confidence)
    assert (not scheduler.counters.num_fallbacks) == (confidence is None)
    report = scheduler.snapshot()["planner"]
    # Seven of ten drafts are accepted. A step takes 20 ms and 0.1 per token, one to
    # sample, and one for each pass of the drafter.
    tokens = sum(0.7**position for position in range(DEPTH + 1))
    gain = tokens * (21.0 + 0.1 * NUM_REQS) / (21.0 + 0.1 * NUM_REQS * 5 + DEPTH)
    assert report["num_audited_none"] > 40
    # A little less: few run at the end of a wave, and the last drafts are cut short.
    assert 0.97 * gain < report["speculation_gain_none"] < gain
    seen = scheduler.watch_board(0, with_ids=False)
    ratio, lower, upper = seen["gain"]
    assert lower < ratio == report["speculation_gain_none"] < upper
    assert not seen["held"]


def test_nothing_is_audited_that_nobody_asked_for(tiny_pair):
    report = run_waves(tiny_pair, num_waves=1).snapshot()["planner"]
    assert "audited_step_share" not in report
