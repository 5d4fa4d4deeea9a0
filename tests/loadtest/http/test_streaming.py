"""What the client reports about streams, against a stand-in that sends scripts."""

from __future__ import annotations

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

from loadtest.client.outcome import Outcome
from loadtest.client.sse import SseDecoder
from loadtest.client.streaming import Misbehaviour, StreamingClient

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
WAIT_S = 120.0


def pieces(*sent: object) -> Script:
    """A script that sends the same to everyone."""

    def script(_: Mapping[str, Any]) -> Iterator[object]:
        yield from sent

    return script


def take_turns(script: Script) -> Script:
    """Have the client read what was sent before a pause, however busy the machine is.

    Else it might find two pieces at once, which are one delivery then.
    """
    loop = gevent.get_hub().loop

    def let_loop_turn(done: threading.Event) -> None:
        # What can be read in the first turn has been read before the third.
        for _ in range(3):
            gevent.sleep(0.001)
        done.set()

    def in_turns(body: Mapping[str, Any]) -> Iterator[object]:
        for piece in script(body):
            if isinstance(piece, float):
                done = threading.Event()
                loop.run_callback_threadsafe(gevent.spawn, let_loop_turn, done)
                # A client that has gone turns no more.
                done.wait(10)
            yield piece

    return in_turns


def fall_silent(*sent: object) -> tuple[Script, threading.Event]:
    """A script that sends nothing more until the event is set."""
    is_over = threading.Event()

    def script(_: Mapping[str, Any]) -> Iterator[object]:
        yield from sent
        is_over.wait(WAIT_S)

    return script, is_over


def request(
    script: Script,
    misbehaviour: Misbehaviour | None = None,
    *,
    late_s: float = 0.0,
    read_timeout_s: float = 10.0,
    **options: Any,
) -> Outcome:
    """Send one request to a stand-in that replies with a script."""
    outcome = Outcome(id="request-1")
    in_turns = take_turns(script)
    with run_stand_in(StandIn(in_turns, **options)) as server:
        client = StreamingClient(server.url, read_timeout_s=read_timeout_s)
        began_s = time.perf_counter() - late_s
        client.run(BODY, outcome, began_s, misbehaviour)
        client.close()
    assert server.ids == ["request-1"]
    return outcome


# Server-sent events


STREAM = (
    b': ping\n\ndata: {"a": "\xc3\xa4"}\n\n'
    b"event: error\r\ndata: one\r\ndata: two\r\n\r\n"
    b"id: 7\nretry: 5\ndata:no space\n\n"
)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_where_the_stream_is_cut_into_pieces(cuts):
    ends = [0, *sorted(cuts), len(STREAM)]
    decoder = SseDecoder()
    events = [
        e
        for begin, end in itertools.pairwise(ends)
        for e in decoder.feed(STREAM[begin:end])
    ]
    assert [(e.event, e.data) for e in events] == [
        ("", '{"a": "ä"}'),
        ("error", "one\ntwo"),
        ("", "no space"),
    ]
    assert decoder.is_between_events


def test_an_event_without_its_empty_line_never_comes_out():
    decoder = SseDecoder()
    assert not list(decoder.feed(b"data: half\n"))
    assert not decoder.is_between_events


# Complete streams


@pytest.mark.parametrize("chunked", [True, False])
def test_times_and_tokens_of_a_plain_stream(chunked):
    outcome = request(plain_reply(STEP_S), chunked=chunked)
    assert outcome.is_ok
    assert (outcome.output_tokens, outcome.prompt_tokens) == (3, 7)
    assert outcome.num_deliveries == 3
    # Sleeping never takes less than asked; the opening chunk is no token, but comes at
    # the same time as the first one here.
    assert outcome.ttft_ms >= 1e3 * STEP_S
    assert len(outcome.gaps_ms) == 2
    assert outcome.tpot_ms == pytest.approx(sum(outcome.gaps_ms) / 2)
    assert outcome.e2e_ms == pytest.approx(outcome.ttft_ms + sum(outcome.gaps_ms))
    assert outcome.end_s >= outcome.last_s


def test_the_chunk_that_opens_the_turn_is_not_the_first_token():
    outcome = request(
        pieces(chunk(""), STEP_S, chunk("a", finish="stop") + usage(1, 1) + DONE)
    )
    assert outcome.is_ok
    assert outcome.num_deliveries == 1
    assert outcome.ttft_ms >= 1e3 * STEP_S


def test_events_that_arrive_together_are_one_delivery():
    outcome = request(
        pieces(
            chunk("a"),
            STEP_S,
            chunk("b") + chunk("c") + chunk("d", finish="stop") + usage(1, 4) + DONE,
        )
    )
    assert outcome.is_ok
    assert outcome.num_deliveries == 2
    assert len(outcome.gaps_ms) == 1
    assert outcome.tpot_ms == pytest.approx(outcome.gaps_ms[0] / 3)


def test_tokens_are_counted_by_the_server_when_events_hold_several():
    outcome = request(
        pieces(chunk("a b c"), STEP_S, chunk("d e f", finish="stop"), usage(9, 6), DONE)
    )
    assert outcome.counted_by_server
    assert outcome.output_tokens == 6
    assert outcome.tpot_ms == pytest.approx(outcome.gaps_ms[0] / 5)


def test_an_event_cut_within_a_character_is_put_together():
    data = chunk("a") + chunk("ü", finish="stop") + usage(1, 2) + DONE
    middle = data.index("ü".encode()) + 1 if "ü".encode() in data else len(data) // 2
    outcome = request(pieces(data[:middle], STEP_S, data[middle:]))
    assert outcome.is_ok
    assert outcome.output_tokens == 2


def test_a_token_without_text_counts_when_every_chunk_carries_usage():
    def counted(text: str, count: int, finish: str | None = None) -> bytes:
        counts = {"prompt_tokens": 4, "completion_tokens": count}
        return chunk(text, finish=finish, usage=counts)

    outcome = request(
        pieces(
            counted("", 0),
            counted("a", 1),
            STEP_S,
            counted("", 2),  # Half a character: text is held back.
            STEP_S,
            counted("ü", 4, "stop"),
            DONE,
        )
    )
    assert outcome.is_ok
    assert (outcome.num_deliveries, outcome.output_tokens) == (3, 4)


def test_without_usage_events_with_text_are_counted_and_said_to_be():
    outcome = request(pieces(chunk("a"), chunk("b", finish="stop"), DONE))
    assert outcome.is_ok
    assert outcome.output_tokens == 2
    assert not outcome.counted_by_server


def test_tool_calls_and_reasoning_are_output():
    def delta(**fields: Any) -> bytes:
        return event({"choices": [{"delta": fields, "finish_reason": None}]})

    call = [{"index": 0, "function": {"name": "add", "arguments": "{}"}}]
    outcome = request(
        pieces(
            delta(role="assistant", content=""),
            STEP_S,
            delta(reasoning_content="hm"),
            STEP_S,
            delta(tool_calls=call),
            chunk(finish="tool_calls") + DONE,
        )
    )
    assert outcome.is_ok
    assert outcome.output_tokens == 2
    assert outcome.ttft_ms >= 1e3 * STEP_S


def test_text_completions_are_read_too():
    outcome = request(
        pieces(
            event({"choices": [{"text": "a", "finish_reason": None}]}),
            event({"choices": [{"text": "b", "finish_reason": "stop"}]}),
            DONE,
        )
    )
    assert outcome.is_ok
    assert outcome.output_tokens == 2


def test_cached_prompt_tokens_are_noted():
    counts = {
        "prompt_tokens": 20,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    last = event({"choices": [], "usage": counts})
    assert request(pieces(chunk("a", finish="stop"), last, DONE)).cached_tokens == 16


def test_a_late_client_does_not_make_the_server_look_faster():
    prompt = request(plain_reply(STEP_S))
    late = request(plain_reply(STEP_S), late_s=1.0)
    assert late.send_lag_ms >= 1000 > prompt.send_lag_ms
    assert late.ttft_ms >= 1000 + 1e3 * STEP_S
    assert late.e2e_ms >= 1000 + 3e3 * STEP_S
    # How fast tokens follow each other has nothing to do with when it was sent.
    assert late.tpot_ms < 1000


# Failures


@pytest.mark.parametrize("chunked", [True, False])
def test_a_stream_that_breaks_off_is_cut_and_keeps_what_it_had(chunked):
    outcome = request(pieces(chunk("a"), STEP_S, chunk("b"), CLOSE), chunked=chunked)
    assert outcome.failure == "cut"
    assert outcome.is_failed
    assert outcome.num_deliveries == 2
    assert outcome.output_tokens == 2


def test_a_stream_that_ends_in_an_event_is_cut():
    outcome = request(pieces(chunk("a"), b'data: {"choi', CLOSE), chunked=False)
    assert outcome.failure == "cut"


def test_an_end_marker_without_a_finish_reason_is_a_cut():
    assert request(pieces(chunk("a"), DONE)).failure == "cut"


def test_a_clean_end_after_the_finish_reason_needs_no_marker():
    assert request(pieces(chunk("a", finish="stop"))).is_ok


def test_an_error_in_mid_stream_is_reported_with_its_words():
    error = event({"error": {"message": "engine died", "code": 500}})
    outcome = request(pieces(chunk("a"), error, DONE))
    assert (outcome.failure, outcome.detail) == ("stream_error", "engine died")


def test_an_error_in_mid_stream_is_the_cause_of_the_cut_that_follows():
    error = event({"error": {"message": "engine died"}})
    assert request(pieces(chunk("a"), error, CLOSE)).failure == "stream_error"


@pytest.mark.parametrize(
    ("sent", "failure"),
    [
        ([chunk("a"), event("{half"), DONE], "malformed"),
        ([chunk("a"), b"data: \xff\xfe\n\n", DONE], "malformed"),
        ([chunk(""), DONE], "empty"),
        ([chunk("a", finish="stop"), chunk("b"), usage(1, 2), DONE], "corrupt"),
        ([chunk("a"), chunk("b", finish="stop"), usage(1, 1), DONE], "corrupt"),
        ([chunk("a"), event({"id": "chat-2", "choices": []}), DONE], "corrupt"),
    ],
    ids=[
        "no JSON",
        "no UTF-8",
        "no token",
        "text after the end",
        "more texts than tokens",
        "two replies in one",
    ],
)
def test_streams_that_contradict_themselves_have_failed(sent, failure):
    assert request(pieces(*sent)).failure == failure


@pytest.mark.parametrize("status", [400, 429, 503])
def test_a_refusal_is_named_by_its_status_and_words(status):
    outcome = request(pieces(b'{"error": {"message": "no room"}}'), status=status)
    assert outcome.failure == f"http_{status}"
    assert (outcome.status, outcome.detail) == (status, "no room")


def test_nobody_listening_is_a_failed_connection():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        outcome = Outcome(id="request-1")
        StreamingClient(url).run(BODY, outcome, time.perf_counter())
    assert outcome.failure == "connection"


def test_a_server_that_hangs_up_without_a_word_is_a_failed_connection():
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    outcome = Outcome(id="request-1")
    hanging = gevent.get_hub().threadpool.spawn(lambda: listener.accept()[0].close())
    StreamingClient(url, read_timeout_s=5).run(BODY, outcome, time.perf_counter())
    hanging.get()
    listener.close()
    assert outcome.failure == "connection"


def test_silence_is_a_timeout():
    script, is_over = fall_silent(chunk("a"))
    outcome = request(script, read_timeout_s=2.0)
    is_over.set()
    assert outcome.failure == "timeout"
    assert outcome.num_deliveries == 1


# What chaos has clients do


def test_a_dropped_stream_is_not_the_servers_failure():
    outcome = request(plain_reply(STEP_S), Misbehaviour("drop", drop=True))
    assert outcome.failure == "client_dropped"
    assert not outcome.is_failed
    assert not outcome.meets(None, None)


def test_a_stalled_stream_is_read_to_its_end():
    outcome = request(plain_reply(0.0), Misbehaviour("stall", stall_s=0.3))
    assert outcome.is_ok
    assert outcome.chaos == "stall"
    assert outcome.end_s >= 0.3


def test_a_request_that_is_killed_is_unfinished():
    outcome = Outcome(id="request-1")
    script, is_over = fall_silent()
    with run_stand_in(StandIn(script)) as server:
        client = StreamingClient(server.url)
        running = gevent.spawn(client.run, BODY, outcome, time.perf_counter())
        deadline_s = time.monotonic() + WAIT_S
        while not server.bodies:
            assert time.monotonic() < deadline_s
            gevent.sleep(0.02)
        running.kill()
        is_over.set()
    assert outcome.failure == "unfinished"
    assert outcome.is_failed


def test_a_request_that_outlasts_the_run_is_unfinished_and_not_a_timeout():
    outcome = Outcome(id="request-1")
    script, is_over = fall_silent()
    with run_stand_in(StandIn(script)) as server:
        client = StreamingClient(server.url)
        client.run(BODY, outcome, time.perf_counter(), give_up_s=0.2)
        is_over.set()
    assert outcome.failure == "unfinished"
    assert outcome.end_s >= 0.2


# Outcomes


def test_goodput_wants_both_targets_met():
    outcome = Outcome(id="a", first_s=0.1, last_s=0.3, output_tokens=3)
    assert outcome.meets(100.001, 100.001)
    assert not outcome.meets(99, None)
    assert not outcome.meets(None, 99)
    assert outcome.meets(None, None)


def test_a_reply_of_one_token_has_no_time_per_token():
    outcome = Outcome(id="a", first_s=0.1, last_s=0.1, output_tokens=1)
    assert outcome.tpot_ms is None
    assert outcome.meets(200, 1)


def test_an_outcome_reads_back_from_its_record():
    outcome = Outcome(id="a", first_s=0.1, gaps_ms=[1.0, 2.5], failure="cut")
    assert Outcome.from_dict({**outcome.as_dict(), "new": 1}) == outcome


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused(host):
    with pytest.raises(ValueError, match="--host"):
        StreamingClient(host)
