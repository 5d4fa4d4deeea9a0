"""What planning a step takes, counted in calls, which no busy machine changes."""

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest

import policies
import serving

pytestmark = pytest.mark.vllm

NUM_REQS, DEPTH = 64, 8
NUM_FIRST_STEPS, NUM_STEPS = 8, 40

OURS = tuple(f"{Path(package.__file__).parent}/" for package in (policies, serving))


def find_compiled():
    """Return the code of all that is compiled; its calls are told apart by it."""
    dispatchers = {
        value
        for name, module in list(sys.modules.items())
        if name.startswith("policies.")
        for value in vars(module).values()
        if isinstance(value, numba.core.dispatcher.Dispatcher)
    }
    return {dispatcher.py_func.__code__ for dispatcher in dispatchers}


@contextmanager
def count_calls(counts):
    """Count calls of compiled code, of our functions, and from these of built-ins."""
    compiled = find_compiled()

    def note(frame, event, _arg):
        if event not in {"call", "c_call"}:
            return
        if not frame.f_code.co_filename.startswith(OURS):
            return
        if event == "c_call":
            counts["built-in"] += 1
        elif frame.f_code in compiled:
            counts["compiled"] += 1
        else:
            counts["function"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.fixture(scope="module")
def calls_per_step(tiny_pair):
    """Run the real scheduler at 64 requests that all draft; nobody comes or goes."""
    from serving.engine.cpu import scheduler as module
    from tests.engine import stand_in_worker

    sizes = {"num_reqs": NUM_REQS, "depth": DEPTH, "max_tokens": 4096}
    scheduler = stand_in_worker.make_cpu_scheduler(tiny_pair, policy="goodput", **sizes)
    worker, total = stand_in_worker.StandInWorker(), Counter()
    # What is learnt from a step's time decides what the next one asks of the curves.
    clock = SimpleNamespace(perf_counter=lambda: worker.now_s)
    lengths = {"prompt_len": 10, "max_tokens": (DEPTH + 1) * NUM_STEPS}
    stand_in_worker.add_requests(scheduler, NUM_REQS, **lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", clock)
        for step in range(NUM_STEPS):
            if step == NUM_FIRST_STEPS:
                total.clear()
            with count_calls(total):
                output = scheduler.schedule()
            sampled, drafts = worker.execute(output)
            with count_calls(total):
                scheduler.update_from_output(output, sampled)
                scheduler.update_draft_token_ids(drafts)
    counters = scheduler.counters
    assert not counters.num_fallbacks
    assert counters.num_verified_tokens > NUM_REQS * NUM_STEPS
    assert len(scheduler.running) == NUM_REQS
    num_counted = NUM_STEPS - NUM_FIRST_STEPS
    return {kind: count / num_counted for kind, count in total.items()}


@pytest.mark.parametrize(
    ("kind", "most"),
    # Per step. A call of compiled code takes 2 to 10 us between two forward passes;
    # functions and built-ins are a few for each request, and some for all.
    [("compiled", 27), ("function", 300), ("built-in", 1600)],
)
def test_a_step_of_64_requests_is_planned_in_so_many_calls(calls_per_step, kind, most):
    assert 0.5 * most < calls_per_step[kind] <= most
