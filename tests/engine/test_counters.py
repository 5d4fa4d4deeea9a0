"""What is counted of speculation, and what its steps took."""

from types import SimpleNamespace

import numpy as np
import pytest

from policies.types import DraftSelection
from serving.engine.shared.counters import SpeculationCounters


@pytest.mark.parametrize(
    ("selection", "counted"),
    [
        ({}, {"budget": 7}),
        ({"num_cut_by_latency": 2}, {"latency": 2, "budget": 5}),
        ({"num_cut_by_latency": 9}, {"latency": 7}),
        ({"is_probe": True}, {"probe": 7}),
    ],
)
def test_cut_tokens_are_counted_by_what_cut_them(selection, counted):
    counters = SpeculationCounters("goodput", "draft_model", 4)
    admitted = np.array([4, 1, 0])
    counters.count_left_out(DraftSelection(admitted, draft_budget=5, **selection), 7)
    assert counters.num_cut_tokens == counted


@pytest.mark.vllm
def test_a_pause_of_the_engine_is_no_cost_of_the_step_before():
    from serving.engine.cpu.drafts import WorkerTimes
    from serving.engine.cpu.step_clock import StepClock

    output = SimpleNamespace(
        scheduled_spec_decode_tokens={},
        num_scheduled_tokens={"a": 1},
        total_num_scheduled_tokens=1,
    )
    clock = StepClock()
    clock.skip(9.0)  # Nothing runs.
    clock.start(100.0, output, num_context_tokens=50)
    clock.note_worker(WorkerTimes(9.0, 1.0, 2.0, 0.0, depth=1))
    clock.skip(60.0)
    assert clock.finish(100.015 + 60.0).host_ms == pytest.approx(3.0)
