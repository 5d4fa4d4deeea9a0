"""What the engine does step by step, recorded only while somebody watches."""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from policies.decisions.select import compute_survival

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

WATCH_S: Final = 5.0
"""How long one look keeps the recording going."""

MAX_ROWS: Final = 2048
"""Requests in all steps of one answer, the newest; the totals count them all."""

MAX_REQUESTS: Final = 64
"""Requests shown of one step."""

_TAG_LENGTH: Final = 8


@dataclass(slots=True)
class BoardRequest:
    """One request in one step.

    Attributes:
        number: Stands for the request on the board, from 1 in order of appearance.
        survival: Probability per drafted token, from the first, that it and those
            before it are accepted; empty if the drafter gives no confidence.
        drafted: Tokens drafted.
        admitted: The first of these, which the policy lets verify.
        accepted: The first of these, which the target accepted.
        emitted: Tokens the request gained, the target's own included.
        draft_ids: Token ids drafted, if they are wanted.
        tag: The end of the id in the client's own answer, by which it knows its
            request.
    """

    number: int
    survival: list[float] = field(default_factory=list)
    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    emitted: int = 0
    draft_ids: list[int] = field(default_factory=list)
    tag: str = ""


@dataclass(slots=True)
class BoardStep:
    """One engine step; times in milliseconds. `left_out` counts requests not shown."""

    step: int
    step_ms: float
    budget: int
    depth: int
    running: int
    waiting: int
    requests: list[BoardRequest]
    left_out: int


@dataclass(slots=True)
class BoardTotals:
    """Sums over all steps since the recording began; the time in seconds."""

    steps: int = 0
    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    emitted: int = 0
    seconds: float = 0.0


class BoardRecorder:
    """Keeps the newest steps for those who watch.

    Whoever looks, with :meth:`watch`, starts the recording and keeps it going; it ends
    by itself. The scheduler asks :attr:`is_watched` before every call, which is all
    that it costs while nobody looks.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a watcher; `clock` gives seconds."""
        self.is_watched = False
        self._clock = clock
        self._with_ids = False
        self._until_s = self._started_s = clock()
        self._open: dict[str, BoardRequest] = {}
        self._numbers: dict[str, int] = {}
        self._counter = itertools.count(1)
        self._steps: deque[BoardStep] = deque()
        self._num_rows = 0
        self._totals = BoardTotals()

    def watch(self, after: int, *, with_ids: bool = False) -> dict[str, Any]:
        """Return what happened since, and go on recording for `WATCH_S`.

        Args:
            after: Number of the last step seen; 0 at first.
            with_ids: Record token ids of drafts from now on.

        Returns:
            Plain values: `{"steps": [...], "totals": {...}}`, as `BoardStep` and
            `BoardTotals` name them. Totals start anew with each recording.
        """
        if not self.is_watched:
            self._steps.clear()
            self._num_rows = 0
            self._totals = BoardTotals()
            self._started_s = self._clock()
        self.is_watched = True
        self._with_ids = with_ids
        self._until_s = self._clock() + WATCH_S
        steps = [asdict(step) for step in self._steps if step.step > after]
        return {"steps": steps, "totals": asdict(self._totals)}

    def start_step(self) -> None:
        """Take down that a step begins."""
        self._started_s = self._clock()
        self._open = {}

    def note_drafts(
        self,
        drafts: Mapping[str, Sequence[int]],
        confidence: NDArray[np.float64] | None,
        num_admitted: Sequence[int],
    ) -> None:
        """Take down a selection; the outcome of the same step follows.

        Args:
            drafts: Drafted token ids by request.
            confidence: `[num_reqs, depth]`; None if the drafter has none.
            num_admitted: `[num_reqs]`.
        """
        survival = None if confidence is None else compute_survival(confidence)
        for row, (req_id, token_ids) in enumerate(drafts.items()):
            drafted = len(token_ids)
            self._open[req_id] = BoardRequest(
                number=0,
                survival=(
                    []
                    if survival is None
                    else [round(p, 3) for p in survival[row, :drafted].tolist()]
                ),
                drafted=drafted,
                admitted=int(num_admitted[row]),
                # Below 0 are placeholders: drafts that the device alone knows.
                draft_ids=[i for i in token_ids if i >= 0] if self._with_ids else [],
            )

    def note_outcome(
        self,
        emitted: Iterable[tuple[str, int, int]],
        *,
        budget: int,
        depth: int,
        running: Sequence[str],
        waiting: int,
    ) -> None:
        """Close the step.

        Args:
            emitted: Per request its id, tokens accepted, tokens emitted.
            budget: Draft tokens that the policy allowed.
            depth: Draft tokens asked of the drafter for the next step.
            running: Ids of the running requests; only they keep their numbers.
            waiting: How many requests wait.
        """
        now_s = self._clock()
        step_s = now_s - self._started_s
        requests = []
        self._numbers = {
            req_id: self._numbers.get(req_id) or next(self._counter)
            for req_id in running
        }
        for req_id, num_accepted, num_emitted in emitted:
            one = self._open.get(req_id) or BoardRequest(number=0)
            one.number = self._numbers.get(req_id, 0)
            one.accepted, one.emitted = num_accepted, num_emitted
            # vLLM adds a hyphen and some letters of its own to the client's id.
            one.tag = req_id.rpartition("-")[0][-_TAG_LENGTH:]
            requests.append(one)
        self._add(requests, step_s)
        self._keep(
            BoardStep(
                self._totals.steps,
                round(1000 * step_s, 3),
                budget,
                depth,
                len(running),
                waiting,
                requests[:MAX_REQUESTS],
                max(0, len(requests) - MAX_REQUESTS),
            )
        )
        if now_s > self._until_s:
            self.is_watched = False

    def _keep(self, step: BoardStep) -> None:
        self._steps.append(step)
        self._num_rows += _rows_of(step)
        while self._num_rows > MAX_ROWS:
            self._num_rows -= _rows_of(self._steps.popleft())

    def _add(self, requests: list[BoardRequest], step_s: float) -> None:
        totals = self._totals
        totals.steps += 1
        totals.seconds += step_s
        for one in requests:
            totals.drafted += one.drafted
            totals.admitted += one.admitted
            totals.accepted += one.accepted
            totals.emitted += one.emitted


def _rows_of(step: BoardStep) -> int:
    return max(1, len(step.requests))
