"""Who stands between engine and planner: what it was asked, said, and came of it."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

_TIMING = (
    *("num_reqs", "num_decode_tokens", "num_prefill_tokens", "num_context_tokens"),
    *("target_ms", "sample_ms", "draft_first_ms", "draft_next_ms", "host_ms"),
    *("backlog_ms", "depth", "num_drafts"),
)
_DRAFT = (
    *("step", "req", "num_offered", "num_admitted", "num_verified", "num_accepted"),
    "confidence",
)


class Watch:
    """Stands between engine and planner, passes everything on, and keeps all of it.

    By reference, which costs a microsecond or two a step that the arm pays itself; all
    arithmetic waits for the end.

    Held at depth 0 it shows what an engine that could draft costs beside one that
    cannot: `goodput` may be there for hours. It goes on planning and learning, its
    drafter is loaded, all of which is part of the price. Only the depth is held, and
    what the planner believes to have chosen. Exploring falls away with it.
    """

    def __init__(self, planner: Any, *, hold_at_zero: bool = False) -> None:
        """Watch a planner."""
        self._planner, self._hold_at_zero = planner, hold_at_zero
        self.start_over()

    def __getattr__(self, name: str) -> Any:
        """Pass on whatever else the planner has."""
        return getattr(self._planner, name)

    def start_over(self) -> None:
        """Forget the steps so far."""
        self._steps: list[dict[str, Any]] = [{}]
        self._marks: dict[str, int] = {}
        self._state = self._planner.export_state()

    def mark(self, name: str) -> None:
        """Note that `start` or `end` of the steady part has been reached."""
        self._marks[name] = len(self._steps) - 1

    def select(self, batch: Any) -> Any:
        """Note the drafts offered and admitted."""
        selection = self._planner.select(batch)
        self._steps[-1] |= {"batch": batch, "selection": selection}
        return selection

    def choose_depth(self, *args: Any, **kwargs: Any) -> int:
        """Let the planner choose, and hold it back if it is to be."""
        depth = int(self._planner.choose_depth(*args, **kwargs))
        if not self._hold_at_zero:
            return depth
        prices = self._planner.depth.costs
        if prices.plan.depth > 0:
            prices.plan = replace(prices.plan, depth=0)
        return 0

    def observe(self, outcome: Any) -> None:
        """Note what was accepted; the step ends here."""
        if len(outcome.req_ids):
            self._steps[-1]["outcome"] = outcome
        self._planner.observe(outcome)
        self._steps.append({})

    def observe_timing(self, timing: Any) -> None:
        """Note what the step before cost."""
        if len(self._steps) > 1:
            self._steps[-2]["timing"] = timing
        self._planner.observe_timing(timing)

    def add_up_stages(self) -> dict[str, float]:
        """Return the ms that steps say to have spent with target and drafter."""
        timings = [step["timing"] for step in self._steps if "timing" in step]
        return {
            "score": sum(one.target_ms for one in timings),
            "verify": sum(one.sample_ms for one in timings),
            "draft": sum(one.draft_first_ms + one.draft_next_ms for one in timings),
        }

    def save(self, path: Path) -> None:
        """Write all finished steps as `.npz`.

        One record for each engine step and one for each request and step with drafts:

            step_*   `[num_steps]`: the planner's timing of the step, NaN where it was
                     not timed; `depth` is the one drafted after it.
            window   `[2]`: steps before the steady part, and before its end.
            state    What the planner knew before the first step, as JSON.
            draft_*  `[num_drafts]`: number of step and request, `num_offered`,
                     `num_admitted`, `num_verified`, `num_accepted`; `confidence`
                     `[num_drafts, max_depth]`, NaN past what was offered.

        A draft that the scheduler cut after the selection has `num_verified` smaller
        than `num_admitted`; a draft whose outcome is unknown has `num_accepted` -1.
        """
        steps, numbers = self._steps[:-1], dict[Any, int]()
        window = self._marks.get("start", 0), self._marks.get("end", len(steps))
        arrays: dict[str, Any] = {"window": np.array(window, np.int32)}
        arrays["state"] = np.array(json.dumps(self._state))
        for name in _TIMING:
            values = [getattr(step.get("timing"), name, np.nan) for step in steps]
            arrays[f"step_{name}"] = np.array(values, np.float32)
        drafts = [
            (number, numbers.setdefault(req_id, len(numbers)), *values)
            for number, step in enumerate(steps)
            for req_id, *values in _drafts_of(step)
        ]
        columns = [[one[place] for one in drafts] for place in range(len(_DRAFT))]
        padded = list(itertools.zip_longest(*columns.pop(), fillvalue=np.nan))
        arrays["draft_confidence"] = np.array(padded, np.float32).T
        for name, column in zip(_DRAFT, columns, strict=False):
            arrays[f"draft_{name}"] = np.array(column, np.int32)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, allow_pickle=False, **arrays)


def _drafts_of(step: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield id, counts and confidence of each request with drafts."""
    batch: Any = step.get("batch")
    outcome: Any = step.get("outcome")
    if outcome is not None and outcome.confidence is not None:
        # On a GPU the scheduler selects before it knows the drafts: what was verified
        # is all that belongs to this confidence.
        req_ids, confidences = outcome.req_ids, outcome.confidence
        offered = admitted = outcome.num_verified
    elif batch is not None:
        req_ids, confidences = batch.req_ids, batch.confidence
        offered, admitted = batch.num_draft_tokens, step["selection"].num_admitted
    else:
        return
    row_of = {} if outcome is None else {r: n for n, r in enumerate(outcome.req_ids)}
    for row in np.flatnonzero(offered):
        own, happened = row_of.get(req_ids[row]), (0, -1)
        if own is not None:
            happened = outcome.num_verified[own], outcome.num_accepted[own]
        confidence = np.empty(0) if confidences is None else confidences[row]
        counts = offered[row], admitted[row], *happened
        yield req_ids[row], *counts, confidence[: offered[row]]
