"""Notices when drafts that used to be accepted no longer are, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from policies.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_BUCKETS = 16
"""Of context: up to 63 tokens, then by doubling."""

FIRST_BUCKET_BITS = 6

NUM_CLASSES = 8
"""Classes of requests told apart; the last stands for all that follow."""

NUM_POSITIONS = 8
"""Draft positions told apart; the last stands for all deeper ones."""

NUM_BINS = 5
"""Of confidence."""

ALARM = 21.0
"""Log-likelihood ratio that is an alarm: at most one in 6.6e8 outcomes is a false one,
150 hours of 16 requests with three each in 25 steps a second."""

COLLAPSE = 8.0
"""A drafter has collapsed where so many times fewer drafts are accepted than usual.
What halves, or falls to a third, is harder text and no alarm."""

MIN_KNOWN = 64.0
"""Outcomes that say what is usual, before anything can be unusual."""

MIN_EXPECTED = 0.15
"""Where fewer are accepted anyway there is nothing to lose."""

MOST_EXPECTED = 0.9
"""No draft is surer than that, or a few rejections would be an alarm."""

UNSURE = 0.75
"""Part of what is usual that is expected of drafts without confidence: of those it is
known less well."""

MEMORY = 2000.0
"""Outcomes, of a position and bin or of a cell, that are remembered: at twice as many,
all weigh half. So what changes over thousands of drafts becomes the usual."""

CELL_PRIOR, REQUEST_PRIOR, REQUEST_MEMORY = 64.0, 8.0, 128.0
"""Accepted drafts, expected and happened alike, that cell and request start from, for
what a new request does may be its own; and how many that are expected it remembers."""


RECENT = 256
"""Steps for which it counts that drafts were accepted."""

ROUNDING = 1e-6
"""By which a softmax in float32 may exceed 1."""

NEVER = -(1 << 40)
"""A step that is long ago."""


class Cell(NamedTuple):
    """Drafts that are watched together."""

    bucket: int
    class_index: int
    position: int


@dataclass(frozen=True, slots=True)
class Collapse:
    """An alarm.

    Attributes:
        cell: Where it was raised.
        num_drafts: Of its outcomes since all was well.
        num_accepted: Of these.
        num_expected: How many usually are.
        from_context: The shortest context among them, in tokens.
        since: Step of the first of them.
    """

    cell: Cell
    num_drafts: int
    num_accepted: int
    num_expected: float
    from_context: int
    since: int


@dataclass(slots=True)
class AcceptanceWatch:
    """A CUSUM on acceptance for each cell of context, class and draft position.

    What is usual is learnt for each position and bin of confidence over all requests,
    times how much more or less a cell has, times the same for a request:

        p = usual[position, confidence] * cell[context, class] * request

    Each outcome adds the log-likelihood of p / `COLLAPSE` over that of p to the sum of
    its cell and to that of its position in all cells; neither falls below 0. While p is
    right, n outcomes bring no more than 2 n exp(-`ALARM`) false alarms, over how many
    cells whatever. A request is judged by itself as it becomes known, so that a hard
    one is no alarm; several that fail together, or one that used to do well, are.

    Confidence matters most: a drafter that knows that it is guessing is not broken, and
    planners draft less by themselves.

    Source: the bound is Lorden's for Page's CUSUM; the factors are ours.
    """

    usual: NDArray[np.float64] = field(init=False)
    cells: NDArray[np.float64] = field(init=False)
    requests: NDArray[np.float64] = field(init=False)
    suspicion: NDArray[np.float64] = field(init=False)
    excursions: NDArray[np.float64] = field(init=False)
    last_good: NDArray[np.int64] = field(init=False)
    last_seen: NDArray[np.int64] = field(init=False)
    longest_good: NDArray[np.int64] = field(init=False)
    suspicion_of_all: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        """Know nothing."""
        shape = (NUM_BUCKETS, NUM_CLASSES, NUM_POSITIONS)
        # Accepted, and seen or expected.
        self.usual = np.zeros((2, NUM_POSITIONS, NUM_BINS))
        self.cells = np.zeros((2, NUM_BUCKETS, NUM_CLASSES))
        self.requests = np.zeros((2, 1))
        self.suspicion = np.zeros(shape)
        # Since it was last 0: outcomes, accepted, expected, the shortest context, and
        # the step of the first.
        self.excursions = np.zeros((5, *shape))
        self.last_good = np.full(shape, NEVER, dtype=np.int64)
        self.last_seen = np.full(shape, NEVER, dtype=np.int64)
        # The longest context of late, in tokens, of which a draft was accepted.
        self.longest_good = np.zeros(shape, dtype=np.int64)
        self.suspicion_of_all = np.zeros(NUM_POSITIONS)

    def reset_request(self, slot: int) -> None:
        """Have a slot stand for another request, or know nothing of this one."""
        while slot >= self.requests.shape[1]:
            self.requests = np.hstack((self.requests, np.zeros_like(self.requests)))
        self.requests[:, slot] = 0.0

    def observe(
        self,
        confidence: NDArray[np.float64],
        outcomes: NDArray[np.int64],
        step: int,
    ) -> Collapse | None:
        """Take in outcomes; return the first alarm that they raise.

        Args:
            confidence: `[num_drafts, depth]`, float64, C-contiguous; empty where the
                drafter reports none. Nothing is learnt of drafts after one that is no
                probability.
            outcomes: `[6, num_reqs]`, int64, C-contiguous: row in `confidence` (-1
                to leave it out), slot, class, context in tokens, drafts verified,
                drafts accepted.
            step: Rising.
        """
        position = _take_in(
            confidence,
            outcomes,
            step,
            self.usual,
            self.cells,
            self.requests,
            self.suspicion,
            self.suspicion_of_all,
            self.excursions,
            self.last_good,
            self.last_seen,
            self.longest_good,
        )
        if position < 0:
            return None
        # Also where the alarm is that of all cells together: the worst of them.
        suspicion = self.suspicion[:, :, position]
        bucket, class_index = np.unravel_index(suspicion.argmax(), suspicion.shape)
        cell = Cell(int(bucket), int(class_index), position)
        excursion = self.excursions[:, *cell].tolist()
        seen, accepted, expected, context, since = excursion
        self.suspicion_of_all[position] = 0.0
        return Collapse(
            cell, int(seen), int(accepted), expected, int(context), int(since)
        )

    def expect(self, cell: Cell, confidence: float | None) -> float:
        """Return the usual acceptance of a draft, 0-1."""
        bin_ = (
            0 if confidence is None else min(int(confidence * NUM_BINS), NUM_BINS - 1)
        )
        accepted, seen = self.usual[:, cell.position, bin_]
        own, expected = self.cells[:, cell.bucket, cell.class_index]
        ratio = (CELL_PRIOR + own) / (CELL_PRIOR + expected)
        return float(np.clip(accepted / max(seen, 1.0) * ratio, 0.02, MOST_EXPECTED))

    def suspend(self, buckets: slice, classes: slice, position: int) -> None:
        """Take cells out, from a position on: their drafts are not verified."""
        self.suspicion[buckets, classes, position:] = 0.0
        self.last_good[buckets, classes, position:] = NEVER
        self.last_seen[buckets, classes, position:] = NEVER

    def relearn(
        self, buckets: slice, classes: slice, num_accepted: float, num_expected: float
    ) -> None:
        """Take what drafts do after an alarm for the usual, in some cells."""
        ratio = min(1.0, (1.0 + num_accepted) / (1.0 + num_expected))
        self.cells[0, buckets, classes] = 4 * CELL_PRIOR * ratio
        self.cells[1, buckets, classes] = 4 * CELL_PRIOR


def bucket_of(num_tokens: int) -> int:
    """Return the bucket of a context."""
    return min(max(num_tokens.bit_length() - FIRST_BUCKET_BITS, 0), NUM_BUCKETS - 1)


@compiled
def _take_in(
    confidence: NDArray[np.float64],
    outcomes: NDArray[np.int64],
    step: int,
    usual: NDArray[np.float64],
    cells: NDArray[np.float64],
    requests: NDArray[np.float64],
    suspicion: NDArray[np.float64],
    suspicion_of_all: NDArray[np.float64],
    excursions: NDArray[np.float64],
    last_good: NDArray[np.int64],
    last_seen: NDArray[np.int64],
    longest_good: NDArray[np.int64],
) -> int:
    """Change all that is learnt in place; return an alarm's position, -1 for none."""
    alarm = -1
    for column in range(outcomes.shape[1]):
        row, slot = outcomes[0, column], outcomes[1, column]
        if row < 0:
            continue
        class_, context = outcomes[2, column], outcomes[3, column]
        verified, accepted = outcomes[4, column], outcomes[5, column]
        bucket, rest = 0, context >> FIRST_BUCKET_BITS
        while rest > 0 and bucket < NUM_BUCKETS - 1:
            bucket += 1
            rest >>= 1
        for depth in range(min(verified, accepted + 1)):
            is_accepted = 1.0 if depth < accepted else 0.0
            position = min(depth, NUM_POSITIONS - 1)
            bin_ = 0
            if depth < confidence.shape[1]:
                value = confidence[row, depth]
                if not 0.0 <= value <= 1.0 + ROUNDING:
                    break
                bin_ = min(int(value * NUM_BINS), NUM_BINS - 1)
            seen = usual[1, position, bin_]
            expected = usual[0, position, bin_] / max(seen, 1.0)
            _add(usual, position, bin_, is_accepted, 1.0)
            if seen < MIN_KNOWN:
                continue
            ratio = CELL_PRIOR + cells[0, bucket, class_]
            by_cell = expected * ratio / (CELL_PRIOR + cells[1, bucket, class_])
            _add(cells, bucket, class_, is_accepted, expected)
            due = requests[1, slot]
            p = by_cell * (REQUEST_PRIOR + requests[0, slot]) / (REQUEST_PRIOR + due)
            keep = 0.5 if due >= REQUEST_MEMORY else 1.0
            requests[0, slot] = keep * (requests[0, slot] + is_accepted)
            requests[1, slot] = keep * (due + by_cell)
            if depth >= confidence.shape[1]:
                p *= UNSURE
            p = min(max(p, 0.02), MOST_EXPECTED)
            gain = -math.log(COLLAPSE)
            if is_accepted == 0.0:
                gain = 0.0
                if by_cell >= MIN_EXPECTED:
                    gain = math.log((1.0 - p / COLLAPSE) / (1.0 - p))
            of_all = max(suspicion_of_all[position] + gain, 0.0)
            suspicion_of_all[position] = of_all
            before = suspicion[bucket, class_, position]
            now = max(before + gain, 0.0)
            last_seen[bucket, class_, position] = step
            suspicion[bucket, class_, position] = now
            if now == 0.0:
                if is_accepted == 1.0:
                    longest = longest_good[bucket, class_, position]
                    if last_good[bucket, class_, position] < step - RECENT:
                        longest = 0
                    longest_good[bucket, class_, position] = max(longest, context)
                    last_good[bucket, class_, position] = step
                continue
            if before == 0.0:
                for part in range(3):
                    excursions[part, bucket, class_, position] = 0.0
                excursions[3, bucket, class_, position] = context
                excursions[4, bucket, class_, position] = step
            excursions[0, bucket, class_, position] += 1.0
            excursions[1, bucket, class_, position] += is_accepted
            excursions[2, bucket, class_, position] += by_cell
            shortest = excursions[3, bucket, class_, position]
            excursions[3, bucket, class_, position] = min(shortest, context)
            if max(now, of_all) >= ALARM and alarm < 0:
                alarm = position
    return alarm


@compiled
def _add(
    sums: NDArray[np.float64], first: int, second: int, accepted: float, seen: float
) -> None:
    """Add to one pair of sums, which never holds much more than it remembers."""
    keep = 0.5 if sums[1, first, second] >= 2.0 * MEMORY else 1.0
    sums[0, first, second] = keep * (sums[0, first, second] + accepted)
    sums[1, first, second] = keep * (sums[1, first, second] + seen)
