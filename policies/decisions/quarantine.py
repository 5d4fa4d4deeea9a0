"""Where a drafter that collapsed is left alone, and when it is tried again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policies.estimators.acceptance_watch import ALARM, COLLAPSE, RECENT, bucket_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from policies.estimators.acceptance_watch import AcceptanceWatch, Collapse

FIRST_WAIT, MAX_WAIT = 8, 32
"""Steps before the first try, and at most between two. A round of tries takes a step
where four requests can be tried, and ten or so where it is one, so that a cause that
has ended is found out within 50 in 98 of 100 cases where two in five drafts or more are
usual. It costs such a round of one draft each in every 32."""

MAX_PROBES = 4
"""Requests tried in a step."""

MAX_ROUND = 24
"""Steps of a round that comes to no end: whoever is tried has no drafts after all, or
so few are usual that rejected ones say little."""

RECOVERED, STILL_BAD = 3.0, -2.0
"""Log-likelihood ratios, of half the usual acceptance over that of a collapse, that end
a round: about three drafts accepted, or six rejected where seven in ten are usual."""


@dataclass(slots=True)
class Quarantine:
    """Requests of which drafts are not verified from some position on.

    Attributes:
        reason: `position`, if the first drafts are still accepted; else `context` (from
            some length on), `class` or `all`.
        class_index: Whose; None for all classes.
        from_context: The shortest context, in tokens.
        position: Drafts before it are verified as usual; 0 for none.
        cause: The alarm.
        is_probing: A round of tries is under way.
        num_rounds: Rounds that have failed.
        num_steps: It has lasted.
    """

    reason: str
    class_index: int | None
    from_context: int
    position: int
    cause: Collapse
    is_probing: bool = False
    num_rounds: int = 0
    num_steps: int = 0
    _num_waited: int = 0
    _evidence: float = 0.0
    _num_accepted: float = 0.0
    _num_expected: float = 0.0

    @property
    def wait(self) -> int:
        """Steps until the next round."""
        return min(FIRST_WAIT << min(self.num_rounds, 8), MAX_WAIT)

    @property
    def wants_probes(self) -> bool:
        """Whether a round is under way, or begins with this step if it can."""
        return self.is_probing or self._num_waited + 1 >= self.wait

    @property
    def rebuilds(self) -> bool:
        """Whether this round fills the drafter's KV anew: the 1st, 2nd, 4th, 8th."""
        return self.num_rounds & (self.num_rounds + 1) == 0

    @property
    def verifies(self) -> bool:
        """Whether drafts are tried: not in a round's first step, which makes them."""
        return self.is_probing and self._num_waited > 0

    @property
    def cells(self) -> tuple[slice, slice]:
        """The buckets and classes that are watched for it."""
        index = self.class_index
        classes = slice(None) if index is None else slice(index, index + 1)
        return slice(bucket_of(self.from_context), None), classes

    def covers(self, class_index: int, num_context_tokens: int) -> bool:
        """Tell whether it is about a request."""
        return num_context_tokens >= self.from_context and self.class_index in (
            None,
            class_index,
        )

    def contains(self, other: Quarantine) -> bool:
        """Tell whether another one has nothing to add."""
        return (
            self.position <= other.position
            and self.from_context <= other.from_context
            and self.class_index in (None, other.class_index)
        )

    def pick_probes(self, num_reqs: int) -> Iterator[int]:
        """Return which of its requests are tried, others in every round."""
        first = self.num_rounds * MAX_PROBES
        return ((first + i) % num_reqs for i in range(min(num_reqs, MAX_PROBES)))

    def note_step(self, *, can_try: bool = True) -> None:
        """Count a step: begin a round that is due, and end one that leads nowhere.

        Args:
            can_try: Whether there is anybody to try; else a round waits for somebody.
        """
        self.num_steps += 1
        self._num_waited += 1
        if self.is_probing and self._num_waited > MAX_ROUND:
            # One that did judge drafts would say as little if it came again at once.
            self.num_rounds += self._num_expected > 0.0
            self._rest()
        elif can_try and not self.is_probing and self._num_waited >= self.wait:
            self.is_probing = True
            self._num_waited = 0
            self._evidence = self._num_accepted = self._num_expected = 0.0

    def judge(self, *, is_accepted: bool, expected: float) -> bool:
        """Take in what became of a try; return whether the drafter has recovered.

        Args:
            is_accepted: The draft at `position` was; all before it were.
            expected: Its usual acceptance, 0-1.
        """
        if not self.verifies:
            return False
        works, collapsed = expected / 2.0, expected / COLLAPSE
        if is_accepted:
            self._evidence += math.log(works / collapsed)
        else:
            self._evidence += math.log((1.0 - works) / (1.0 - collapsed))
        self._num_accepted += is_accepted
        self._num_expected += expected
        if self._evidence <= STILL_BAD:
            self.num_rounds += 1
            self._rest()
        return self._evidence >= RECOVERED

    def _rest(self) -> None:
        self.is_probing = False
        self._num_waited = 0

    def release(self, watch: AcceptanceWatch) -> None:
        """Have all that it was about watched again, by what the tries have shown."""
        if self.position == 0:
            watch.relearn(*self.cells, self._num_accepted, self._num_expected)


@dataclass(slots=True)
class Quarantines:
    """All that are in force; who they are about may overlap."""

    active: list[Quarantine] = field(default_factory=list)

    def find(self, class_index: int, num_context_tokens: int) -> Quarantine | None:
        """Return the strictest one about a request, None for none."""
        found = None
        for one in self.active:
            if one.covers(class_index, num_context_tokens) and (
                found is None or one.position < found.position
            ):
                found = one
        return found

    def add(self, cause: Collapse, watch: AcceptanceWatch, step: int) -> Quarantine:
        """Answer an alarm as narrowly as what else is known allows.

        All contexts are meant, unless drafts of shorter ones are accepted since it
        began; or, if none were judged since, they were accepted of late and those of
        this length were not. All classes are, unless drafts of another one are
        accepted at such contexts.
        """
        bucket, class_index, position = cause.cell
        good, seen = watch.last_good[:, :, position], watch.last_seen[:, :, position]
        is_good = (watch.suspicion[:, :, position] < ALARM / 4) & (good >= cause.since)
        shorter, recent = (slice(0, bucket), class_index), step - RECENT
        was_good_here = (
            good[bucket, class_index] >= recent
            and watch.longest_good[cause.cell] >= cause.from_context
        )
        is_longer = is_good[shorter].any() or not (
            was_good_here
            or (seen[shorter] >= cause.since).any()
            or (good[: bucket + 1, class_index] < recent).all()
        )
        from_context = cause.from_context if is_longer else 0
        others = is_good[bucket if from_context else 0 :].copy()
        others[:, class_index] = False
        has_class = bool(others.any())
        reason = "all"
        if position > 0:
            reason = "position"
        elif from_context > 0:
            reason = "context"
        elif has_class:
            reason = "class"
        new = Quarantine(
            reason, class_index if has_class else None, from_context, position, cause
        )
        self.active = [one for one in self.active if not new.contains(one)]
        self.active.append(new)
        watch.suspend(*new.cells, position)
        return new
