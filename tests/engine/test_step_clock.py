"""The clock of engine steps."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm


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
    clock.note_worker(
        WorkerTimes(
            target_ms=9.0,
            sample_ms=1.0,
            draft_first_ms=2.0,
            draft_next_ms=0.0,
            depth=1,
        )
    )
    clock.skip(60.0)

    timing = clock.finish(100.015 + 60.0)

    assert timing is not None
    assert timing.host_ms == pytest.approx(3.0)


def test_a_drafter_without_a_clock_is_timed_from_outside():
    from serving.engine.cpu.worker import TetrisCPUWorker

    worker = object.__new__(TetrisCPUWorker)
    worker._step_start_s = 5.0
    drafts = SimpleNamespace(draft_token_ids=[[7, 8], [], [9]])
    worker.model_runner = SimpleNamespace(
        sample_start_s=5.008, draft_span_s=(5.010, 5.012)
    )

    times = worker._time_drafting(drafts)

    assert times is not None
    assert times.depth == 2
    assert times.target_ms == pytest.approx(8.0)
    assert times.sample_ms == pytest.approx(2.0)
    assert times.draft_first_ms == pytest.approx(2.0)
    assert times.draft_next_ms == 0.0

    # In a step without drafting, what is known is of an earlier one.
    worker._step_start_s = 6.0
    assert worker._time_drafting(drafts) is None
