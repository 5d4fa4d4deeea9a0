"""The clock of engine steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


def test_a_pause_of_the_engine_is_no_cost_of_the_step_before() -> None:
    from serving.engine.drafts import WorkerTimes
    from serving.engine.step_clock import StepClock

    output: Any = SimpleNamespace(
        scheduled_spec_decode_tokens={},
        num_scheduled_tokens={"a": 1},
        total_num_scheduled_tokens=1,
    )
    clock = StepClock()
    clock.skip(9.0)  # Nothing runs.
    clock.start(100.0, output, num_context_tokens=50)
    clock.note_worker(
        WorkerTimes(target_ms=10.0, draft_first_ms=2.0, draft_next_ms=0.0, depth=1)
    )
    clock.skip(60.0)

    timing = clock.finish(100.015 + 60.0)

    assert timing is not None
    assert timing.host_ms == pytest.approx(3.0)
