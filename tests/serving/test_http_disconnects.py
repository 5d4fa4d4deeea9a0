"""Clients that go away: their requests end, and everybody else's go on."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.serving.conftest import MODEL, Server, wait_until

pytestmark = pytest.mark.ray

NUM_STREAMS = 4
MAX_TOKENS = 900


@contextlib.contextmanager
def long_stream(server: Server) -> Iterator[Iterator[str]]:
    body = {
        "model": MODEL,
        "prompt": "one two three",
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{server.url}/v1/completions"
    with (
        httpx.Client(trust_env=False, timeout=300) as client,
        client.stream("POST", url, json=body) as response,
    ):
        assert response.status_code == 200
        yield response.iter_lines()


def num_running(server: Server) -> float:
    return server.total("ray_vllm_num_requests_running")


def test_a_client_gone_in_mid_stream_frees_its_place_and_disturbs_nobody(
    server, client
):
    wait_until(lambda: num_running(server) == 0, 300)
    generated = server.total("ray_vllm_generation_tokens_total")
    survivor: list[str] = []

    def read_on() -> None:
        stream = client.completions.create(
            model=MODEL,
            prompt="one two three",
            max_tokens=300,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        survivor.extend(str(chunk.choices[0].finish_reason) for chunk in stream)

    reader = threading.Thread(target=read_on)
    reader.start()
    with contextlib.ExitStack() as streams:
        for _ in range(NUM_STREAMS):
            lines = streams.enter_context(long_stream(server))
            assert next(lines).startswith("data: ")
    reader.join(300)
    assert survivor[-1] == "length"
    wait_until(lambda: num_running(server) == 0, 300)
    grown = server.total("ray_vllm_generation_tokens_total") - generated
    # Had the abandoned streams run on, they alone would have made this many.
    assert grown < NUM_STREAMS * MAX_TOKENS


def test_a_client_gone_before_the_answer_frees_its_place(server):
    body = {"model": MODEL, "prompt": "one", "max_tokens": MAX_TOKENS}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/completions",
            json=body | {"ignore_eos": True},
            timeout=0.5,
            trust_env=False,
        )
    wait_until(lambda: num_running(server) == 0, 300)


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
    """Engines wait for no reader: what is not read yet lies in Serve's proxy.

    The answer is larger than all buffers on the way; and whoever reads it late gets it.
    """
    body = {"model": MODEL, "prompt": "one two", "max_tokens": MAX_TOKENS}
    body |= {"ignore_eos": True, "stream": True, "logprobs": 20, "n": NUM_STREAMS}
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    made = server.total("ray_vllm_generation_tokens_total") + NUM_STREAMS * MAX_TOKENS
    with contextlib.closing(connect(server, head.encode() + content)) as connection:
        wait_until(
            lambda: server.total("ray_vllm_generation_tokens_total") >= made, 120
        )
        wait_until(lambda: num_running(server) == 0, 30)
        connection.settimeout(60)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert len(answer) > 1 << 20
    assert b"data: [DONE]" in answer[-100:]


def test_clients_that_do_not_finish_their_headers_disturb_nobody(server):
    """Serve's proxy waits for them for ever, and for nothing else's sake."""
    with contextlib.ExitStack() as connections:
        for _ in range(200):
            one = connect(server, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-")
            connections.enter_context(contextlib.closing(one))
        body = {"model": MODEL, "prompt": "one", "max_tokens": 2}
        answer = server.post("/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200
