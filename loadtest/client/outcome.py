"""What became of one request, and the names of all the ways it can fail."""

from __future__ import annotations

from dataclasses import dataclass, field

# How a request can fail.
CUT = "cut"  # The stream ended without finish reason or end marker: a part of a reply.
CORRUPT = "corrupt"  # The stream contradicts itself, e.g. two replies mixed in one.
STREAM_ERROR = "stream_error"  # The server reported an error within the stream.
MALFORMED = "malformed"  # An event that is no JSON object.
EMPTY = "empty"  # A stream that ended properly without a single token.
CONNECTION = "connection"  # There was none, or what came over it was no response.
TIMEOUT = "timeout"  # Nothing came for the read timeout, or the whole took too long.
HTTP_PREFIX = "http_"  # Followed by the status of a response that is no success.
UNFINISHED = "unfinished"  # Not answered when the run's time to drain was over.


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds since the run began, by the client's clock.

    Attributes:
        id: Sent to the server as `X-Request-Id`.
        turn: Position in its conversation, from 0.
        scheduled_s: When it should have been sent. Differs from `sent_s` only in open
            loop, where latency counts from here: a client that comes late must not
            make the server look faster (coordinated omission).
        first_s: When the first token arrived; the latest one did at `last_s`.
        end_s: When the response ended, one way or the other.
        gaps_ms: Times between deliveries of tokens. What was read at once is one
            delivery, however many tokens or events it carries.
        cached_tokens: The part of the prompt found in the prefix cache.
        output_tokens: As the server counted them; otherwise text events, a lower bound.
        failure: None for success, else one of the kinds above.
        detail: What the server or the network said about a failure.
    """

    id: str
    workload: str = ""
    turn: int = 0
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    end_s: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    num_deliveries: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted_by_server: bool = False
    finish_reason: str | None = None
    status: int | None = None
    failure: str | None = None
    detail: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the whole reply arrived."""
        return self.failure is None

    @property
    def is_cut(self) -> bool:
        """Whether its stream broke off, with an error event or without a word.

        Not when we ended it ourselves, with the run.
        """
        if self.failure in (None, UNFINISHED):
            return False
        has_begun = self.status is not None and 200 <= self.status < 300
        return self.failure == CUT or (has_begun and self.finish_reason is None)

    @property
    def send_lag_ms(self) -> float:
        """How late the client was, in ms."""
        return 1e3 * (self.sent_s - self.scheduled_s)

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token in ms, from the moment it should have been sent."""
        return None if self.first_s is None else 1e3 * (self.first_s - self.scheduled_s)

    @property
    def waited_ms(self) -> float:
        """How long it has taken at least, in ms, from when it should have been sent."""
        return 1e3 * (self.end_s - self.scheduled_s)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first, in ms; None below two tokens.

        Of the whole reply, so that it does not matter how tokens were grouped into
        events. Source: the definition of `vllm bench serve`.
        """
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return 1e3 * (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float | None:
        """Time to the last token in ms, from the moment it should have been sent."""
        return None if self.last_s is None else 1e3 * (self.last_s - self.scheduled_s)

    def meets(self, ttft_target_ms: float | None, tpot_target_ms: float | None) -> bool:
        """Tell whether it counts towards goodput: complete, and within both targets."""
        if not self.is_ok or self.ttft_ms is None:
            return False
        tpot_ms = self.tpot_ms or 0.0
        return (ttft_target_ms is None or self.ttft_ms <= ttft_target_ms) and (
            tpot_target_ms is None or tpot_ms <= tpot_target_ms
        )
