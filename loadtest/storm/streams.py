"""Streams as their clients see them: tokens, text, and when each part came."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from loadtest.client.sse import SseDecoder

from .cases import Case

TIMEOUT_S: Final = 300.0
"""Of a stream: time enough for all engines to start anew."""


@dataclass(slots=True)
class Stream:
    """One stream; what is kept by number is so by choice.

    Attributes:
        text: Arguments of tool calls included.
        times_s: When parts came, monotonic; the first is when it was sent.
        error: Why it failed.
        is_cut: Whether the connection broke: its front is gone.
        num_tokens: Of all choices, as the server counts them at the end.
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

    @property
    def is_whole(self) -> bool:
        """Whether every answer has come to its end."""
        num_ended = len(self.finish_reasons)
        return self.error is None and num_ended == self.case.num_answers

    def gap_at(self, when_s: float) -> float | None:
        """Return how long nothing came around a time; None if it was not under way."""
        before = [one for one in self.times_s if one <= when_s]
        after = [one for one in self.times_s if one > when_s]
        return after[0] - before[-1] if before and after else None

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
            probabilities = choice.get("logprobs") or {}
            self.logprobs[index] += probabilities.get("token_logprobs") or []
            delta = choice.get("delta") or {}
            self.text[index] += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                self.text[index] += call["function"].get("arguments") or ""
            if choice.get("finish_reason"):
                self.finish_reasons[index] = choice["finish_reason"]


async def _run(
    session: aiohttp.ClientSession, url: str, model: str, stream: Stream
) -> None:
    """Ask once and read to the end; a failure is kept in the stream."""
    case, decoder = stream.case, SseDecoder()
    try:
        async with session.post(f"{url}{case.path}", json=case.body(model)) as answer:
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
    except TimeoutError as error:
        stream.error = repr(error)
    except aiohttp.ClientError as error:
        stream.error, stream.is_cut = repr(error), True
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
