"""Clients that go away: their requests end, and everybody else's go on."""

import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serving.conftest import MODEL, Server, wait_until

pytestmark = pytest.mark.ray

NUM_STREAMS = 4
MAX_TOKENS = 900


def num_running(server: Server) -> float:
    return server.total("ray_vllm_num_requests_running")


def generated(server: Server) -> float:
    return server.total("ray_vllm_generation_tokens_total")


def test_clients_that_go_free_their_places_and_disturb_nobody(server):
    """In the middle of a stream, or before there is any answer."""
    wait_until(lambda: num_running(server) == 0, 300)
    before = generated(server)

    def go_after_the_first_token(_: int) -> None:
        with server.stream(MAX_TOKENS) as answer:
            next(answer)

    with ThreadPoolExecutor() as pool:
        survivor = pool.submit(server.complete, max_tokens=300, ignore_eos=True)
        # Each goes by itself: another that waits for its place holds nobody back.
        list(pool.map(go_after_the_first_token, range(NUM_STREAMS)))
        with pytest.raises(httpx.ReadTimeout):
            server.complete(timeout=0.5, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert survivor.result().json()["usage"]["completion_tokens"] == 300
    wait_until(lambda: num_running(server) == 0, 300)
    # Had the abandoned streams run on, they alone would have made this many.
    assert generated(server) - before < NUM_STREAMS * MAX_TOKENS


def connect(server: Server, content: bytes) -> socket.socket:
    """Send some bytes, over a connection that takes back few unless they are read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(content)
    return connection


def test_a_client_that_never_reads_keeps_its_seat_no_longer_than_its_answer_takes(
    server,
):
    """Engines wait for no reader: what is not read yet lies in a front.

    The answer is larger than all buffers on the way; and whoever reads it late gets it.
    """
    body = {"model": MODEL, "prompt": "one two", "max_tokens": MAX_TOKENS}
    body |= {"ignore_eos": True, "stream": True, "logprobs": 20, "n": NUM_STREAMS}
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    made = generated(server) + NUM_STREAMS * MAX_TOKENS
    with connect(server, head.encode() + content) as connection:
        wait_until(lambda: generated(server) >= made, 120)
        wait_until(lambda: num_running(server) == 0, 30)
        connection.settimeout(60)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert len(answer) > 1 << 20
    assert b"data: [DONE]" in answer[-100:]


def test_clients_that_do_not_finish_their_headers_disturb_nobody(server):
    """The proxy waits for them, and for nothing else's sake."""
    with contextlib.ExitStack() as connections:
        for _ in range(200):
            one = connect(server, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-")
            connections.enter_context(one)
        assert server.complete(timeout=30, max_tokens=2).status_code == 200
