"""An arm's process on a GPU: an engine whose verification is counted."""

from __future__ import annotations

import sys
from typing import Any

from loadtest.engine_bench.engine import VllmEngine
from loadtest.engine_bench.worker import main

from .draft_times import DraftTimes
from .verification_work import VerificationWork


class GpuEngine(VllmEngine):
    """Runs request lists on one engine and tells what it verified."""

    def __init__(self, llm: dict[str, Any], eos_token_id: int, max_tokens: int) -> None:
        """Start the engine; arguments as upstream's."""
        super().__init__(llm, eos_token_id, max_tokens)
        core: Any = self._engine.engine_core
        runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        manager = getattr(runner, "adaptive_verification", None)
        self._work = VerificationWork(self._scheduler, manager)
        self._draft_times = DraftTimes(getattr(runner, "speculator", None))
        self._kept: dict[int, list[int]] | None = None
        self._keep_tokens()

    def _keep_tokens(self) -> None:
        """Look on at what the engine puts out, for runs that ask for the tokens."""
        step = self._engine.step

        def kept_step() -> Any:
            outputs = step()
            if self._kept is not None:
                for output in outputs:
                    tokens = self._kept.setdefault(int(output.request_id), [])
                    tokens.extend(output.outputs[0].token_ids)
            return outputs

        self._engine.step = kept_step

    def run(
        self, *args: Any, keeps_tokens: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Run requests; the whole run is counted, not only its steady part.

        Args:
            args: As upstream's.
            keeps_tokens: Whether the replies' token ids come with the result.
            kwargs: As upstream's.
        """
        before = self._work.read()
        self._draft_times.take_mean_ms()
        self._kept = {} if keeps_tokens else None
        result = super().run(*args, **kwargs) | self._work.since(before)
        result["draft_ms"] = self._draft_times.take_mean_ms()
        # Every step's end and tokens are of no use here and fill the file.
        result.pop("after_switch", None)
        if self._kept is not None:
            result["tokens"] = [self._kept[index] for index in sorted(self._kept)]
            self._kept = None
        counters = result["counters"] or {}
        selector_us = result.get("sizing_us")
        if counters.get("num_selections"):
            spent_s = counters["selection_seconds_total"]
            selector_us = 1e6 * spent_s / counters["num_selections"]
        return result | {"selector_us": selector_us}


if __name__ == "__main__":
    main(sys.argv[1:], GpuEngine)
