"""One arm's engine inside this process: runs lists of requests and measures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from serving.offline import OfflineEngine

from .closed_loop import Delivery, run_closed_loop
from .counters import Counters
from .held_depth import HeldDepth
from .measurement import digest_outputs, measure
from .trace import save_trace
from .watch import Watch


class ArmEngine:
    """Runs request lists on one engine."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        eos_token_id: int,
        max_tokens: int,
        *,
        hold_at_zero: bool = False,
    ) -> None:
        """Start the engine.

        Args:
            arguments: As `serving.offline` takes them.
            eos_token_id: Ends a reply.
            max_tokens: Longest reply.
            hold_at_zero: Keep it at depth 0.
        """
        self._engine = OfflineEngine(arguments)
        self._eos_token_id = eos_token_id
        self._max_tokens = max_tokens
        self._watch: Watch | None = None
        if hold_at_zero:
            self._engine.wrap_planner(HeldDepth)
        self._engine.wrap_planner(self._start_watch)

    def _start_watch(self, planner: Any) -> Watch:
        self._watch = Watch(planner)
        return self._watch

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        concurrency: int,
        temperature: float,
        *,
        switch_at: int | None = None,
        max_tokens: int | None = None,
        trace: str | None = None,
        on_switch: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Run a list of requests and measure the steady part.

        Args:
            prompts: Token ids of each request.
            concurrency: Requests in flight.
            temperature: Of all requests.
            switch_at: The request before whose admission `on_switch` is called.
            max_tokens: Longest reply, if not the usual one.
            trace: File to write all steps to; nothing without a planner.
            on_switch: Called when conditions are to change.

        Returns:
            Plain values: `measurement.measure`, counters, digests of the outputs.
        """
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens or self._max_tokens,
            stop_token_ids=[self._eos_token_id],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        counters, watch = Counters(self._engine.snapshot), self._watch
        state: dict[str, Any] = {}

        def on_mark(name: str) -> None:
            if name == "switch":
                on_switch()
                return
            counters.mark(name)
            if watch is not None:
                watch.mark(name)
                if trace and name == "start":
                    state.update(watch.export_state())

        gc.collect()
        if watch is not None:
            watch.start_over()
        record = run_closed_loop(
            _Batch(self._engine, prompts, sampling),
            len(prompts),
            concurrency,
            on_mark=on_mark,
            switch_at=switch_at,
        )
        if trace and watch is not None:
            save_trace(watch, Path(trace), state)
        num_output_tokens, digests = digest_outputs(record)
        predicted = {} if watch is None else watch.acceptance_bins()
        return (
            measure(record)
            | counters.result()
            | {name: bins.as_dict() for name, bins in predicted.items()}
            | {
                "step_time_error": None if watch is None else watch.step_time_error(),
                "num_requests": len(prompts),
                "num_output_tokens": num_output_tokens,
                "digests": digests,
            }
        )

    def shutdown(self) -> None:
        """Stop the engine."""
        self._engine.shutdown()


class _Batch:
    """Requests by number, in the form the closed loop drives."""

    def __init__(
        self,
        engine: OfflineEngine,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._sampling = sampling

    def add(self, index: int) -> None:
        self._engine.add(str(index), self._prompts[index], self._sampling.clone())

    def step(self) -> list[Delivery]:
        return [
            Delivery(int(one.request_id), one.outputs[0].token_ids, one.finished)
            for one in self._engine.step()
        ]
