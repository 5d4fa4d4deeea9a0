"""What is lost, what is garbled and what we did ourselves, told apart."""

from __future__ import annotations

import socket
import time

import gevent
import pytest

from loadtest.client.outcome import Outcome
from loadtest.client.streaming import Misbehaviour, StreamingClient

from .stand_in_server import CLOSE, DONE, chunk, event, plain_reply, usage
from .test_streaming import BODY, STEP_S, fall_silent, pieces, request

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def answer(reply: bytes) -> Outcome:
    """Send one request to a server that replies with these bytes and closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection = listener.accept()[0]
        with connection:
            received = b""
            # To the end of the body: closing before would reset the connection.
            while not received.endswith(b"}"):
                received += connection.recv(65536)
            connection.sendall(reply)

    outcome = Outcome(id="request-1")
    serving = gevent.get_hub().threadpool.spawn(serve)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    StreamingClient(url, read_timeout_s=10).run(BODY, outcome, time.perf_counter())
    serving.get()
    listener.close()
    return outcome


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (b"no such thing\r\n\r\n", "malformed"),
        (CHUNKED + b"xyz\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Enc", "connection"),
        (CHUNKED + b"5\r\nda", "cut"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ndata: ", "cut"),
    ],
    ids=[
        "no HTTP",
        "no chunk",
        "closed in the headers",
        "closed in a chunk",
        "closed in the body",
    ],
)
def test_bytes_that_are_no_http_are_not_taken_for_a_lost_connection(reply, failure):
    assert answer(reply).failure == failure


def test_a_first_chunk_without_an_id_belongs_to_the_reply():
    first = event({"id": "", "choices": [], "prompt_filter_results": []})
    last = chunk("a", finish="stop") + usage(1, 1) + DONE
    assert request(pieces(first, last)).is_ok


def test_streams_that_broke_off_are_cut_however_that_was_said():
    error = event({"error": {"message": "engine died"}})
    told = request(pieces(chunk("a"), error, DONE))
    assert (told.failure, told.is_cut) == ("stream_error", True)
    untold = request(pieces(chunk("a"), CLOSE))
    assert (untold.failure, untold.is_cut) == ("cut", True)
    script, is_over = fall_silent(chunk("a"))
    silent = request(script, read_timeout_s=2.0)
    is_over.set()
    assert (silent.failure, silent.is_cut) == ("timeout", True)


def test_what_never_began_what_is_whole_and_what_we_ended_is_not_cut():
    refused = request(pieces(b"{}"), status=503)
    assert (refused.is_failed, refused.is_cut) == (True, False)
    late = event({"error": {"message": "too late"}})
    after_the_end = request(pieces(chunk("a", finish="stop"), late, DONE))
    assert (after_the_end.is_failed, after_the_end.is_cut) == (True, False)
    dropped = request(plain_reply(STEP_S), Misbehaviour("drop", drop=True))
    assert (dropped.chaos, dropped.is_cut) == ("drop", False)
    unfinished = Outcome(id="a", status=200, failure="unfinished")
    assert not unfinished.is_cut


@pytest.mark.parametrize("name", ["drop", "stall"])
def test_what_would_have_befallen_a_stream_without_a_token_has_not_happened(name):
    asked = Misbehaviour(name, stall_s=5.0, drop=name == "drop")
    refused = request(pieces(b"{}"), asked, status=503)
    empty = request(pieces(DONE), asked)
    assert (refused.failure, refused.chaos) == ("http_503", None)
    assert (empty.failure, empty.chaos) == ("empty", None)
