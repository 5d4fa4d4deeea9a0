"""Which replica takes a request: where it adds most to the cluster's goodput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_SAMPLED = 2
"""Replicas looked at, besides the one that holds the prompt's beginning.

With state that is a step old, choosing the best of all would send what several fronts
have to the same replica; the better of two comes close to it and does not herd.

Source: Mitzenmacher, The power of two choices in randomized load balancing, 2001.
"""

_NUM_TRIES = 4
"""Draws before all are looked at for one that can take a request."""


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

    _USUAL_REQUESTS = 8
    _WEIGHT = 0.02

    def __init__(self) -> None:
        """Assume that half of a usual step is its base."""
        self._base_share = 0.5

    def learn(self, base_ms: float, request_ms: float) -> None:
        """Learn from a replica's own split, ms."""
        own_share = base_ms / (base_ms + self._USUAL_REQUESTS * request_ms)
        self._base_share += self._WEIGHT * (own_share - self._base_share)

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
        base = self._base_share
        request = (1.0 - base) / self._USUAL_REQUESTS
        now = max(1, num_requests)
        level_ms = (base_ms + request_ms * now) / (base + request * now)
        return level_ms * base, level_ms * request


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


def goodput_gain(
    load: ReplicaLoad, num_prompt_tokens: int, num_reply_tokens: float
) -> float:
    """Predict what a request adds to the replica's goodput while it is there.

    It brings its own tokens, and takes from those of its neighbours: every step grows
    by `request_ms`, and its prompt is computed in their time.

    Args:
        load: Before the request.
        num_prompt_tokens: To be computed, cached ones left out.
        num_reply_tokens: Expected, > 0.

    Returns:
        Tokens per second; negative if the neighbours lose more than it brings.

    Source: the goodput model of `policies.goodput`, over a request's life.
    """
    before, after = load.num_requests, load.num_requests + 1
    before_ms, after_ms = load.step_ms(before), load.step_ms(after)
    num_waiting = load.num_prompt_tokens + num_prompt_tokens
    prompt_ms = load.prompt_token_ms * num_prompt_tokens
    wait_ms = load.prompt_token_ms * num_waiting
    reply_ms = num_reply_tokens / load.tokens_per_step * after_ms
    neighbours = before * load.tokens_per_step
    # What they would have put out in that time, less what they still do.
    taken = neighbours * (prompt_ms + reply_ms) / before_ms if before else 0.0
    left = neighbours * reply_ms / after_ms
    return 1e3 * (num_reply_tokens + left - taken) / (wait_ms + reply_ms)


def choose_replica(
    count: int,
    describe: Callable[[int], Candidate | None],
    draw: Callable[[int], int],
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
        draw: Returns a random integer from 0 to below its argument.
        num_prompt_tokens: Of the request.
        num_reply_tokens: Expected of it.
        holder: Index of the replica with the longest beginning of the prompt cached.

    Returns:
        None if no replica can take it.
    """
    found: dict[int, Candidate] = {}
    sampled: set[int] = set()
    for _ in range(_NUM_TRIES):
        if len(sampled) >= min(NUM_SAMPLED, count):
            break
        _look(draw(count), describe, found, sampled)
    if not sampled:
        begin = draw(count) if count else 0
        for offset in range(count):
            if _look((begin + offset) % count, describe, found, sampled):
                break
    if holder is not None:
        _look(holder, describe, found)
    if not found:
        return None
    if len(found) == 1:
        (index,) = found
        return Choice(index, "only")
    for index, candidate in found.items():
        if candidate.load is None:
            # What it can do shows once it does something.
            return Choice(index, "unknown")
    best = max(
        found,
        key=lambda index: _value(found[index], num_prompt_tokens, num_reply_tokens),
    )
    return Choice(best, "gain" if best in sampled else "prefix")


def _look(
    index: int,
    describe: Callable[[int], Candidate | None],
    found: dict[int, Candidate],
    sampled: set[int] | None = None,
) -> bool:
    candidate = found.get(index) or describe(index)
    if candidate is None:
        return False
    found[index] = candidate
    if sampled is not None:
        sampled.add(index)
    return True


def _value(
    candidate: Candidate, num_prompt_tokens: int, num_reply_tokens: float
) -> tuple[float, float]:
    load = candidate.load
    assert load is not None
    missing = max(0, num_prompt_tokens - candidate.num_cached_tokens)
    gain = goodput_gain(load, missing, num_reply_tokens)
    # Where a step costs by its requests alone, no place gains: then where it is faster.
    return gain, -load.step_ms(load.num_requests + 1) / load.tokens_per_step


class PrefixHolders:
    """Remembers which replica has computed which beginning of a prompt.

    Holders may have dropped it since: what is not in the cache costs its computation,
    as it would elsewhere.
    """

    def __init__(
        self, block_tokens: int = 128, max_blocks: int = 32, capacity: int = 16_384
    ) -> None:
        """Remember nothing yet.

        Args:
            block_tokens: Beginnings are told apart by so many tokens.
            max_blocks: Blocks of a prompt that are looked at.
            capacity: Blocks remembered; those not met for longest go first.
        """
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._capacity = capacity
        self._holders: dict[int, str] = {}

    def find(self, token_ids: Sequence[int]) -> tuple[str, int] | None:
        """Return who holds the longest beginning, and its tokens; None if nobody."""
        found = None
        for number, key in enumerate(self._keys(token_ids), start=1):
            holder = self._holders.get(key)
            if holder is None:
                break
            found = holder, number * self._block_tokens
        return found

    def note(self, token_ids: Sequence[int], replica: str) -> None:
        """Remember that a replica computes this prompt."""
        for key in self._keys(token_ids):
            self._holders.pop(key, None)
            self._holders[key] = replica
        while len(self._holders) > self._capacity:
            del self._holders[next(iter(self._holders))]

    def _keys(self, token_ids: Sequence[int]) -> list[int]:
        size, keys, key = self._block_tokens, [], 0
        num_blocks = min(self._max_blocks, len(token_ids) // size)
        for begin in range(0, num_blocks * size, size):
            key = hash((key, tuple(token_ids[begin : begin + size])))
            keys.append(key)
        return keys
