"""Reads the events of one streamed completion into an `Outcome`."""

import json
from collections.abc import Mapping
from typing import Any

from .outcome import CORRUPT, CUT, EMPTY, MALFORMED, STREAM_ERROR, Outcome
from .sse import ServerSentEvent

_DONE = "[DONE]"
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal")
MAX_DETAIL = 300


class ChatStream:
    """Follows one stream of chat completion chunks.

    A delivery is what one read from the network brought. It may hold several events,
    and an event several tokens; so gaps are between deliveries, and tokens are counted
    by the server's usage, in the last chunk that has it. The chunk that only opens
    the assistant's turn is no token. The one that only carries a finish reason is: the
    model spent a step on the token that ended the reply.
    """

    def __init__(self, outcome: Outcome) -> None:
        """Begin; times in the outcome are those given to `take`."""
        self._outcome = outcome
        self._response_id: str | None = None
        self._num_text_events = 0
        self._is_done = False

    def take(self, event: ServerSentEvent, read_s: float) -> None:
        """Take over the next event, completed by bytes that were read at `read_s`."""
        if event.data == _DONE:
            self._is_done = True
            return
        try:
            chunk = json.loads(event.data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self._fail(MALFORMED, f"not a JSON object: {event.data}")
            return
        error = chunk.get("error")
        if error or event.event == "error":
            self._fail(STREAM_ERROR, describe_error(error or chunk))
            return
        # Azure begins with a chunk about the prompt whose id is empty.
        own = chunk.get("id") or self._response_id
        if self._response_id not in (None, own):
            self._fail(CORRUPT, f"chunks of {self._response_id} and of {own}")
        self._response_id = self._response_id or own
        self._take_usage(chunk.get("usage") or {})
        for choice in chunk.get("choices") or ():
            text = _text_of(choice.get("delta") or {})
            ended = choice.get("finish_reason")
            if text and self._outcome.finish_reason is not None:
                self._fail(CORRUPT, "text after the finish reason")
            self._num_text_events += bool(text)
            if text or ended:
                self._outcome.finish_reason = ended or self._outcome.finish_reason
                self._deliver(read_s)

    def end(self, *, is_complete: bool) -> None:
        """Conclude: complete is what ended as HTTP says it must, between two events."""
        outcome, num_texts = self._outcome, self._num_text_events
        if not outcome.counted_by_server:
            outcome.output_tokens = num_texts
        elif outcome.output_tokens < num_texts:
            # Every event with text holds at least one token.
            tokens = f"{outcome.output_tokens} tokens"
            self._fail(CORRUPT, f"{num_texts} events with text for {tokens}")
        if not self._is_done and not (is_complete and outcome.finish_reason):
            self._fail(CUT, f"ended after {outcome.num_deliveries} deliveries")
        elif outcome.finish_reason is None and outcome.first_s is not None:
            self._fail(CUT, "end marker without a finish reason")
        elif outcome.first_s is None:
            self._fail(EMPTY, "the stream held no token")

    def _take_usage(self, usage: Mapping[str, Any]) -> None:
        count = usage.get("completion_tokens")
        if count is not None:
            details = usage.get("prompt_tokens_details") or {}
            self._outcome.output_tokens = count
            self._outcome.counted_by_server = True
            self._outcome.prompt_tokens = usage.get("prompt_tokens")
            self._outcome.cached_tokens = details.get("cached_tokens")

    def _deliver(self, read_s: float) -> None:
        outcome = self._outcome
        if outcome.first_s is None:
            outcome.first_s = read_s
        elif outcome.last_s is not None and read_s > outcome.last_s:
            outcome.gaps_ms.append(1e3 * (read_s - outcome.last_s))
        else:
            return  # Came with what was read before.
        outcome.last_s = read_s
        outcome.num_deliveries += 1

    def _fail(self, kind: str, detail: str) -> None:
        """Keep the first failure: the others follow from it."""
        if self._outcome.failure is None:
            self._outcome.failure, self._outcome.detail = kind, detail[:MAX_DETAIL]


def describe_error(error: Any) -> str:
    """Return the message of an OpenAI error object, or whatever it is."""
    return str((isinstance(error, dict) and error.get("message")) or error)


def _text_of(delta: Mapping[str, Any]) -> str:
    """Return what a chunk adds to the reply, tool calls included."""
    parts = [delta.get(name) for name in _TEXT_FIELDS]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [function.get("name"), function.get("arguments")]
    return "".join(str(part) for part in parts if part)
