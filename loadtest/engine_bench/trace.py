"""Records what a planner was asked, what it answered and what came of it."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

STEP_FIELDS = (
    "num_reqs",
    "num_decode_tokens",
    "num_prefill_tokens",
    "num_context_tokens",
    "target_ms",
    "draft_first_ms",
    "draft_next_ms",
    "host_ms",
    "backlog_ms",
)
"""Taken from the timing of a step; NaN where it was not timed."""

DRAFT_FIELDS = ("step", "req", "num_offered", "num_admitted", "num_verified")


class Trace:
    """Stands between scheduler and planner, passes everything on, and takes notes.

    One record per engine step and one per request and step with drafts, saved as
    arrays:

        step_*    `[num_steps]`: `STEP_FIELDS`, `total_ms`, `predicted_ms` (by the
                  planner's cost model before it learnt from the step), `depth` drafted
                  after the step, `budget` and `admitted` of the step.
        window    `[2]`: steps before the steady part, and before its end.
        state     What the planner knew when the steady part began, as JSON.
        draft_*   `[num_drafts]`: `DRAFT_FIELDS`, `num_accepted`; `draft_confidence` and
                  `draft_predicted` (calibrated) `[num_drafts, max_depth]`, NaN past
                  what was offered.

    The time that notes take is no part of any step, and the planner does not see it.

    A draft that the scheduler cut after the selection has `num_verified` smaller than
    `num_admitted`; a draft whose outcome is unknown has `num_accepted` -1.
    """

    def __init__(self, planner: Any) -> None:
        """Record a planner."""
        self._planner = planner
        self._steps: list[dict[str, float]] = [{}]
        self._drafts: list[dict[str, Any]] = []
        self._open: dict[Any, dict[str, Any]] = {}
        self._req_numbers: dict[Any, int] = {}
        self._marks: dict[str, int] = {}
        self._state: dict[str, Any] = {}
        self._own_s = 0.0

    def __getattr__(self, name: str) -> Any:
        """Pass on whatever else the planner has."""
        return getattr(self._planner, name)

    def mark(self, name: str) -> None:
        """Note that `start` or `end` of the steady part has been reached."""
        self._marks[name] = len(self._steps) - 1
        export_state = getattr(self._planner, "export_state", None)
        if name == "start" and callable(export_state):
            self._state = export_state()

    def select(self, batch: Any) -> Any:
        """Note the drafts offered and admitted."""
        with self._taking_notes():
            predicted = self._predict(batch)
        selection = self._planner.select(batch)
        with self._taking_notes():
            self._note_selection(batch, selection, predicted)
        return selection

    def _note_selection(self, batch: Any, selection: Any, predicted: Any) -> None:
        self._steps[-1]["budget"] = float(selection.draft_budget)
        self._steps[-1]["admitted"] = float(selection.num_admitted.sum())
        for row, req_id in enumerate(batch.req_ids):
            offered = int(batch.num_draft_tokens[row])
            if offered == 0:
                continue
            draft = {
                "step": len(self._steps) - 1,
                "req": self._req_numbers.setdefault(req_id, len(self._req_numbers)),
                "num_offered": offered,
                "num_admitted": int(selection.num_admitted[row]),
                "num_verified": 0,
                "num_accepted": -1,
                "confidence": _row(batch.confidence, row, offered),
                "predicted": _row(predicted, row, offered),
            }
            self._drafts.append(draft)
            self._open[req_id] = draft

    def choose_depth(self, *args: Any, **kwargs: Any) -> int:
        """Note the depth."""
        depth = int(self._planner.choose_depth(*args, **kwargs))
        self._steps[-1]["depth"] = depth
        return depth

    def observe(self, outcome: Any) -> None:
        """Note what was accepted; the step ends here."""
        self._planner.observe(outcome)
        with self._taking_notes():
            self._note_outcome(outcome)

    def _note_outcome(self, outcome: Any) -> None:
        for row, req_id in enumerate(outcome.req_ids):
            draft = self._open.get(req_id)
            if draft is not None:
                draft["num_verified"] = int(outcome.num_verified[row])
                draft["num_accepted"] = int(outcome.num_accepted[row])
        self._open.clear()
        self._steps.append({})

    def observe_timing(self, timing: Any) -> None:
        """Note what the step before cost, and was predicted to cost.

        The planner learns what the step would have cost without notes.
        """
        noting_ms, self._own_s = 1e3 * self._own_s, 0.0
        with self._taking_notes():
            host_ms = max(0.0, timing.host_ms - noting_ms)
            timing = dataclasses.replace(timing, host_ms=host_ms)
            self._note_timing(timing)
        self._planner.observe_timing(timing)

    def _note_timing(self, timing: Any) -> None:
        if len(self._steps) > 1:
            step = self._steps[-2]
            for name, value in dataclasses.asdict(timing).items():
                if name in STEP_FIELDS:
                    step[name] = float(value)
            step["total_ms"] = float(timing.total_ms)
            # A draft may have ended short of the depth that was chosen.
            step["depth"] = float(timing.depth)
            predict = getattr(getattr(self._planner, "cost", None), "predict_ms", None)
            if callable(predict):
                step["predicted_ms"] = float(predict(timing))

    def save(self, path: Path) -> None:
        """Write the arrays, all or nothing."""
        steps = self._steps[:-1]
        for step in steps:
            if "total_ms" not in step:
                # Only the depth that was chosen is known, not that of the draft.
                step.pop("depth", None)
        arrays = {
            f"step_{name}": np.array(
                [step.get(name, np.nan) for step in steps], dtype=np.float32
            )
            for name in (*STEP_FIELDS, *_STEP_EXTRAS)
        }
        window = self._marks.get("start", 0), self._marks.get("end", len(steps))
        arrays["window"] = np.array(window, dtype=np.int32)
        arrays["state"] = np.array(json.dumps(self._state))
        for name in (*DRAFT_FIELDS, "num_accepted"):
            arrays[f"draft_{name}"] = np.array(
                [draft[name] for draft in self._drafts], dtype=np.int32
            )
        depth = max((draft["num_offered"] for draft in self._drafts), default=0)
        for name in ("confidence", "predicted"):
            rows = np.full((len(self._drafts), depth), np.nan, dtype=np.float32)
            for row, draft in zip(rows, self._drafts, strict=True):
                if draft[name] is not None:
                    row[: draft["num_offered"]] = draft[name]
            arrays[f"draft_{name}"] = rows
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        with unfinished.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        unfinished.rename(path)

    @contextmanager
    def _taking_notes(self) -> Iterator[None]:
        """Count the time that only a traced step spends."""
        began_s = time.perf_counter()
        yield
        self._own_s += time.perf_counter() - began_s

    def _predict(self, batch: Any) -> Any:
        acceptance = getattr(self._planner, "acceptance", None)
        calibration = getattr(acceptance, "calibration", None)
        if calibration is None or batch.confidence is None or not batch.req_ids:
            return None
        return calibration.predict(batch.confidence, batch.req_ids)


_STEP_EXTRAS = ("total_ms", "predicted_ms", "depth", "budget", "admitted")


@contextmanager
def record_trace(scheduler: Any) -> Iterator[Trace | None]:
    """Record a scheduler's planner.

    Args:
        scheduler: Whose planner; None records nothing.

    Yields:
        The record; None if there is nothing to record.
    """
    planner = getattr(scheduler, "_planner", None)
    if planner is None:
        yield None
        return
    trace = Trace(planner)
    scheduler._planner = trace
    try:
        yield trace
    finally:
        scheduler._planner = planner


def _row(values: Any, row: int, length: int) -> Any:
    return None if values is None else np.array(values[row, :length])
