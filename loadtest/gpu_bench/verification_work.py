"""Counts what an engine verifies, whoever decides it: ours, vLLM's own, or nobody."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class VerificationWork:
    """Looks on while steps are scheduled and sized; wraps two methods of an engine."""

    def __init__(self, scheduler: Any, manager: Any) -> None:
        """Begin to count.

        Args:
            scheduler: vLLM's or ours.
            manager: What sizes steps on the worker's side; None if nothing does, and
                every draft that is scheduled is verified.
        """
        self._totals = {"steps": 0.0, "offered": 0.0, "verified": 0.0, "sizing_s": 0.0}
        self._sizes_steps = manager is not None
        schedule = scheduler.schedule

        def counted_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if output.total_num_scheduled_tokens > 0:
                drafts = output.scheduled_spec_decode_tokens
                self._totals["steps"] += 1
                self._totals["offered"] += sum(map(len, drafts.values()))
            return output

        scheduler.schedule = counted_schedule
        if manager is None:
            return
        get_num_tokens = manager.get_num_tokens

        def counted_sizing(
            num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
        ) -> int:
            start_s = time.perf_counter()
            num_tokens: int = get_num_tokens(num_tokens_per_req, draft_tokens)
            self._totals["sizing_s"] += time.perf_counter() - start_s
            num_offered = sum(map(len, draft_tokens.values()))
            num_others = sum(num_tokens_per_req.values()) - num_offered
            self._totals["verified"] += num_tokens - num_others
            return num_tokens

        manager.get_num_tokens = counted_sizing

    def read(self) -> Mapping[str, float]:
        """Return the totals so far."""
        return dict(self._totals)

    def since(self, before: Mapping[str, float]) -> dict[str, float | None]:
        """Return what happened since `read`, per step.

        Returns:
            `sizing_us` is the host's time to size a step, None where nobody does.
        """
        now = self._totals
        steps = now["steps"] - before["steps"]
        if not steps:
            return {}
        verified = "verified" if self._sizes_steps else "offered"
        sizing_us = 1e6 * (now["sizing_s"] - before["sizing_s"]) / steps
        return {
            "offered_per_step": (now["offered"] - before["offered"]) / steps,
            "verified_per_step": (now[verified] - before[verified]) / steps,
            "sizing_us": sizing_us if self._sizes_steps else None,
        }
