"""Which replica takes a request: where it adds most to the cluster's goodput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from policies.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

MAX_STATE_AGE_S: Final = 2.0
"""A replica speaks four times a second; what is older than this decides nothing."""

NUM_SAMPLED = 2
"""Replicas looked at, besides the one that holds the prompt's beginning.

With state that is a step old, choosing the best of all would send what several fronts
have to the same replica; the better of two comes close to it and does not herd.

Source: Mitzenmacher, The power of two choices in randomized load balancing, 2001.
"""

MAX_AHEAD = 16
"""Requests that a prefix's holder may have more than a sampled replica that has fewest.

With late telemetry the holder of much gets more of it before the front hears what that
does to its steps. A quarter of 64 seats; as `balance_abs_threshold` of SGLang's router,
which is 32, of which too much is left to show.
"""

_NUM_TRIES = 4
"""Draws before all are looked at for one that can take a request."""

NUM_DRAWS = _NUM_TRIES + 1
"""Random numbers that a decision needs."""

NUM_COLUMNS = 6
"""Of a table of loads: the attributes of `ReplicaLoad`, in their order."""

USUAL_BASE_SHARE = 0.5
"""Of a usual step that is its base, while nothing has been learnt."""

_USUAL_REQUESTS = 8
_SHARE_WEIGHT = 0.02


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one more request would meet at a replica.

    Attributes:
        base_ms: Of a step, whatever it holds.
        request_ms: Of each request in it, its drafts included.
        prompt_token_ms: Of each prompt token computed.
        tokens_per_step: Of each request in each step, accepted drafts included; >= 1.
        num_requests: That it has, or will have in a moment.
        num_prompt_tokens: That it has still to compute.
    """

    base_ms: float
    request_ms: float
    prompt_token_ms: float
    tokens_per_step: float
    num_requests: int
    num_prompt_tokens: int = 0

    def step_ms(self, num_requests: int) -> float:
        """Predict how long a step takes."""
        return self.base_ms + self.request_ms * num_requests


class CommonShape:
    """How cost grows with load, shared by replicas that are alike.

    One that has always had about as many requests cannot tell its base from its cost a
    request; taken at its word, a wrong split would make it draw everything, or nothing.
    Of each replica its own level is believed, where it is: that is what a neighbour
    changes. The split is averaged over all.
    """

    def __init__(self) -> None:
        """Assume that half of a usual step is its base."""
        self._base_share = USUAL_BASE_SHARE

    def learn(self, base_ms: float, request_ms: float) -> None:
        """Learn from a replica's own split, ms."""
        self._base_share = learn_share(
            self._base_share, float(base_ms), float(request_ms)
        )

    def fit(
        self, base_ms: float, request_ms: float, num_requests: int
    ) -> tuple[float, float]:
        """Return a replica's costs with the common split.

        Args:
            base_ms: Of its steps, by its own estimate.
            request_ms: Of each request, likewise.
            num_requests: That it has now; both estimates agree there.

        Returns:
            Base and cost a request, ms.
        """
        return fit_share(
            self._base_share, float(base_ms), float(request_ms), num_requests
        )


@compiled
def learn_share(base_share: float, base_ms: float, request_ms: float) -> float:
    """Return what `CommonShape` keeps after it has learnt from a replica's split."""
    own_share = base_ms / (base_ms + _USUAL_REQUESTS * request_ms)
    return base_share + _SHARE_WEIGHT * (own_share - base_share)


@compiled
def fit_share(
    base_share: float, base_ms: float, request_ms: float, num_requests: int
) -> tuple[float, float]:
    """Do what `CommonShape.fit` does."""
    request = (1.0 - base_share) / _USUAL_REQUESTS
    now = max(1, num_requests)
    level_ms = (base_ms + request_ms * now) / (base_share + request * now)
    return level_ms * base_share, level_ms * request


class Candidate(NamedTuple):
    """A replica that may be chosen.

    Attributes:
        load: What the request would meet there, None if nothing is known of it.
        num_cached_tokens: Tokens at the prompt's beginning that it has in its cache.
    """

    load: ReplicaLoad | None
    num_cached_tokens: int = 0


class Choice(NamedTuple):
    """What was decided, and why.

    Attributes:
        replica: Index of the candidate.
        reason: `gain`, `prefix` where the holder of the prompt's beginning won over
            one that was sampled, `only` where nothing else could take it, or `unknown`
            where nothing is known of one of them.
    """

    replica: int
    reason: str


@compiled
def goodput_gain(
    load: NDArray[np.float64], num_prompt_tokens: int, num_reply_tokens: float
) -> tuple[float, float]:
    """Predict what a request adds to the replica's goodput while it is there.

    It brings its own tokens, and takes from those of its neighbours: every step grows
    by `request_ms`, and its prompt is computed in their time.

    Args:
        load: `[NUM_COLUMNS]`, before the request, as `ReplicaLoad`.
        num_prompt_tokens: To be computed, cached ones left out.
        num_reply_tokens: Expected, > 0.

    Returns:
        Tokens per second, negative if the neighbours lose more than it brings; and the
        pace that decides among equal gains. Where a step costs by its requests alone,
        no place gains: then where it is faster.

    Source: the goodput model of `policies.goodput`, over a request's life.
    """
    base_ms, request_ms, prompt_token_ms = load[0], load[1], load[2]
    tokens_per_step, before = load[3], load[4]
    before_ms = base_ms + request_ms * before
    after_ms = base_ms + request_ms * (before + 1.0)
    prompt_ms = prompt_token_ms * num_prompt_tokens
    wait_ms = prompt_token_ms * (load[5] + num_prompt_tokens)
    reply_ms = num_reply_tokens / tokens_per_step * after_ms
    neighbours = before * tokens_per_step
    # What they would have put out in that time, less what they still do.
    taken = neighbours * (prompt_ms + reply_ms) / before_ms if before > 0.0 else 0.0
    left = neighbours * reply_ms / after_ms
    gain = 1e3 * (num_reply_tokens + left - taken) / (wait_ms + reply_ms)
    return gain, -after_ms / tokens_per_step


@compiled
def find_best(
    loads: NDArray[np.float64],
    num_cached_tokens: NDArray[np.int64],
    num_prompt_tokens: int,
    num_reply_tokens: float,
) -> int:
    """Return which of some replicas gains most by a request, the first among equals.

    Args:
        loads: `[num_candidates, NUM_COLUMNS]`, rows as `ReplicaLoad`; one at least.
        num_cached_tokens: `[num_candidates]`, of the prompt's beginning.
        num_prompt_tokens: Of the request.
        num_reply_tokens: Expected of it.
    """
    best, most, fastest = 0, -np.inf, -np.inf
    for place in range(loads.shape[0]):
        missing = max(0, num_prompt_tokens - num_cached_tokens[place])
        gain, pace = goodput_gain(loads[place], missing, num_reply_tokens)
        if gain > most or (gain == most and pace > fastest):
            best, most, fastest = place, gain, pace
    return best


class _Row(Protocol):
    """A list or an array; or what finds out when it is asked."""

    def __getitem__(self, place: int, /) -> Any: ...


def sample_two(can_take: _Row, count: int, draws: _Row) -> tuple[int, int]:
    """Draw `NUM_SAMPLED` replicas that can take a request.

    Where draws find none, the next one from a random place on.

    Args:
        can_take: `[count]`, looked at only where a draw leads.
        count: Replicas.
        draws: `[NUM_DRAWS]`, random numbers from 0 to below 1.

    Returns:
        Places; -1 for none.
    """
    first = -1
    for tried in range(_NUM_TRIES if count else 0):
        if first < 0:
            place = int(draws[tried] * count)
            if can_take[place]:
                first = place
        elif count > 1:
            # Among the others: of two, both are looked at.
            place = int(draws[tried] * (count - 1))
            place += place >= first
            if can_take[place]:
                return first, place
    if first < 0 and count:
        begin = int(draws[_NUM_TRIES] * count)
        for offset in range(count):
            place = (begin + offset) % count
            if can_take[place]:
                return place, -1
    return first, -1


sample_two_compiled = compiled(sample_two)
"""The same over an array; a front's replicas are described in Python as they come."""


@compiled
def fewer_of_two(
    num_requests: NDArray[np.int64], count: int, draws: NDArray[np.float64]
) -> int:
    """Return which of `NUM_SAMPLED` random replicas has fewer requests.

    For when nothing better is known: late news of what has ended makes every replica
    seem full, and a count of one's own is late by no more than that.

    Args:
        num_requests: `[>= count]`, as whoever chooses counts them.
        count: Replicas, >= 1.
        draws: `[>= NUM_SAMPLED]`, random numbers from 0 to below 1.
    """
    best = int(draws[0] * count)
    if count > 1:
        other = int(draws[1] * (count - 1))
        other += other >= best
        if num_requests[other] < num_requests[best]:
            best = other
    return best


def choose_replica(
    count: int,
    describe: Callable[[int], Candidate | None],
    draw: Callable[[], float],
    *,
    num_prompt_tokens: int,
    num_reply_tokens: float,
    holder: int | None = None,
) -> Choice | None:
    """Choose among `NUM_SAMPLED` random replicas and the one that holds the prefix.

    Takes the same time however many replicas there are, unless nearly all are full.

    Args:
        count: Replicas.
        describe: Describes a replica by its index, None if it can take nothing now.
        draw: Returns a random number from 0 to below 1.
        num_prompt_tokens: Of the request.
        num_reply_tokens: Expected of it.
        holder: Index of the replica with the longest beginning of the prompt cached.

    Returns:
        None if no replica can take it.
    """
    looks = _Looks(describe)
    sampled = sample_two(looks, count, [draw() for _ in range(NUM_DRAWS)])
    if holder is not None and holder not in sampled:
        fewest = min(
            (looks.num_requests(one) for one in sampled if one >= 0), default=0
        )
        if looks[holder] and looks.num_requests(holder) - fewest > MAX_AHEAD:
            del looks.found[holder]
    found = list(looks.found.items())
    if not found:
        return None
    if len(found) == 1:
        return Choice(found[0][0], "only")
    loads = []
    for index, candidate in found:
        if candidate.load is None:
            # What it can do shows once it does something.
            return Choice(index, "unknown")
        loads.append(candidate.load)
    cached = np.array([one.num_cached_tokens for _, one in found], np.int64)
    best, _ = found[
        find_best(_tabulate(loads), cached, num_prompt_tokens, float(num_reply_tokens))
    ]
    return Choice(best, "gain" if best in sampled else "prefix")


def warm_up() -> None:
    """Take a made-up decision, so that no request waits for compilers."""
    shape = CommonShape()
    shape.learn(1.0, 1.0)
    load = ReplicaLoad(*shape.fit(1.0, 1.0, 1), 1.0, 1.0, 1)
    choose_replica(
        *(2, lambda _index: Candidate(load), lambda: 0.0),
        num_prompt_tokens=1,
        num_reply_tokens=1.0,
    )
    fewer_of_two(np.zeros(1, np.int64), 1, np.zeros(NUM_SAMPLED))


class _Looks:
    """Tells which replicas can take a request, and keeps what they described."""

    def __init__(self, describe: Callable[[int], Candidate | None]) -> None:
        self.found: dict[int, Candidate] = {}
        self._describe = describe

    def __getitem__(self, index: int) -> bool:
        candidate = self.found.get(index) or self._describe(index)
        if candidate is None:
            return False
        self.found[index] = candidate
        return True

    def num_requests(self, index: int) -> int:
        """Return how many it has that was found to take one; 0 if that is unknown."""
        load = self.found[index].load
        return 0 if load is None else load.num_requests


def _tabulate(loads: Sequence[ReplicaLoad]) -> NDArray[np.float64]:
    """Return `[num_candidates, NUM_COLUMNS]`."""
    return np.array(
        [
            (
                *(one.base_ms, one.request_ms, one.prompt_token_ms),
                *(one.tokens_per_step, one.num_requests, one.num_prompt_tokens),
            )
            for one in loads
        ],
        np.float64,
    )
