"""An arm's process on a GPU: an engine whose verification is counted."""

from __future__ import annotations

import sys
from typing import Any

from loadtest.engine_bench.engine import VllmEngine
from loadtest.engine_bench.worker import main

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

    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run requests; the whole run is counted, not only its steady part."""
        before = self._work.read()
        result = super().run(*args, **kwargs) | self._work.since(before)
        counters = result["counters"] or {}
        selector_us = result.get("sizing_us")
        if counters.get("num_selections"):
            spent_s = counters["selection_seconds_total"]
            selector_us = 1e6 * spent_s / counters["num_selections"]
        return result | {"selector_us": selector_us}


if __name__ == "__main__":
    main(sys.argv[1:], GpuEngine)
