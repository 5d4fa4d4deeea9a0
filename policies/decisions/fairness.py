"""Whose turn it is: fair shares of the replicas' time between flows that wait.

A flow is what shares alike: the requests of one class, or of one client in it. Time is
shared, not turns, for a long request costs a replica more than ten short ones.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from policies.decisions.routing import ReplicaLoad

T = TypeVar("T")

OVERDUE_SHARE: Final = 4
"""One turn in so many goes to what is overdue. With more, a backlog of what is not
urgent would, once it is old, shut out all that is."""

_TICKS_PER_MS: Final = 1e3
"""Costs are summed in whole microseconds, whose sums do not drift."""


class Turn(NamedTuple):
    """What a request takes, and from whose share.

    Attributes:
        flow: Whose.
        cost_ms: Of a replica's time, predicted, >= 0.
        weight: Of the flow's share, > 0.
        tier: Smaller ones go before; flows share within one.
    """

    flow: str
    cost_ms: float
    weight: float = 1.0
    tier: int = 0


@dataclass(slots=True)
class _Flow(Generic[T]):
    """One flow's requests by arrival, with their costs in ticks."""

    weight: float
    waiting: OrderedDict[T, int] = field(default_factory=OrderedDict)
    backlog: int = 0
    deficit: float = 0.0
    has_its_quantum: bool = False


@dataclass(slots=True)
class _Ring(Generic[T]):
    """Flows of one tier, in the order of their turns."""

    flows: OrderedDict[str, _Flow[T]] = field(default_factory=OrderedDict)
    backlog: int = 0
    num_waiting: int = 0
    weight: float = 0.0
    num_visits: int = 0

    def add(self, item: T, turn: Turn, cost: int) -> None:
        flow = self.flows.get(turn.flow)
        if flow is None:
            flow = self.flows[turn.flow] = _Flow(turn.weight)
            self.weight += turn.weight
        flow.waiting[item] = cost
        flow.backlog += cost
        self.backlog += cost
        self.num_waiting += 1

    def remove(self, name: str, item: T) -> int:
        """Take something out, served or not; return its cost."""
        flow = self.flows[name]
        cost = flow.waiting.pop(item)
        flow.backlog -= cost
        self.backlog -= cost
        self.num_waiting -= 1
        if not flow.waiting:
            # Who comes back has saved nothing up, and owes nothing.
            del self.flows[name]
            self.weight -= flow.weight
        return cost

    def next(self) -> T:
        """Grant quanta until some flow can pay for its first request.

        A round grants each flow the mean cost of what waits, on average: so it serves
        about as many requests as it visits flows, whatever the weights and costs. Where
        all owe more than that, rounds that would serve nobody are granted at once.
        """
        for num_visits in itertools.count():
            if num_visits and num_visits % (2 * len(self.flows)) == 0:
                self._grant_rounds()
            name, flow = next(iter(self.flows.items()))
            item, cost = next(iter(flow.waiting.items()))
            if cost <= flow.deficit or len(self.flows) == 1:
                return item
            self.num_visits += 1
            if flow.has_its_quantum:
                flow.has_its_quantum = False
                self.flows.move_to_end(name)
                continue
            flow.has_its_quantum = True
            flow.deficit += self._quantum(flow)
        raise AssertionError("rounds that are granted end every debt")

    def _quantum(self, flow: _Flow[T]) -> float:
        mean_cost = self.backlog / self.num_waiting
        return mean_cost * flow.weight * len(self.flows) / self.weight

    def _grant_rounds(self) -> None:
        """Grant as many rounds as nobody could pay after."""
        num_rounds = min(
            (next(iter(flow.waiting.values())) - flow.deficit) // self._quantum(flow)
            for flow in self.flows.values()
        )
        if num_rounds > 0:
            for flow in self.flows.values():
                flow.deficit += num_rounds * self._quantum(flow)

    def serve(self, name: str, item: T) -> None:
        """Take something out, and let its flow pay for it."""
        flow, is_alone = self.flows[name], len(self.flows) == 1
        cost = self.remove(name, item)
        if not is_alone:
            flow.deficit -= cost


class FairQueue(Generic[T]):
    """Requests that wait: some first, then by tier, then fair between flows.

    Within a tier it is deficit round robin over predicted time, by weight; within a
    flow, first come first served. Every operation takes amortised constant time in the
    requests and flows that wait (logarithmic for what goes first); only the number of
    tiers counts. One turn in `OVERDUE_SHARE` goes to what has waited longest, once that
    is overdue, at its flow's cost: no tier starves another.

    Source: Shreedhar and Varghese, Efficient fair queuing using deficit round-robin,
    1995. That the quantum follows the mean cost is ours.
    """

    def __init__(self, max_wait_s: float) -> None:
        """Hold nothing yet.

        Args:
            max_wait_s: What has waited longer is overdue.
        """
        self._max_wait_s = max_wait_s
        self._rings: dict[int, _Ring[T]] = {}
        self._tiers: list[int] = []
        # By arrival: since when it waits, and its place.
        self._waiting: OrderedDict[T, tuple[float, Turn]] = OrderedDict()
        # By arrival: its number, cost and flow.
        self._first: dict[T, tuple[int, int, str]] = {}
        self._first_order: list[tuple[int, int, T]] = []
        self._first_backlog = 0
        self._arrivals = itertools.count()
        self._num_turns = 0

    def __len__(self) -> int:
        """Count what waits."""
        return len(self._waiting) + len(self._first)

    def __contains__(self, item: T) -> bool:
        """Return whether something waits."""
        return item in self._waiting or item in self._first

    @property
    def num_visits(self) -> int:
        """Steps of the round robin that gave nobody a turn, in tiers that wait."""
        return sum(ring.num_visits for ring in self._rings.values())

    def is_behind(self, turn: Turn) -> bool:
        """Return whether what is more urgent waits, or more of a request's own flow."""
        if not self._tiers or self._tiers[0] > turn.tier:
            return False
        return self._tiers[0] < turn.tier or turn.flow in self._rings[turn.tier].flows

    def count(self) -> dict[str, int]:
        """Count what waits by flow."""
        counts = Counter(flow for _, _, flow in self._first.values())
        for ring in self._rings.values():
            for name, flow in ring.flows.items():
                counts[name] += len(flow.waiting)
        return counts

    def add(self, item: T, turn: Turn, now_s: float, *, first: bool) -> None:
        """Let something wait for its turn.

        Args:
            item: What waits; by its hash.
            turn: What it takes.
            now_s: Monotonic.
            first: Before all turns, and pays for none: replays have, and a flow with
                less than its share of the seats owes nothing.

        Raises:
            ValueError: It waits already, or its turn's numbers make no sense.
        """
        if item in self:
            raise ValueError(f"{item!r} waits already; remove it first")
        if not (0 <= turn.cost_ms < float("inf") and turn.weight > 0):
            raise ValueError(f"cost must be >= 0 and weight > 0, got {turn}")
        # Where nothing costs anything, no quantum would end a debt.
        cost = max(1, round(turn.cost_ms * _TICKS_PER_MS))
        if first:
            arrival = next(self._arrivals)
            self._first[item] = arrival, cost, turn.flow
            self._first_backlog += cost
            heapq.heappush(self._first_order, (turn.tier, arrival, item))
            return
        self._waiting[item] = now_s, turn
        ring = self._rings.get(turn.tier)
        if ring is None:
            ring = self._rings[turn.tier] = _Ring()
            bisect.insort(self._tiers, turn.tier)
        ring.add(item, turn, cost)

    def remove(self, item: T) -> bool:
        """Forget something; return whether it waited."""
        if item in self._first:
            self._first_backlog -= self._first.pop(item)[1]
            return True
        if item not in self._waiting:
            return False
        _, turn = self._waiting.pop(item)
        self._rings[turn.tier].remove(turn.flow, item)
        self._drop_if_empty(turn.tier)
        return True

    def peek(self, now_s: float) -> T:
        """Return what is next; something must wait."""
        if self._first:
            while True:
                _, arrival, item = self._first_order[0]
                if self._first.get(item, (None,))[0] == arrival:
                    return item
                heapq.heappop(self._first_order)
        if self._num_turns % OVERDUE_SHARE == 0:
            oldest, (since_s, _) = next(iter(self._waiting.items()))
            if now_s - since_s > self._max_wait_s:
                return oldest
        return self._rings[self._tiers[0]].next()

    def pop(self, now_s: float) -> T:
        """Give the next its turn; something must wait."""
        item = self.peek(now_s)
        self._num_turns += 1
        if item in self._first:
            self.remove(item)
            return item
        _, turn = self._waiting.pop(item)
        self._rings[turn.tier].serve(turn.flow, item)
        self._drop_if_empty(turn.tier)
        return item

    def work_ahead_ms(self, turn: Turn) -> float:
        """Predict the work that goes before a request that came now.

        What is more urgent goes first; of each flow beside its own, what its share is
        worth until the request's own flow has come to it. What comes later, and what is
        overdue in less urgent tiers, is left out. Linear in the flows.

        Returns:
            Milliseconds of one replica's time.
        """
        ahead = float(self._first_backlog)
        for tier in self._tiers:
            if tier > turn.tier:
                break
            ring = self._rings[tier]
            if tier < turn.tier:
                ahead += ring.backlog
                continue
            own = ring.flows.get(turn.flow)
            before = own.backlog if own else 0
            share = (before + turn.cost_ms * _TICKS_PER_MS) / turn.weight
            ahead += before + sum(
                min(flow.backlog, share * flow.weight)
                for name, flow in ring.flows.items()
                if name != turn.flow
            )
        return ahead / _TICKS_PER_MS

    def _drop_if_empty(self, tier: int) -> None:
        if not self._rings[tier].flows:
            del self._rings[tier]
            self._tiers.remove(tier)


def request_cost_ms(
    load: ReplicaLoad, num_prompt_tokens: int, num_reply_tokens: float
) -> float:
    """Predict what a request takes of a replica's time.

    Its prompt, and its share of each step that it is part of: what all requests there
    take in a millisecond is a millisecond.

    Args:
        load: Of a replica whose seats are taken, for else nothing has to wait.
        num_prompt_tokens: To be computed.
        num_reply_tokens: Expected.
    """
    num_requests = max(1, load.num_requests)
    step_ms = load.step_ms(num_requests) / num_requests
    prompt_ms = load.prompt_token_ms * num_prompt_tokens
    return prompt_ms + num_reply_tokens / load.tokens_per_step * step_ms
