"""What became of streams: whole and equal, forgiven, corrupted, failed."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np

from .cases import Case
from .changes import CHANGES
from .streams import Stream

NEAR_TIE: Final = 1e-4
"""Of the two likeliest tokens' log probabilities: float32 cannot tell them apart in
batches of another shape."""

_CUT_WITHIN_S: Final = 10.0
"""What its front takes along breaks at once; whatever breaks later broke by itself."""

_MAX_EXAMPLES: Final = 20


class Judge:
    """Compares streams with those of an undisturbed run.

    Attributes:
        counts: Streams by what became of them: `equal`, `forgiven` (they part where
            the target's likeliest tokens tie), `whole` (sampled: only counted),
            `corrupted`, `failed`, `cut` (a front was killed meanwhile).
        examples: Of what failed, was corrupted or forgiven, a few.
    """

    def __init__(
        self, undisturbed: Iterable[Stream], front_kills_s: Collection[float]
    ) -> None:
        """Know what is right: one undisturbed stream of every case, which tells ties.

        And when fronts were killed, monotonic.
        """
        self._right: Mapping[Case, Stream] = {one.case: one for one in undisturbed}
        self._front_kills_s = front_kills_s
        self.counts: Counter[str] = Counter()
        self.examples: list[dict[str, Any]] = []

    def judge(self, stream: Stream) -> str:
        """Count what became of a stream, and return it."""
        what, why = self._compare(stream)
        self.counts[what] += 1
        if why and what != "cut" and len(self.examples) < _MAX_EXAMPLES:
            example = {"what": what, "kind": stream.case.kind, "why": why}
            self.examples.append(example)
        return what

    def _compare(self, stream: Stream) -> tuple[str, str]:
        if stream.error is not None:
            return "cut" if self._is_cut(stream) else "failed", stream.error
        right = self._right[stream.case]
        if not stream.case.is_greedy:
            num_tokens = sum(map(len, stream.token_ids.values()))
            if num_tokens == stream.num_tokens == right.num_tokens:
                return "whole", ""
            return "corrupted", f"{num_tokens} tokens, {stream.num_tokens} by usage"
        what = stream.differs_from(right)
        if what is None:
            return "equal", ""
        if what != "token_ids":
            return "corrupted", f"{what} differ"
        parting = [
            _part(stream.token_ids.get(index, []), known, right.leads.get(index, []))
            for index, known in right.token_ids.items()
            if stream.token_ids.get(index) != known
        ]
        lead = max((lead for lead, _ in parting), default=math.inf)
        where = ", ".join(where for _, where in parting) or "other answers"
        return "forgiven" if lead < NEAR_TIE else "corrupted", where

    def _is_cut(self, stream: Stream) -> bool:
        return stream.is_cut and any(
            stream.times_s[0] <= at_s <= stream.ended_s <= at_s + _CUT_WITHIN_S
            for at_s in self._front_kills_s
        )


def _part(ids: list[int], known: list[int], leads: list[float]) -> tuple[float, str]:
    """Return by how much the right token led where an answer parts, and where.

    The lead is inf if it is unknown, or if the one is the other's begin.
    """
    pairs = enumerate(zip(ids, known, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:
        return math.inf, f"has {len(ids)} tokens of {len(known)}"
    lead = leads[at] if at < len(leads) else math.inf
    return lead, f"parts at token {at} of {len(known)}, likeliest two {lead:.1e} apart"


def describe_stalls(
    streams: Iterable[Stream],
    kills: Iterable[Mapping[str, Any]],
    replays: Mapping[str, int],
) -> dict[str, dict[str, dict[str, float]]]:
    """Return how long streams stood still, by what was killed, in milliseconds.

    Of `all` streams under way, and of those that were `replayed` alone: each at so many
    of its kills, where it stood still longest. Of what operators do, which lasts, those
    count that were under way meanwhile.
    """
    gaps_s: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for stream in streams:
        found = [
            (stream.gap_at(one["at_s"], _lasts_s(one)), one["kind"]) for one in kills
        ]
        stood = [(gap_s, kind) for gap_s, kind in found if gap_s is not None]
        # No engine dies with a front.
        may_move = [one for one in stood if one[1] != "front"]
        moved = heapq.nlargest(replays.get(stream.request_id, 0), may_move)
        for of, those in (("all", stood), ("replayed", moved)):
            for gap_s, kind in those:
                gaps_s[kind][of].append(gap_s)
    return {
        kind: {of: _describe(those) for of, those in own.items()}
        for kind, own in gaps_s.items()
    }


def _lasts_s(kill: Mapping[str, Any]) -> float:
    return (kill["recovered_after_s"] or 0.0) if kill["kind"] in CHANGES else 0.0


def describe_timeline(
    streams: Iterable[Stream], began_s: float
) -> list[dict[str, float]]:
    """Return, for every second, streams under way and parts of them that came."""
    streams = list(streams)
    starts, ends = (
        np.array([one.times_s[at] for one in streams if one.times_s]) - began_s
        for at in (0, -1)
    )
    came_s = np.concatenate([one.times_s[1:] for one in streams] or [[]]) - began_s
    seconds = np.arange(math.ceil(max(came_s, default=0.0)))
    parts, _ = np.histogram(came_s, [*seconds, len(seconds)])
    return [
        {
            "at_s": int(at_s),
            "streams": int(np.sum((starts <= at_s) & (ends > at_s))),
            "parts": int(num_parts),
        }
        for at_s, num_parts in zip(seconds, parts, strict=True)
    ]


def _describe(gaps_s: list[float]) -> dict[str, float]:
    names = ("p50_ms", "p90_ms", "p99_ms", "max_ms")
    found = (1e3 * np.percentile(gaps_s, (50, 90, 99, 100))).round(1).tolist()
    return {"streams": len(gaps_s), **dict(zip(names, found, strict=True))}
