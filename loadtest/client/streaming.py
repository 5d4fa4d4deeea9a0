"""The client: posts a request and follows its stream, on gevent."""

import json
import math
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import gevent
from gevent import Timeout
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError

from .chat_stream import MAX_DETAIL, ChatStream, describe_error
from .outcome import CONNECTION, CUT, HTTP_PREFIX, TIMEOUT, UNFINISHED, Outcome
from .sse import SseDecoder

_MAX_CONNECTIONS = 100_000
_TOTAL_TIMEOUT_S = 600.0


class StreamingClient:
    """Keeps connections to one endpoint; usable from many greenlets at once.

    Locust's own FastHttpUser cannot be used for streams: its `iter_lines` waits for
    blocks of 1 KiB, so that first tokens seem late, and it takes a connection that
    breaks for the end of the reply. Here the clock is read as soon as the kernel has
    handed over bytes, before they are parsed.
    """

    def __init__(
        self,
        host: str,
        *,
        headers: Mapping[str, str] | None = None,
        read_timeout_s: float = 120.0,
    ) -> None:
        """Connect to nothing yet; a path of the host's is put before the endpoint's."""
        self._path = urlsplit(host).path.rstrip("/") + "/v1/chat/completions"
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._http = HTTPClient.from_url(
            host,
            concurrency=_MAX_CONNECTIONS,
            connection_timeout=read_timeout_s,
            network_timeout=read_timeout_s,
        )
        # Else the end of a long prompt may wait for an acknowledgement (Nagle).
        # Its pool has this hook, but takes no class of pool.
        pool: Any = self._http._connection_pool
        no_delay = socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        pool.after_connect = lambda connection: connection.setsockopt(*no_delay)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def run(
        self,
        body: Mapping[str, Any],
        outcome: Outcome,
        began_s: float,
        *,
        give_up_s: float = math.inf,
    ) -> None:
        """Send one request and write into `outcome` what became of it.

        Never raises for anything that the server or the network does.

        Args:
            body: The request; must ask for a stream.
            outcome: With id and time of schedule filled in.
            began_s: `time.perf_counter()` at the begin of the run.
            give_up_s: When the run is over: the request is then unfinished, not failed.
        """
        outcome.sent_s = time.perf_counter() - began_s
        left_s = max(give_up_s - outcome.sent_s, 0.0)
        deadline = Timeout.start_new(min(_TOTAL_TIMEOUT_S, left_s))
        try:
            self._exchange(json.dumps(body).encode(), outcome, began_s)
        except (Timeout, TimeoutError) as error:
            has_ended = error is deadline and left_s < _TOTAL_TIMEOUT_S
            _fail(outcome, UNFINISHED if has_ended else TIMEOUT, _why(error))
        except gevent.GreenletExit:
            _fail(outcome, UNFINISHED, "still running when the run ended")
            raise
        except (OSError, HTTPParseError, UnicodeDecodeError) as error:
            lost = CONNECTION if outcome.status is None else CUT
            _fail(outcome, lost, _why(error))
        finally:
            deadline.close()
            outcome.end_s = time.perf_counter() - began_s

    def _exchange(self, payload: bytes, outcome: Outcome, began_s: float) -> None:
        headers = {**self._headers, "X-Request-Id": outcome.id}
        response: Any = self._http.request("POST", self._path, payload, headers)
        try:
            read_s = time.perf_counter() - began_s
            outcome.status = response.status_code
            if not 200 <= outcome.status < 300:
                text = response.read().decode(errors="replace")
                _fail(outcome, f"{HTTP_PREFIX}{outcome.status}", _message_in(text))
                return
            stream, decoder = ChatStream(outcome), SseDecoder()
            feed = response.feed

            def feed_and_time(data: bytes) -> None:
                nonlocal read_s
                read_s = time.perf_counter() - began_s
                feed(data)

            response.feed = feed_and_time
            is_complete = False
            try:
                while line := response.readline(b"\n"):
                    for event in decoder.feed(line):
                        stream.take(event, read_s)
                for event in decoder.feed(response.read()):
                    stream.take(event, read_s)
                is_complete = decoder.is_between_events
            finally:
                stream.end(is_complete=is_complete)
        finally:
            # Breaks the cycle through our closure; a pooled socket must not wait for
            # the garbage collector.
            vars(response).pop("feed", None)
            response.release()


def _fail(outcome: Outcome, kind: str, detail: str) -> None:
    """Set the cause in the place of what followed from it, but not of its own cause.

    A stream that breaks off has been called cut by the time its exception is seen;
    why it broke off says more. An error that the server reported first says most.
    """
    if outcome.failure in (None, CUT):
        outcome.failure, outcome.detail = kind, detail[:MAX_DETAIL]


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _message_in(text: str) -> str:
    """Return the message of an OpenAI error object, or the text itself."""
    try:
        answer = json.loads(text)
        return describe_error(answer.get("error", answer))
    except (ValueError, AttributeError):
        return text
