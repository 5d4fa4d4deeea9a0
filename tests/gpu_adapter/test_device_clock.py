"""Step times come from the device's clock, late, and nobody waits for them."""

from types import SimpleNamespace

import pytest

from serving.engine.gpu.clock import MAX_UNREAD_STEPS, DeviceClock, StepLoads
from serving.engine.gpu.step_messages import DeviceTimes
from tests.gpu_adapter.stand_in_worker import StandInDevice


@pytest.fixture
def device():
    return StandInDevice()


@pytest.fixture
def clock(device):
    return DeviceClock(device.make_event)


def run_step(clock, device, step_id, *, in_one_pass=False):
    """Queue a step: 1 ms before, 5 ms target, 2 ms first pass, 3 ms others."""
    clock.begin(step_id)
    device.queue(1.0)
    clock.mark_forward_start()
    device.queue(5.0)
    clock.mark_target_end()
    device.queue(2.0)
    if not in_one_pass:
        clock.mark_draft_first_end()
        device.queue(3.0)
    clock.mark_draft_end()


def test_times_are_read_once_the_device_has_passed_them_and_not_before(clock, device):
    # Marks outside of a step are ignored, and one that was begun and never run.
    clock.mark_forward_start()
    clock.mark_target_end()
    clock.begin(0)
    clock.mark_draft_end()
    for step_id in (1, 2):
        run_step(clock, device, step_id)
    run_step(clock, device, 3, in_one_pass=True)
    assert clock.read_finished() == ()
    device.now_ms = 11.0
    assert clock.read_finished() == (DeviceTimes(1, 5.0, 2.0, 3.0, 0.0),)
    device.now_ms = 21.9
    assert clock.read_finished() == ()
    device.now_ms = 30.0
    second, third = (2, 5.0, 2.0, 3.0, 1.0), (3, 5.0, 2.0, 0.0, 1.0)
    assert clock.read_finished() == (DeviceTimes(*second), DeviceTimes(*third))


def test_a_device_that_never_answers_costs_no_memory(clock, device):
    loads = StepLoads()
    for step_id in range(3 * MAX_UNREAD_STEPS):
        run_step(clock, device, step_id)
        note(loads, step_id)
    assert len(clock._unread) == len(loads._loads) == MAX_UNREAD_STEPS
    assert loads.match(TIMES) is None


TIMES = DeviceTimes(1, 5.0, 2.0, 3.0, 1.0)


def note(loads, step_id=1, *, after_idle=False, encoder_inputs=()):
    """Note a step of two requests with drafts, one without, and a prompt."""
    num_tokens = {"a": 4, "b": 3, "c": 1, "prompt": 20}
    output = SimpleNamespace(
        num_scheduled_tokens=num_tokens,
        scheduled_spec_decode_tokens={"a": [-1] * 3, "b": [-1] * 2},
        total_num_scheduled_tokens=sum(num_tokens.values()),
        num_spec_tokens_to_schedule=2,
        scheduled_encoder_inputs={name: [0] for name in encoder_inputs},
    )
    options = {"num_context_tokens": 500, "after_idle": after_idle}
    loads.note(step_id, output, draft_budget=2, **options)


def test_a_steps_load_counts_what_was_verified_not_what_was_offered():
    loads = StepLoads()
    note(loads)
    timing = loads.match(TIMES)
    assert (timing.num_reqs, timing.num_decode_tokens) == (4, 3 + 2)
    assert (timing.num_prefill_tokens, timing.num_context_tokens) == (20, 500)
    assert (timing.depth, timing.total_ms) == (2, 11.0)
    assert loads.match(TIMES) is None
    # The gap before a step that ended an idle time teaches nothing.
    note(loads, after_idle=True)
    assert loads.match(TIMES) is None
    # Steps overlap, and no gap is negative.
    note(loads)
    assert loads.match(DeviceTimes(1, 5.0, 2.0, 3.0, -0.5)).host_ms == 0.0


def test_a_step_that_encodes_images_tells_nothing_of_the_host():
    """Encoders run in the gap before the forward pass."""
    loads = StepLoads()
    note(loads, encoder_inputs=["prompt"])
    assert loads.match(TIMES) is None
    note(loads)
    assert loads.match(TIMES) is not None
