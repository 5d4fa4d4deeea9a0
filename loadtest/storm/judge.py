"""What became of streams: whole and equal, forgiven, corrupted, failed."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import httpx
import pandas as pd

from .cases import Case
from .streams import Stream

NEAR_TIE: Final = 1e-4
"""Of the two likeliest tokens' log probabilities: float32 cannot tell them apart in
batches of another shape."""

_MAX_EXAMPLES: Final = 20


class Judge:
    """Compares streams with those of an undisturbed run.

    Attributes:
        counts: Streams by what became of them: `equal`, `forgiven` (they part where
            the target's likeliest tokens tie), `whole` (sampled: nothing to compare
            with), `corrupted`, `failed`, `cut` (their front was killed).
        examples: Of what failed, was corrupted or forgiven, a few.
    """

    def __init__(
        self, url: str, model: str, undisturbed: Iterable[Stream], *, may_cut: bool
    ) -> None:
        """Know what is right: one undisturbed stream of every case.

        The server is asked about ties; `may_cut` if the storm breaks connections.
        """
        self._url, self._model, self._may_cut = url, model, may_cut
        self._right: Mapping[Case, Stream] = {one.case: one for one in undisturbed}
        self.counts: Counter[str] = Counter()
        self.examples: list[dict[str, Any]] = []

    def judge(self, stream: Stream) -> None:
        """Count what became of a stream."""
        what, why = self._compare(stream)
        self.counts[what] += 1
        if why and len(self.examples) < _MAX_EXAMPLES:
            example = {"what": what, "kind": stream.case.kind, "why": why}
            self.examples.append(example)

    def _compare(self, stream: Stream) -> tuple[str, str]:
        if stream.error is not None:
            is_cut = stream.is_cut and self._may_cut
            return "cut" if is_cut else "failed", stream.error
        if not stream.case.is_greedy:
            return "whole", ""
        right = self._right[stream.case]
        if stream.token_ids == right.token_ids and stream.text == right.text:
            return "equal", ""
        ids, known = stream.token_ids[0], right.token_ids[0]
        pairs = enumerate(zip(ids, known, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(known)))
        gap = self._gap(stream.case, known[:at])
        why = f"parts at token {at} of {len(known)}, likeliest two {gap:.1e} apart"
        return "forgiven" if gap < NEAR_TIE else "corrupted", why

    def _gap(self, case: Case, before: list[int]) -> float:
        """Return how far apart the next token's two likeliest are; inf if unknown."""
        prompt = case.body(self._model).get("prompt")
        if not isinstance(prompt, str):
            return float("inf")
        tokens = self._ask("/tokenize", prompt=prompt)["tokens"]
        one = {"max_tokens": 1, "temperature": 0, "logprobs": 2}
        answer = self._ask("/v1/completions", prompt=tokens + before, **one)
        likeliest = answer["choices"][0]["logprobs"]["top_logprobs"][0].values()
        first, second, *_ = sorted(likeliest, reverse=True)
        return float(first - second)

    def _ask(self, path: str, **body: Any) -> Any:
        body["model"] = self._model
        return httpx.post(f"{self._url}{path}", json=body, timeout=60).json()


def describe_stalls(
    streams: Iterable[Stream], kills: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Return how long streams stood still, by what was killed, in milliseconds.

    Counted are all streams under way at a kill; those of the engines that live on go
    on as ever, so that the median is of the kinder half.
    """
    streams = list(streams)
    gaps = [(k["kind"], one.gap_at(k["at_s"])) for k in kills for one in streams]
    table = pd.DataFrame(gaps, columns=["kind", "gap_s"]).dropna()
    by_kind = (1e3 * table["gap_s"].astype(float)).groupby(table["kind"])
    found = by_kind.describe(percentiles=[0.5, 0.9, 0.99]).round(1)
    names = {"count": "streams", "max": "max_ms"}
    names |= {f"{q}%": f"p{q}_ms" for q in (50, 90, 99)}
    return dict(found[[*names]].rename(columns=names).T.to_dict())
