"""What a planner was asked, what it answered and what came of it, as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .watch import Watch, WatchedStep

STEP_FIELDS = (
    *("num_reqs", "num_decode_tokens", "num_prefill_tokens", "num_context_tokens"),
    *("target_ms", "draft_first_ms", "draft_next_ms", "host_ms", "backlog_ms"),
)
"""Taken from the timing of a step; NaN where it was not timed."""

_STEP_EXTRAS = ("total_ms", "predicted_ms", "depth", "budget", "admitted")
_DRAFT_FIELDS = (
    *("step", "req", "num_offered", "num_admitted", "num_verified", "num_accepted"),
)


def save_trace(watch: Watch, path: Path, state: Mapping[str, Any]) -> None:
    """Write what was watched as `.npz`, all or nothing.

    One record for each engine step and one for each request and step with drafts:

        step_*    `[num_steps]`: `STEP_FIELDS`, `total_ms`, `predicted_ms` (by the
                  planner's cost model before it learnt from the step), `depth` drafted
                  after the step, `budget` and `admitted` of the step.
        window    `[2]`: steps before the steady part, and before its end.
        state     What the planner knew when the steady part began, as JSON.
        draft_*   `[num_drafts]`: number of step and request, `num_offered`,
                  `num_admitted`, `num_verified`, `num_accepted`; `draft_confidence` and
                  `draft_predicted` (calibrated) `[num_drafts, max_depth]`, NaN past
                  what was offered; predictions are known where something was verified.

    A draft that the scheduler cut after the selection has `num_verified` smaller than
    `num_admitted`; a draft whose outcome is unknown has `num_accepted` -1.
    """
    steps = [_read_step(step) for step in watch.steps]
    drafts: list[dict[str, Any]] = []
    numbers: dict[Any, int] = {}
    for number, step in enumerate(watch.steps):
        drafts += _read_drafts(number, step, numbers)
    arrays: dict[str, Any] = {
        f"step_{name}": np.array([s.get(name, np.nan) for s in steps], np.float32)
        for name in (*STEP_FIELDS, *_STEP_EXTRAS)
    }
    arrays["window"] = np.array(watch.window, dtype=np.int32)
    arrays["state"] = np.array(json.dumps(state))
    for name in _DRAFT_FIELDS:
        arrays[f"draft_{name}"] = np.array([d[name] for d in drafts], np.int32)
    depth = max((draft["num_offered"] for draft in drafts), default=0)
    for name in ("confidence", "predicted"):
        rows = np.full((len(drafts), depth), np.nan, dtype=np.float32)
        for row, draft in zip(rows, drafts, strict=True):
            if draft[name] is not None:
                own = draft[name][: draft["num_offered"]]
                row[: own.size] = own
        arrays[f"draft_{name}"] = rows
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    unfinished.replace(path)


def _read_step(step: WatchedStep) -> dict[str, float]:
    values: dict[str, float] = {}
    if step.selection is not None:
        values["budget"] = float(step.selection.draft_budget)
        values["admitted"] = float(step.selection.num_admitted.sum())
    if step.timing is not None:
        timing = asdict(step.timing)
        values |= {name: float(timing[name]) for name in STEP_FIELDS}
        values["total_ms"] = float(step.timing.total_ms)
        # A draft may have ended short of the depth that was chosen.
        values["depth"] = float(step.timing.depth)
    if step.predicted_ms is not None:
        values["predicted_ms"] = step.predicted_ms
    return values


def _read_drafts(
    number: int, step: WatchedStep, numbers: dict[Any, int]
) -> list[dict[str, Any]]:
    """Return a record for each request with drafts, numbered as they come."""
    if step.batch is None:
        return []
    outcome, predicted = step.outcome, step.predict()
    row_of = {} if outcome is None else {r: n for n, r in enumerate(outcome.req_ids)}
    drafts = []
    for row, req_id in enumerate(step.batch.req_ids):
        offered = int(step.batch.num_draft_tokens[row])
        if offered == 0:
            continue
        own, confidence = row_of.get(req_id), step.batch.confidence
        drafts.append(
            {
                "step": number,
                "req": numbers.setdefault(req_id, len(numbers)),
                "num_offered": offered,
                "num_admitted": int(step.selection.num_admitted[row]),
                "num_verified": 0 if own is None else int(outcome.num_verified[own]),
                "num_accepted": -1 if own is None else int(outcome.num_accepted[own]),
                "confidence": None if confidence is None else confidence[row],
                "predicted": None
                if own is None or predicted is None
                else predicted[1][own],
            }
        )
    return drafts
