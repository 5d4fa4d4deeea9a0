"""Leaves a drafter alone where it has collapsed, and tries it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.logger import init_logger

from policies.decisions.quarantine import MAX_WAIT, Quarantines
from policies.estimators.acceptance_watch import AcceptanceWatch, Cell, bucket_of
from serving.engine.shared.watched_requests import WatchedRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from policies.decisions.quarantine import Quarantine
    from serving.engine.compat import Request
    from serving.engine.shared.counters import SpeculationCounters
    from serving.engine.shared.request_classes import RequestClasses

logger = init_logger(__name__)

MAX_WATCHED, FEW = 16, 4
"""Requests that are looked at together, in turn, and in every second step, unless they
are few. With all of them an alarm would come some steps sooner; but between two forward
passes every look has its price, and every request."""

READ_EVERY = 4
"""Looks whose outcomes are taken in together, which costs less than one by one."""


class Drafts(NamedTuple):
    """How sure a drafter was of some drafts.

    Attributes:
        confidence: `[num_drafts, depth]`, float64; empty where it does not say.
        rows: `[num_reqs]`, in it; -1 for a request of which nothing can be learnt.
    """

    confidence: NDArray[np.float64]
    rows: Sequence[int]

    @classmethod
    def without_confidence(cls, num_reqs: int, *, is_due: bool) -> Drafts:
        """Describe drafts of which nothing is said; nothing is learnt if it is due."""
        return cls(np.empty((0, 0)), [-1] * num_reqs if is_due else range(num_reqs))


class SpeculationWatchdog:
    """Watches what is accepted, by context, class and draft position.

    Requests where acceptance collapses are put under quarantine: their drafts are cut,
    and where that is true of all that run, nothing is drafted. A few of them are tried
    again at growing intervals, whatever a planner thinks of their drafts, with the
    drafter's KV filled anew where the engine can. Planners learn nothing of what is
    tried, so that what they know of a drafter that works is kept.

    Only outcomes of earlier steps decide, and the length of the context: output stays
    lossless.

    Attributes:
        limits: Drafts that each request under quarantine may have verified.
        probes: Those of them that are tried in this step.
        least_depth: Drafts that each request needs, for some are tried so deep.
    """

    def __init__(self, classes: RequestClasses, counters: SpeculationCounters) -> None:
        """Watch from now on."""
        self.limits: dict[str, int] = {}
        self.probes: frozenset[str] = frozenset()
        self._classes = classes
        self._counters = counters
        self._watch = AcceptanceWatch()
        self._requests = WatchedRequests(self._watch, classes)
        self._quarantines = Quarantines()
        self._step = 0
        self.least_depth = 0
        self._rebuilds: dict[str, None] = {}
        self._recovered: list[str] = []
        self._unread: list[tuple[int, NDArray[np.float64], tuple[Sequence[int], ...]]]
        self._unread = []

    @property
    def is_active(self) -> bool:
        """Whether anything is under quarantine, whether it runs or not."""
        return bool(self._quarantines.active)

    def begin_step(
        self, running: Sequence[Request], can_draft: Callable[[Request, int], bool]
    ) -> None:
        """Cut the drafts of requests under quarantine, all but those that are tried.

        Args:
            running: All that may be in the step.
            can_draft: Whether a draft of a request at a position can be of use: a try
                of any other would show nothing.
        """
        self._step += 1
        if not self.is_active:
            return
        self.limits = {}
        covered: dict[int, list[Request]] = {}
        for request in running:
            one = self._find(request)
            if one is not None:
                self.limits[request.request_id] = one.position
                covered.setdefault(id(one), []).append(request)
        probes: list[str] = []
        self.least_depth = 0
        self._counters.num_quarantined.clear()
        for one in self._quarantines.active:
            own = covered.get(id(one), [])
            self._counters.num_quarantined[one.reason] += len(own)
            was_probing, able = one.is_probing, []
            if one.wants_probes:
                able = [r for r in own if can_draft(r, one.position)]
            one.note_step(can_try=bool(able))
            if not (one.is_probing and able):
                continue
            self.least_depth = max(self.least_depth, one.position + 1)
            if one.verifies:
                # A look-up may have found nothing for some.
                able = [r for r in able if len(r.spec_token_ids) > one.position]
            picked = [able[i].request_id for i in one.pick_probes(len(able))]
            if one.verifies:
                self.limits.update(dict.fromkeys(picked, one.position + 1))
                probes += picked
            if one.rebuilds and not was_probing:
                self._rebuilds.update(dict.fromkeys(picked))
        self.probes = frozenset(probes)
        self._cut(running)

    def _cut(self, running: Sequence[Request]) -> None:
        for request in running:
            limit = self.limits.get(request.request_id)
            num_cut = 0 if limit is None else len(request.spec_token_ids) - limit
            if num_cut > 0:
                self._counters.count_cut("quarantine", num_cut)
                request.spec_token_ids = request.spec_token_ids[:limit]

    def limit_depth(self, depth: int, running: Iterable[Request]) -> int:
        """Return the depth to draft: 0 if all is cut anyway, more for what is tried."""
        found = [self._find(request) for request in running]
        most = max([depth if one is None else one.position for one in found], default=0)
        return max(min(depth, most), self.least_depth)

    def observe(
        self,
        requests: Mapping[str, Request],
        req_ids: Sequence[str],
        num_verified: Sequence[int],
        num_accepted: Sequence[int],
        locate: Callable[[Sequence[str]], Drafts],
    ) -> list[bool] | None:
        """Take in what became of a step's drafts, before their requests have grown.

        Args:
            requests: By id.
            req_ids: `[num_reqs]`.
            num_verified: `[num_reqs]`.
            num_accepted: `[num_reqs]`.
            locate: Finds the drafts of some of these requests.

        Returns:
            `[num_reqs]`, of whom planners may learn; None for all.
        """
        num_reqs, first = len(req_ids), 0
        learns = None
        if num_reqs == 0:
            return None
        if self.limits:
            limits, probes = self.limits, self.probes
            learns = [r not in probes and limits.get(r, 1) > 0 for r in req_ids]
            drafts = locate(req_ids)
            self._judge(requests, req_ids, num_verified, num_accepted, drafts)
        if num_reqs > FEW and self._step % 2:
            return learns
        if num_reqs > MAX_WATCHED:
            first = self._step // 2 * MAX_WATCHED % num_reqs
        some = slice(first, first + MAX_WATCHED)
        drafts = locate(req_ids[some])
        rows = drafts.rows
        if learns is not None:
            # The watch is told nothing of them either.
            rows = [r if own else -1 for r, own in zip(rows, learns[some], strict=True)]
        looked_at = [requests[req_id] for req_id in req_ids[some]]
        slots, classes = self._requests.place_all(looked_at)
        context = [request.num_tokens for request in looked_at]
        verified, accepted = num_verified[some], num_accepted[some]
        outcomes = rows, slots, classes, context, verified, accepted
        self._unread.append((self._step, drafts.confidence, outcomes))
        if num_reqs > FEW or len(self._unread) >= READ_EVERY:
            self._read()
        return learns

    def _read(self) -> None:
        """Show the watch what steps were kept, and answer its alarm."""
        unread, self._unread = self._unread, []
        for step, confidence, outcomes in unread:
            columns = np.array(outcomes, dtype=np.int64)
            collapse = self._watch.observe(confidence, columns, step)
            if collapse is not None:
                self._raise(self._quarantines.add(collapse, self._watch, step))
                # The rest is more of the same.
                break
        self._requests.free_left()

    def take_rebuilds(self) -> tuple[str, ...]:
        """Hand over, once, for whom the drafter should fill its KV anew."""
        rebuilds, self._rebuilds = tuple(self._rebuilds), {}
        return rebuilds

    def take_recovered(self) -> list[str]:
        """Hand over, once, whose drafts are accepted again.

        What a planner learnt of them while it was not known that they had collapsed is
        not true any more.
        """
        recovered, self._recovered = self._recovered, []
        return recovered

    def forget(self, req_id: str) -> None:
        """Drop a request that has ended."""
        self.limits.pop(req_id, None)
        self._rebuilds.pop(req_id, None)
        self._requests.forget(req_id)

    def _find(self, request: Request) -> Quarantine | None:
        _, class_index = self._requests.place(request)
        return self._quarantines.find(class_index, request.num_tokens)

    def _judge(
        self,
        requests: Mapping[str, Request],
        req_ids: Sequence[str],
        num_verified: Sequence[int],
        num_accepted: Sequence[int],
        drafts: Drafts,
    ) -> None:
        """Take in what became of tries, and release who has recovered."""
        for index, req_id in enumerate(req_ids):
            row = drafts.rows[index]
            one = self._find(requests[req_id]) if req_id in self.probes else None
            # Only what was verified after drafts that were all accepted says anything.
            if one is None or row < 0 or num_verified[index] <= one.position:
                continue
            if num_accepted[index] < one.position:
                continue
            request = requests[req_id]
            _, class_index = self._requests.place(request)
            cell = Cell(bucket_of(request.num_tokens), class_index, one.position)
            confidence = None
            if drafts.confidence.size:
                confidence = float(drafts.confidence[row, one.position])
            expected = self._watch.expect(cell, confidence)
            is_accepted = num_accepted[index] > one.position
            if one.judge(is_accepted=is_accepted, expected=expected):
                self._release(one, requests)

    def _release(self, one: Quarantine, requests: Mapping[str, Request]) -> None:
        released = [r for r in self.limits if self._find(requests[r]) is one]
        one.release(self._watch)
        self._quarantines.active.remove(one)
        self._recovered += released
        if one.rebuilds:
            self._rebuilds.update(dict.fromkeys(released))
        self.limits, self.probes, self.least_depth = {}, frozenset(), 0
        self._counters.num_quarantined.clear()
        logger.warning(
            "Speculation: drafts of %s are accepted again; they were left out for %d "
            "steps",
            self._name(one),
            one.num_steps,
        )

    def _raise(self, one: Quarantine) -> None:
        self._counters.num_quarantines[one.reason] += 1
        cause = one.cause
        place = f" at position {one.position + 1}" if one.position else ""
        logger.warning(
            "Speculation: of %s, %d of %d drafts%s were accepted where %.0f are usual; "
            "they are left out (%s), and tried again every %d steps at least",
            self._name(one),
            cause.num_accepted,
            cause.num_drafts,
            place,
            cause.num_expected,
            one.reason,
            MAX_WAIT,
        )

    def _name(self, one: Quarantine) -> str:
        who = "all requests"
        if one.class_index is not None:
            who = f"class {self._classes.names[one.class_index]}"
        if one.from_context:
            who += f" from {one.from_context} tokens on"
        return who
