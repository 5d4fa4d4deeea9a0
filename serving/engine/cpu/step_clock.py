"""Puts together what one engine step cost, from the scheduler's and worker's clocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from policies.types import StepTiming

if TYPE_CHECKING:
    from serving.engine.compat import SchedulerOutput
    from serving.engine.cpu.drafts import WorkerTimes


@dataclass(slots=True)
class _Step:
    start_s: float
    num_reqs: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_context_tokens: int
    num_drafts: int
    times: WorkerTimes | None = None


@dataclass(slots=True)
class StepClock:
    """Times steps from one `schedule` call to the next.

    Only steps that the next one follows at once are timed: between the last running
    request and the next arrival the engine sleeps, which is no cost of the step.
    """

    _step: _Step | None = None

    def start(
        self, start_s: float, output: SchedulerOutput, num_context_tokens: int
    ) -> None:
        """Note what the step that was just scheduled carries."""
        drafts = output.scheduled_spec_decode_tokens
        num_reqs = len(output.num_scheduled_tokens)
        num_tokens = output.total_num_scheduled_tokens
        # A decoding request has a token and its drafts, any other more than that.
        num_drafts = sum(map(len, drafts.values()))
        num_decode_tokens = num_reqs + num_drafts
        if num_tokens > num_decode_tokens:
            num_decode_tokens = sum(
                [
                    count
                    for req_id, count in output.num_scheduled_tokens.items()
                    if count == 1 + len(drafts.get(req_id, ()))
                ]
            )
        self._step = _Step(
            start_s=start_s,
            num_reqs=num_reqs,
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=num_tokens - num_decode_tokens,
            num_context_tokens=num_context_tokens,
            num_drafts=num_drafts,
        )

    def note_worker(self, times: WorkerTimes | None) -> None:
        """Add the worker's clock readings of the running step."""
        if self._step is not None:
            self._step.times = times

    def discard(self) -> None:
        """Drop the running step: the engine is about to sleep."""
        self._step = None

    def skip(self, paused_s: float) -> None:
        """Leave a pause of the whole engine out of the running step."""
        if self._step is not None:
            self._step.start_s += paused_s

    def finish(self, now_s: float) -> StepTiming | None:
        """Close the running step at the start of the next one.

        Returns:
            Its timing; None if there was none or the worker measured nothing.
        """
        step, self._step = self._step, None
        if step is None or step.times is None or step.num_reqs == 0:
            return None
        times = step.times
        worker_ms = (
            times.target_ms
            + times.sample_ms
            + times.draft_first_ms
            + times.draft_next_ms
            + times.backlog_ms
        )
        return StepTiming(
            num_reqs=step.num_reqs,
            num_decode_tokens=step.num_decode_tokens,
            num_prefill_tokens=step.num_prefill_tokens,
            num_context_tokens=step.num_context_tokens,
            depth=times.depth,
            target_ms=times.target_ms,
            draft_first_ms=times.draft_first_ms,
            draft_next_ms=times.draft_next_ms,
            host_ms=max(0.0, 1e3 * (now_s - step.start_s) - worker_ms),
            backlog_ms=times.backlog_ms,
            num_backlog=times.num_backlog,
            num_drafts=step.num_drafts,
            sample_ms=times.sample_ms,
        )
