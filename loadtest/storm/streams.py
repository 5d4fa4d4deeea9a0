"""Streams as their clients see them: tokens, text, and when each part came."""

import asyncio
import itertools
import json
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from loadtest.client.sse import SseDecoder

from .cases import Case

TIMEOUT_S: Final = 300.0
"""Of a stream: time enough for all engines to start anew."""

_SOON_S: Final = 2.0
"""After a kill all that it stops has stopped: what was on its way has come, and the
processes of a host have seen that its raylet is gone."""

_CLOSE: Final = 1e-3
"""Log probabilities in float32, from batches of other shapes, are equal."""


@dataclass(slots=True)
class Stream:
    """One stream; what is kept by number is so by choice.

    Attributes:
        text: Arguments of tool calls included.
        times_s: When parts came, monotonic; the first is when it was sent.
        error: Why it failed.
        is_cut: Whether the connection broke: its front is gone.
        num_tokens: Of all choices, as the server counts them at the end.
        leads: How far the likeliest token was above the next, in log probability, if
            the case tells ties; inf where another came out.
        num_until: Tokens of the first choice until each of `times_s`.
        ended_s: When it ended, monotonic.
        request_id: By which its front logs it.
    """

    case: Case
    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finish_reasons: dict[int, str] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)
    error: str | None = None
    is_cut: bool = False
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_tokens: int | None = None
    leads: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    prompt_ids: list[int] = field(default_factory=list)
    num_until: list[int] = field(default_factory=lambda: [0])
    ended_s: float = math.inf
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def seed(self) -> int:
        """Of its own, if it is sampled."""
        return int(self.request_id[:8], 16)

    @property
    def is_whole(self) -> bool:
        """Whether every answer has come to its end."""
        num_ended = len(self.finish_reasons)
        return self.error is None and num_ended == self.case.num_answers

    def gap_at(self, when_s: float, lasts_s: float = 0.0) -> float | None:
        """Return how long nothing came after a kill; None if it was not under way.

        What lasts, unlike a kill, may stop a stream at any time meanwhile.
        """
        at = self.find_gap(when_s, lasts_s)
        return None if at is None else self.times_s[at + 1] - self.times_s[at]

    def find_gap(self, when_s: float, lasts_s: float = 0.0) -> int | None:
        """Return which part the longest gap follows that a kill can have made.

        Parts that were on their way still come after it.
        """
        times_s, until_s = self.times_s, when_s + lasts_s
        if not times_s or times_s[0] > until_s or times_s[-1] <= when_s:
            return None
        pairs = enumerate(itertools.pairwise(times_s))
        gaps = [
            (after - before, at)
            for at, (before, after) in pairs
            if before < max(until_s, when_s + _SOON_S) and after > when_s
        ]
        return max(gaps)[1]

    def differs_from(self, expected: "Stream") -> str | None:
        """Return what is not as in another stream of its case, None if all is."""
        for name in ("token_ids", "text", "finish_reasons", "num_tokens"):
            if getattr(self, name) != getattr(expected, name):
                return name
        if not self.case.asks_logprobs:
            return None
        for index, wanted in expected.logprobs.items():
            told = self.logprobs[index]
            pairs = itertools.zip_longest(told, wanted, fillvalue=math.inf)
            if any(abs(seen - right) > _CLOSE for seen, right in pairs):
                return "logprobs"
        return None

    def record(self, began_s: float) -> dict[str, Any]:
        """Return what is to be kept, with times since `began_s`."""
        names = ("request_id", "token_ids", "text", "finish_reasons", "num_tokens")
        return {
            "kind": self.case.kind,
            "number": self.case.number,
            **{name: getattr(self, name) for name in names},
            "error": self.error,
            "at_s": [round(at_s - began_s, 4) for at_s in self.times_s],
            "num_until": self.num_until,
        }

    def take(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        if "error" in event:
            self.error = str(event["error"])
            return
        if event.get("usage"):
            self.num_tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices", ()):
            index = choice["index"]
            self.token_ids[index] += choice.get("token_ids") or []
            self.prompt_ids += choice.get("prompt_token_ids") or []
            self._take_logprobs(index, choice.get("logprobs") or {})
            delta = choice.get("delta") or {}
            self.text[index] += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                self.text[index] += call["function"].get("arguments") or ""
            if choice.get("finish_reason"):
                self.finish_reasons[index] = choice["finish_reason"]

    def _take_logprobs(self, index: int, told: dict[str, Any]) -> None:
        """Take in those of a completion, or of a chat."""
        chat = told.get("content") or []
        chosen = told.get("token_logprobs") or [one["logprob"] for one in chat]
        self.logprobs[index] += chosen
        tops = [one.values() for one in told.get("top_logprobs") or ()]
        tops += [[top["logprob"] for top in one["top_logprobs"]] for one in chat]
        for own, likeliest in zip(chosen, tops, strict=False):
            first, second, *_ = [*sorted(likeliest, reverse=True), -math.inf]
            self.leads[index].append(first - second if own == first else math.inf)


async def _run(
    session: aiohttp.ClientSession, url: str, model: str, stream: Stream
) -> None:
    """Ask once and read to the end; a failure is kept in the stream."""
    case, decoder = stream.case, SseDecoder()
    own = {"X-Request-ID": stream.request_id}
    body = case.body(model, stream.seed)
    try:
        async with session.post(f"{url}{case.path}", json=body, headers=own) as answer:
            if answer.status != 200:
                stream.error = f"{answer.status}: {await answer.text()}"
                # Serve's own words, where its front died before a stream had begun.
                is_ours = answer.content_type == "application/json"
                stream.is_cut = answer.status >= 500 and not is_ours
                return
            async for piece in answer.content.iter_any():
                for event in decoder.feed(piece):
                    if event.data != "[DONE]":
                        stream.take(json.loads(event.data))
                        stream.times_s.append(time.monotonic())
                        stream.num_until.append(len(stream.token_ids[0]))
    except aiohttp.ClientError as error:
        stream.error, stream.is_cut = repr(error), not isinstance(error, TimeoutError)
    except Exception as error:
        stream.error = repr(error)
    finally:
        stream.ended_s = time.monotonic()
    if stream.error is None and not stream.is_whole:
        stream.error, stream.is_cut = "the stream ended early", True


async def run_streams(
    url: str,
    model: str,
    cases: Iterable[Case],
    num_in_flight: int,
    streams: list[Stream] | None = None,
) -> list[Stream]:
    """Run cases, so many at a time, to the last one; return all streams in their order.

    With a list they are kept there from their begin, for who wants to look at them.
    """
    queue = iter(cases)
    streams = [] if streams is None else streams
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=num_in_flight, force_close=True),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
    ) as session:

        async def work() -> None:
            for case in queue:
                streams.append(Stream(case, times_s=[time.monotonic()]))
                await _run(session, url, model, streams[-1])

        await asyncio.gather(*(work() for _ in range(num_in_flight)))
    return streams
