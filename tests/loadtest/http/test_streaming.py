"""What the client reports about streams, against a stand-in that sends scripts."""

import itertools
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import gevent
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.client.chat_stream import ChatStream
from loadtest.client.health import ClientSample, watch_client
from loadtest.client.outcome import Outcome
from loadtest.client.sse import SseDecoder
from loadtest.client.streaming import StreamingClient

from .stand_in_server import (
    CLOSE,
    DONE,
    Script,
    StandIn,
    chunk,
    event,
    plain_reply,
    run_stand_in,
    usage,
)

BODY = {"model": "stand-in", "messages": [], "max_tokens": 3}
STEP_S = 0.05


def pieces(*sent: object) -> Script:
    return lambda _: iter(sent)


def fall_silent(*sent: object) -> tuple[Script, threading.Event]:
    is_over = threading.Event()

    def script(_: Mapping[str, Any]) -> Iterator[object]:
        yield from sent
        is_over.wait(120)

    return script, is_over


def request(
    script: Script, *, late_s: float = 0.0, read_timeout_s: float = 10.0, **options: Any
) -> Outcome:
    outcome = Outcome(id="request-1")
    with run_stand_in(StandIn(script, **options)) as server:
        client = StreamingClient(server.url, read_timeout_s=read_timeout_s)
        client.run(BODY, outcome, time.perf_counter() - late_s)
        client.close()
    assert server.ids == ["request-1"]
    return outcome


def follow(*sent: bytes | float) -> Outcome:
    """Read pieces without a network: what comes between two pauses is read at once."""
    outcome, decoder, read_s = Outcome(id="a"), SseDecoder(), 1.0
    stream = ChatStream(outcome)
    for piece in sent:
        if isinstance(piece, float):
            read_s += piece
        else:
            for one in decoder.feed(piece):
                stream.take(one, read_s)
    stream.end(is_complete=decoder.is_between_events)
    return outcome


STREAM = (
    b': ping\n\ndata: {"a": "\xc3\xa4"}\n\n'
    b"event: error\r\ndata: one\r\ndata: two\r\n\r\n"
    b"id: 7\nretry: 5\ndata:no space\n\n"
)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_where_the_stream_is_cut_into_pieces(cuts):
    decoder, events = SseDecoder(), []
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(STREAM)]):
        events += decoder.feed(STREAM[begin:end])
    assert [(e.event, e.data) for e in events] == [
        ("", '{"a": "ä"}'),
        ("error", "one\ntwo"),
        ("", "no space"),
    ]
    assert decoder.is_between_events
    # An event without its empty line never comes out.
    assert not list(decoder.feed(b"data: half\n"))
    assert not decoder.is_between_events


@pytest.mark.parametrize("chunked", [True, False])
def test_times_and_tokens_of_a_plain_stream(chunked):
    outcome = request(plain_reply(STEP_S), chunked=chunked)
    assert outcome.is_ok
    assert (outcome.output_tokens, outcome.prompt_tokens) == (3, 7)
    assert outcome.cached_tokens == 4
    # Sleeping never takes less than asked; the opening chunk is no token, but comes at
    # the same time as the first one here. A busy client may read two tokens at once.
    assert outcome.ttft_ms >= 1e3 * STEP_S
    assert len(outcome.gaps_ms) == outcome.num_deliveries - 1 <= 2
    assert outcome.tpot_ms == pytest.approx(sum(outcome.gaps_ms) / 2)
    assert outcome.e2e_ms == pytest.approx(outcome.ttft_ms + sum(outcome.gaps_ms))
    assert outcome.end_s >= outcome.last_s


def delta(**fields: Any) -> bytes:
    return event({"choices": [{"delta": fields, "finish_reason": None}]})


CALL = [{"index": 0, "function": {"name": "add", "arguments": "{}"}}]
END, THINK = chunk("d", finish="stop"), delta(reasoning_content="hm")


@pytest.mark.parametrize(
    ("sent", "num_deliveries", "output_tokens", "is_counted"),
    [
        # The chunk that opens the turn is no token.
        ([chunk(""), STEP_S, END + usage(1, 1) + DONE], 1, 1, True),
        # Events that arrive together are one delivery.
        ([chunk("a"), STEP_S, chunk("b") + chunk("c"), END + usage(1, 4)], 2, 4, True),
        # An event may hold several tokens.
        ([chunk("a b"), STEP_S, chunk("c d", finish="stop"), usage(9, 6)], 2, 6, True),
        # Without usage events with text are counted, and said to be.
        ([chunk("a"), STEP_S, END, DONE], 2, 2, False),
        # Reasoning and tool calls are output.
        ([THINK, STEP_S, delta(tool_calls=CALL) + END, DONE], 2, 3, False),
        # A clean end after the finish reason needs no marker.
        ([END], 1, 1, False),
        # A first chunk without an id belongs to the reply (Azure).
        ([event({"id": "", "choices": []}), END], 1, 1, False),
    ],
)
def test_a_whole_reply_is_counted(sent, num_deliveries, output_tokens, is_counted):
    outcome = follow(*sent)
    assert outcome.is_ok, outcome
    assert outcome.output_tokens == output_tokens
    assert outcome.counted_by_server is is_counted
    assert outcome.num_deliveries == num_deliveries == 1 + len(outcome.gaps_ms)
    if output_tokens > 1:
        spent_ms = 1e3 * STEP_S * (num_deliveries - 1)
        assert outcome.tpot_ms == pytest.approx(spent_ms / (output_tokens - 1))


def test_a_late_client_does_not_make_the_server_look_faster():
    prompt = request(plain_reply(STEP_S))
    late = request(plain_reply(STEP_S), late_s=1.0)
    assert late.send_lag_ms >= 1000 > prompt.send_lag_ms
    assert late.ttft_ms >= 1000 + 1e3 * STEP_S
    assert late.e2e_ms >= 1000 + 3e3 * STEP_S
    # How fast tokens follow each other has nothing to do with when it was sent.
    assert late.tpot_ms < 1000


ERROR = event({"error": {"message": "engine died", "code": 500}})
OTHER = event({"id": "chat-2", "choices": []})


@pytest.mark.parametrize(
    ("sent", "failure", "is_cut"),
    [
        ([chunk("a"), b'data: {"choi'], "cut", True),
        ([chunk("a"), DONE], "cut", True),
        ([chunk("a"), ERROR, DONE], "stream_error", True),
        # The error is the cause of the cut that follows.
        ([chunk("a"), ERROR], "stream_error", True),
        ([END, ERROR, DONE], "stream_error", False),
        ([chunk("a"), event("{half"), DONE], "malformed", True),
        ([chunk(""), DONE], "empty", True),
        # Text after the end, more texts than tokens, two replies in one.
        ([END, chunk("b"), usage(1, 2)], "corrupt", False),
        ([chunk("a"), END, usage(1, 1)], "corrupt", False),
        ([chunk("a"), OTHER, DONE], "corrupt", True),
    ],
)
def test_what_is_wrong_with_a_stream_is_named(sent, failure, is_cut):
    outcome = follow(*sent)
    outcome.status = 200
    assert (outcome.failure, outcome.is_cut) == (failure, is_cut)
    assert not outcome.is_ok
    if failure == "stream_error":
        assert outcome.detail == "engine died"


@pytest.mark.parametrize("chunked", [True, False])
def test_a_stream_that_breaks_off_is_cut_and_keeps_what_it_had(chunked):
    outcome = request(pieces(chunk("a"), STEP_S, chunk("b"), CLOSE), chunked=chunked)
    assert (outcome.failure, outcome.is_cut) == ("cut", True)
    assert outcome.output_tokens == 2
    # Unless the server has said why.
    outcome = request(pieces(chunk("a"), ERROR, CLOSE), chunked=chunked)
    assert outcome.failure == "stream_error"
    outcome = request(pieces(chunk("a"), b"data: \xff\xfe\n\n"), chunked=chunked)
    assert outcome.failure == "cut"


def test_a_refusal_is_named_by_its_status_and_words():
    outcome = request(pieces(b'{"error": {"message": "no room"}}'), status=429)
    assert (outcome.failure, outcome.status) == ("http_429", 429)
    assert (outcome.detail, outcome.is_cut) == ("no room", False)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (None, "connection"),  # Nobody listens.
        (b"", "connection"),
        (b"no such thing\r\n\r\n", "connection"),
        (CHUNKED[:24], "connection"),
        (CHUNKED + b"5\r\nda", "cut"),
        (SIZED + b"data: ", "cut"),
    ],
)
def test_a_lost_connection_is_named_by_whether_the_response_had_begun(reply, failure):
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener.accept()[0] as connection:
            received = b""
            # To the end of the body: closing before would reset the connection.
            while not received.endswith(b"}"):
                received += connection.recv(65536)
            connection.sendall(reply)

    outcome = Outcome(id="request-1")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if reply is None:
        listener.close()
    serving = reply is not None and gevent.get_hub().threadpool.spawn(serve)
    StreamingClient(url, read_timeout_s=10).run(BODY, outcome, time.perf_counter())
    if serving:
        serving.get()
    listener.close()
    assert outcome.failure == failure


def test_silence_is_a_timeout_and_the_stream_cut():
    script, is_over = fall_silent(chunk("a"))
    outcome = request(script, read_timeout_s=2.0)
    is_over.set()
    assert (outcome.failure, outcome.is_cut) == ("timeout", True)
    assert outcome.num_deliveries == 1


@pytest.mark.parametrize("is_killed", [True, False])
def test_what_the_end_of_the_run_finds_in_flight_is_unfinished(is_killed):
    outcome = Outcome(id="request-1")
    script, is_over = fall_silent()
    with run_stand_in(StandIn(script)) as server:
        given = BODY, outcome, time.perf_counter()
        client = StreamingClient(server.url)
        give_up_s = 60.0 if is_killed else 0.2
        running = gevent.spawn(client.run, *given, give_up_s=give_up_s)
        while is_killed and not server.bodies:
            gevent.sleep(0.02)
        if is_killed:
            running.kill()
        running.join()
        is_over.set()
    assert outcome.failure == "unfinished"
    assert not outcome.is_cut


def test_a_freeze_is_told_by_a_sample_a_second_as_if_every_timer_had_fired():
    samples: list[ClientSample] = []
    began_s = time.perf_counter()
    watching = gevent.spawn(watch_client, "client 0", began_s, samples.append)
    gevent.sleep(0.1)
    frozen_s = time.perf_counter()
    time.sleep(2.5)
    frozen_s = time.perf_counter() - frozen_s
    gevent.sleep(0.1)
    elapsed_s = time.perf_counter() - began_s
    watching.kill()
    seconds = [round(sample.at_s) for sample in samples]
    assert seconds == [*range(1, len(seconds) + 1)]
    assert 2 <= len(seconds) <= elapsed_s
    # One late timer among six prompt ones would be no 99th percentile.
    assert samples[0].lag_p99_ms == pytest.approx(1e3 * frozen_s - 20, abs=100)
    assert samples[0].lag_max_ms >= samples[1].lag_p99_ms
