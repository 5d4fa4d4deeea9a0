"""Step times come from the device's clock, late, and nobody waits for them."""

from types import SimpleNamespace

import pytest

from serving.engine.gpu.clock import MAX_UNREAD_STEPS, DeviceClock, StepLoads
from serving.engine.gpu.step_messages import DeviceTimes
from tests.gpu_adapter.stand_ins import StandInDevice


def run_step(clock, device, step_id):
    """Queue a step: 1 ms before, 5 ms target, 2 ms first pass, 3 ms others."""
    clock.begin(step_id)
    device.queue(1.0)
    clock.mark_forward_start()
    device.queue(5.0)
    clock.mark_target_end()
    device.queue(2.0)
    clock.mark_draft_first_end()
    device.queue(3.0)
    clock.mark_draft_end()


def test_times_are_read_once_the_device_has_passed_them_and_not_before():
    device = StandInDevice()
    clock = DeviceClock(device.make_event)
    run_step(clock, device, 1)
    run_step(clock, device, 2)
    assert clock.read_finished() == ()
    device.now_ms = 11.0
    assert clock.read_finished() == (DeviceTimes(1, 5.0, 2.0, 3.0, 0.0),)
    device.now_ms = 21.9
    assert clock.read_finished() == ()
    device.now_ms = 22.0
    assert clock.read_finished() == (DeviceTimes(2, 5.0, 2.0, 3.0, 1.0),)


def test_a_draft_in_one_pass_is_all_first_pass():
    device = StandInDevice()
    clock = DeviceClock(device.make_event)
    clock.begin(1)
    clock.mark_forward_start()
    device.queue(5.0)
    clock.mark_target_end()
    device.queue(2.0)
    clock.mark_draft_end()
    device.now_ms = device.queued_ms
    assert clock.read_finished() == (DeviceTimes(1, 5.0, 2.0, 0.0, 0.0),)


def test_marks_outside_of_a_step_are_ignored():
    device = StandInDevice()
    clock = DeviceClock(device.make_event)
    clock.mark_forward_start()
    clock.mark_target_end()
    clock.mark_draft_first_end()
    clock.mark_draft_end()
    # Begun and never run, as when the forward pass fails.
    clock.begin(1)
    clock.mark_draft_end()
    assert clock.read_finished() == ()


def test_a_device_that_never_answers_costs_no_memory():
    device = StandInDevice()
    clock = DeviceClock(device.make_event)
    for step_id in range(3 * MAX_UNREAD_STEPS):
        run_step(clock, device, step_id)
    assert len(clock._unread) == MAX_UNREAD_STEPS


def output(tokens, drafts):
    """Stand in for what the scheduler gives out."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens=drafts,
        total_num_scheduled_tokens=sum(tokens.values()),
        num_spec_tokens_to_schedule=2,
    )


TIMES = DeviceTimes(1, 5.0, 2.0, 3.0, 1.0)


def note(loads, step_id=1, *, after_idle=False):
    """Note a step of two requests with drafts, one without, and a prompt."""
    loads.note(
        step_id,
        output({"a": 4, "b": 3, "c": 1, "prompt": 20}, {"a": [-1] * 3, "b": [-1] * 2}),
        draft_budget=2,
        num_context_tokens=500,
        after_idle=after_idle,
    )


def test_a_steps_load_counts_what_was_verified_not_what_was_offered():
    loads = StepLoads()
    note(loads)
    timing = loads.match(TIMES)
    assert (timing.num_reqs, timing.num_decode_tokens) == (4, 3 + 2)
    assert (timing.num_prefill_tokens, timing.num_context_tokens) == (20, 500)
    assert (timing.depth, timing.total_ms) == (2, 11.0)
    assert loads.match(TIMES) is None


def test_the_gap_before_a_step_that_ended_an_idle_time_teaches_nothing():
    loads = StepLoads()
    note(loads, after_idle=True)
    assert loads.match(TIMES) is None


def test_loads_whose_times_never_come_are_forgotten():
    loads = StepLoads()
    for step_id in range(1, 3 * MAX_UNREAD_STEPS):
        note(loads, step_id)
    assert len(loads._loads) == MAX_UNREAD_STEPS
    assert loads.match(TIMES) is None


@pytest.mark.parametrize("gap_ms", [-0.5, 0.0])
def test_a_gap_is_never_negative(gap_ms):
    loads = StepLoads()
    note(loads)
    timing = loads.match(DeviceTimes(1, 5.0, 2.0, 3.0, gap_ms))
    assert timing.host_ms == 0.0
