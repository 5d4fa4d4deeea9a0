"""A vLLM engine inside this process, driven step by step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from .acceptance_errors import AcceptanceErrors, watch_acceptance
from .closed_loop import Delivery, run_closed_loop
from .held_depth import hold_depth
from .measurement import digest_outputs, measure
from .step_errors import StepErrors, watch_step_errors
from .telemetry import Telemetry
from .trace import Trace, record_trace


class VllmEngine:
    """Runs request lists on one engine."""

    def __init__(
        self,
        llm: dict[str, Any],
        eos_token_id: int,
        max_tokens: int,
        held_at_zero: str | None = None,
    ) -> None:
        """Start the engine.

        Args:
            llm: Arguments of `vllm.LLM`.
            eos_token_id: Ends a reply.
            max_tokens: Longest reply.
            held_at_zero: `cold` or `warm` for an engine that is kept at depth 0.
        """
        self._llm = LLM(**llm)
        self._engine = self._llm.llm_engine
        self._eos_token_id = eos_token_id
        self._max_tokens = max_tokens
        if held_at_zero is not None:
            hold_depth(self._scheduler, self._runner, held_at_zero)

    @property
    def _scheduler(self) -> Any:
        # The engine core lives in this process.
        core: Any = self._engine.engine_core
        return core.engine_core.scheduler

    @property
    def _runner(self) -> Any:
        core: Any = self._engine.engine_core
        return core.engine_core.model_executor.driver_worker.worker.model_runner

    def run(
        self,
        prompts: list[list[int]],
        concurrency: int,
        temperature: float,
        *,
        switch_at: int | None = None,
        max_tokens: int | None = None,
        trace: str | None = None,
        pause_every: int | None = None,
        on_switch: Callable[[], None],
        on_pause: Callable[[], None],
    ) -> dict[str, Any]:
        """Run a list of requests and measure the steady part.

        Args:
            prompts: Token ids of each request.
            concurrency: Requests in flight.
            temperature: Of all requests.
            switch_at: The request before whose admission `on_switch` is called.
            max_tokens: Longest reply, if not the usual one.
            trace: File to record every step into.
            pause_every: Finished requests between two pauses; None for no pauses.
            on_switch: Called when conditions are to change.
            on_pause: Called for a pause, and returns at its end.

        Returns:
            Plain values: `measurement.measure`, counters, digests of the outputs.
        """
        batch = _Batch(
            self._engine,
            prompts,
            SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens or self._max_tokens,
                stop_token_ids=[self._eos_token_id],
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )
        telemetry = Telemetry(self._scheduler)
        watchers: list[Trace | StepErrors | AcceptanceErrors] = []

        def on_mark(name: str) -> None:
            if name == "switch":
                on_switch()
                return
            telemetry.mark(name)
            for watcher in watchers:
                watcher.mark(name)

        def pause() -> None:
            began_s = time.perf_counter()
            with telemetry.paused():
                on_pause()
            clock = getattr(self._scheduler, "_clock", None)
            if clock is not None:
                # The planner must not take the pause for a cost of the step before.
                clock.skip(time.perf_counter() - began_s)

        gc.collect()
        with (
            watch_step_errors(self._scheduler) as step_errors,
            watch_acceptance(self._scheduler) as acceptance,
            record_trace(self._scheduler if trace else None) as recorder,
        ):
            watching = (step_errors, acceptance, recorder)
            watchers += [one for one in watching if one is not None]
            record = run_closed_loop(
                batch,
                len(prompts),
                concurrency,
                on_mark=on_mark,
                switch_at=switch_at,
                pause_every=pause_every,
                pause=pause,
            )
        if trace and recorder is not None:
            self._save(recorder, Path(trace))
        num_output_tokens, digests = digest_outputs(record)
        return (
            measure(record)
            | telemetry.result()
            | {
                "step_time_error": None
                if step_errors is None
                else step_errors.median(),
                "calibration_bins": None
                if acceptance is None
                else acceptance.bins().as_dict(),
                "num_requests": len(prompts),
                "num_output_tokens": num_output_tokens,
                "digests": digests,
            }
        )

    @staticmethod
    def _save(recorder: Trace, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorder.save(path)

    def shutdown(self) -> None:
        """Stop the engine."""
        self._engine.engine_core.shutdown()


class _Batch:
    """Requests by number, in the form the closed loop drives."""

    def __init__(
        self, engine: Any, prompts: list[list[int]], sampling: SamplingParams
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._sampling = sampling

    def add(self, index: int) -> None:
        prompt = {"prompt_token_ids": self._prompts[index]}
        self._engine.add_request(str(index), prompt, self._sampling.clone())

    def step(self) -> list[Delivery]:
        return [
            Delivery(
                int(output.request_id), output.outputs[0].token_ids, output.finished
            )
            for output in self._engine.step()
        ]
