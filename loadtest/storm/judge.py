"""What became of streams: whole and equal, forgiven, corrupted, failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx
import numpy as np

if TYPE_CHECKING:
    from .cases import Case
    from .streams import Stream

NEAR_TIE: Final = 1e-4
"""Of the two likeliest tokens' log probabilities: float32 cannot tell them apart in
batches of another shape."""


@dataclass(slots=True)
class Verdict:
    """Counts, and what was wrong.

    Attributes:
        counts: Streams by what became of them: `equal`, `forgiven` (they part where
            the target's likeliest tokens tie), `whole` (sampled: nothing to compare
            with), `corrupted`, `failed`, `cut` (their front was killed).
        examples: Of what failed or was corrupted, a few.
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def note(self, what: str, stream: Stream, why: str = "") -> None:
        """Count a stream."""
        self.counts[what] += 1
        if why and len(self.examples) < 20:
            self.examples.append({"what": what, "kind": stream.case.kind, "why": why})


class Judge:
    """Compares streams with those of an undisturbed run."""

    def __init__(
        self, url: str, model: str, undisturbed: Iterable[Stream], *, may_cut: bool
    ) -> None:
        """Know what is right.

        Args:
            url: Of the server, which is asked about ties.
            model: Its name.
            undisturbed: One stream of every case.
            may_cut: Whether a broken connection is what the storm did.
        """
        self._url, self._model, self._may_cut = url, model, may_cut
        self._right: Mapping[Case, Stream] = {one.case: one for one in undisturbed}

    def judge(self, streams: Iterable[Stream]) -> Verdict:
        """Return what became of all streams."""
        verdict = Verdict()
        for stream in streams:
            self._judge(stream, verdict)
        return verdict

    def _judge(self, stream: Stream, verdict: Verdict) -> None:
        if stream.error is not None:
            is_cut = stream.is_cut and self._may_cut
            verdict.note("cut" if is_cut else "failed", stream, stream.error)
            return
        if not stream.case.is_greedy:
            verdict.note("whole", stream)
            return
        right = self._right[stream.case]
        if stream.token_ids == right.token_ids and stream.text == right.text:
            verdict.note("equal", stream)
            return
        ids, known = stream.token_ids[0], right.token_ids[0]
        at = next(
            (i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b),
            min(len(ids), len(known)),
        )
        gap = self._gap(stream.case, known[:at])
        why = f"parts at token {at} of {len(known)}, likeliest two {gap:.1e} apart"
        verdict.note("forgiven" if gap < NEAR_TIE else "corrupted", stream, why)

    def _gap(self, case: Case, before: list[int]) -> float:
        """Return how far apart the next token's two likeliest are; inf if unknown."""
        prompt = case.body(self._model).get("prompt")
        if prompt is None:
            return float("inf")
        tokens = httpx.post(
            f"{self._url}/tokenize",
            json={"model": self._model, "prompt": prompt},
            timeout=60,
        ).json()["tokens"]
        answer = httpx.post(
            f"{self._url}/v1/completions",
            json={
                "model": self._model,
                "prompt": tokens + before,
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": 2,
            },
            timeout=60,
        ).json()
        likeliest = answer["choices"][0]["logprobs"]["top_logprobs"][0].values()
        first, second, *_ = sorted(likeliest, reverse=True)
        return float(first - second)


def describe_stalls(
    streams: Iterable[Stream], kills: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Return how long streams stood still, by what was killed, in milliseconds.

    Counted are all streams under way at a kill; those of the engines that live on go
    on as ever, so that the median is of the kinder half.
    """
    streams = list(streams)
    gaps: dict[str, list[float]] = {}
    for kill in kills:
        found = (stream.gap_at(kill["at_s"]) for stream in streams)
        gaps.setdefault(kill["kind"], []).extend(1e3 * one for one in found if one)
    return {
        kind: {
            "streams": len(some),
            **{
                f"p{q}_ms": round(float(np.percentile(some, q)), 1)
                for q in (50, 90, 99)
            },
            "max_ms": round(max(some), 1),
        }
        for kind, some in gaps.items()
        if some
    }
