"""Times steps on the device, and reads the times only when the device is done."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from policies.types import StepTiming
from serving.engine.compat import StepTimingCollector
from serving.engine.gpu.step_messages import DeviceTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.engine.compat import SchedulerOutput

MAX_UNREAD_STEPS = 64
"""Steps kept unread; more only pile up if the device never finishes any."""


class TimingEvent(Protocol):
    """The part of `torch.cuda.Event` that is used."""

    def record(self) -> None:
        """Mark this point of the current stream."""

    def query(self) -> bool:
        """Tell, without waiting, whether the device has passed the mark."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds between two passed marks."""


def _make_event() -> TimingEvent:
    event: TimingEvent = torch.cuda.Event(enable_timing=True)
    return event


@dataclass(slots=True)
class _Marks:
    step_id: int
    forward_start: TimingEvent | None = None
    target_end: TimingEvent | None = None
    draft_first_end: TimingEvent | None = None
    draft_end: TimingEvent | None = None


class DeviceClock:
    """Marks where a step's parts begin and end on the device.

    Every method queues an event or asks whether one has passed; none waits.
    """

    def __init__(self, make_event: Callable[[], TimingEvent] = _make_event) -> None:
        """Start without a step.

        Args:
            make_event: Where events come from; tests bring their own.
        """
        self._make_event = make_event
        self._step: _Marks | None = None
        self._unread: deque[_Marks] = deque(maxlen=MAX_UNREAD_STEPS)
        self._last_end: TimingEvent | None = None

    def begin(self, step_id: int) -> None:
        """Expect the marks of a step; marks outside of steps are ignored."""
        self._step = _Marks(step_id)

    def mark_forward_start(self) -> None:
        """The target's forward pass is about to start."""
        if self._step is not None:
            self._step.forward_start = self._mark()

    def mark_target_end(self) -> None:
        """Sampling is done, drafting is about to start."""
        if self._step is not None:
            self._step.target_end = self._mark()

    def mark_draft_first_end(self) -> None:
        """The drafter's first pass is done and others follow."""
        if self._step is not None:
            self._step.draft_first_end = self._mark()

    def mark_draft_end(self) -> None:
        """Drafting is done; closes the step."""
        step, self._step = self._step, None
        if step is None or step.forward_start is None or step.target_end is None:
            return
        step.draft_end = self._mark()
        if step.draft_first_end is None:
            step.draft_first_end = step.draft_end
        self._unread.append(step)

    def read_finished(self) -> tuple[DeviceTimes, ...]:
        """Return the times of steps the device has finished since the last call."""
        finished = []
        while self._unread:
            end = self._unread[0].draft_end
            if end is None or not end.query():
                break
            finished.append(self._read(self._unread.popleft()))
        return tuple(finished)

    def _read(self, step: _Marks) -> DeviceTimes:
        start, target, first, end = (
            step.forward_start,
            step.target_end,
            step.draft_first_end,
            step.draft_end,
        )
        assert start is not None
        assert target is not None
        assert first is not None
        assert end is not None
        before, self._last_end = self._last_end, end
        return DeviceTimes(
            step_id=step.step_id,
            target_ms=start.elapsed_time(target),
            draft_first_ms=target.elapsed_time(first),
            draft_next_ms=first.elapsed_time(end),
            gap_ms=0.0 if before is None else before.elapsed_time(start),
        )

    def _mark(self) -> TimingEvent:
        event = self._make_event()
        event.record()
        return event


class LiveStepTiming(StepTimingCollector):
    """vLLM's start-up timing, which also tells a clock where live steps start.

    vLLM calls `forward_start` in every step, right before the forward pass, and times
    only its dummy steps at start-up.
    """

    def __init__(self, clock: DeviceClock) -> None:
        """Tell this clock."""
        super().__init__()
        self._clock = clock

    def forward_start(self) -> None:
        """Mark the start for both."""
        super().forward_start()
        self._clock.mark_forward_start()


@dataclass(frozen=True, slots=True)
class _Load:
    num_reqs: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_context_tokens: int
    depth: int
    after_idle: bool


class StepLoads:
    """Remembers what steps carried until their times come in, some steps later."""

    def __init__(self) -> None:
        """Start empty."""
        self._loads: dict[int, _Load] = {}

    def note(
        self,
        step_id: int,
        output: SchedulerOutput,
        *,
        draft_budget: int,
        num_context_tokens: int,
        after_idle: bool,
    ) -> None:
        """Note a step that was just scheduled.

        Args:
            step_id: Its number.
            output: What was scheduled, drafts that will not be verified included.
            draft_budget: How many of them will be.
            num_context_tokens: KV positions it attends to.
            after_idle: The engine had nothing to do before, so that the device's gap
                was no part of the step.
        """
        if output.scheduled_encoder_inputs:
            # Encoders run in the gap before the forward pass, which is the host's.
            return
        drafts = output.scheduled_spec_decode_tokens
        num_decodes = sum(
            num_tokens == 1 + len(drafts.get(req_id, ()))
            for req_id, num_tokens in output.num_scheduled_tokens.items()
        )
        num_drafts = sum(map(len, drafts.values()))
        num_tokens = output.total_num_scheduled_tokens - num_drafts
        self._loads[step_id] = _Load(
            num_reqs=len(output.num_scheduled_tokens),
            num_decode_tokens=num_decodes + draft_budget,
            num_prefill_tokens=num_tokens - num_decodes,
            num_context_tokens=num_context_tokens,
            depth=output.num_spec_tokens_to_schedule,
            after_idle=after_idle,
        )
        self._loads.pop(step_id - MAX_UNREAD_STEPS, None)

    def match(self, times: DeviceTimes) -> StepTiming | None:
        """Put a step's load and times together.

        Returns:
            None for a step that is not known, or whose gap says nothing about it.
        """
        load = self._loads.pop(times.step_id, None)
        if load is None or load.after_idle:
            return None
        return StepTiming(
            num_reqs=load.num_reqs,
            num_decode_tokens=load.num_decode_tokens,
            num_prefill_tokens=load.num_prefill_tokens,
            num_context_tokens=load.num_context_tokens,
            depth=load.depth,
            target_ms=times.target_ms,
            draft_first_ms=times.draft_first_ms,
            draft_next_ms=times.draft_next_ms,
            host_ms=max(0.0, times.gap_ms),
        )
