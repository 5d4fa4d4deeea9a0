"""A stand-in for an OpenAI-compatible server: real HTTP, scripted replies.

Not a model: it sends what a script says, piece by piece, so that tests know to the
token and to the event what a client must report. Runs in threads of the test's own
process or, as a script, in a process of its own:

    python -m tests.loadtest.http.stand_in_server 9000
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

T = TypeVar("T")

WAIT_S = 300.0
CLOSE = object()
"""In a script: close the connection here, in the middle of the response."""

Script = Callable[[Mapping[str, Any]], Iterator[object]]
"""From a request's body to pieces: bytes to send, seconds to wait, or CLOSE."""

PAGE = """\
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total {proposed}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total {accepted}
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total {accepted}
"""


def event(value: object) -> bytes:
    data = value if isinstance(value, str) else json.dumps(value)
    return f"data: {data}\n\n".encode()


def chunk(text: str = "", *, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return event({"id": "chat-1", "choices": [choice], **more})


def usage(prompt: int, completion: int, **more: Any) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, **more}
    return event({"id": "chat-1", "choices": [], "usage": counts})


DONE = event("[DONE]")


def wait_for(look: Callable[[], T | None], limit_s: float = WAIT_S) -> T:
    deadline_s = time.monotonic() + limit_s
    while not (seen := look()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return seen


def num_asked(body: Mapping[str, Any]) -> int:
    return int(body.get("max_tokens") or body["max_completion_tokens"])


def plain_reply(step_s: float) -> Script:
    def script(body: Mapping[str, Any]) -> Iterator[object]:
        count = num_asked(body)
        yield step_s
        yield chunk("")
        for number in range(count):
            yield chunk("a", finish="length" if number == count - 1 else None)
            if number < count - 1:
                yield step_s
        yield usage(7, count, prompt_tokens_details={"cached_tokens": 4}) + DONE

    return script


@dataclass
class StandIn:
    """A running stand-in.

    By default it replies with a token a step, in chunked transfer coding. With another
    status than 200 the script's bytes are the whole body; without `key`, if there is
    one, everything is refused, and `/health` with no replicas.
    """

    script: Script | None = None
    step_s: float = 0.005
    status: int = 200
    chunked: bool = True
    key: str = ""
    replicas: int = 1
    page: str | None = PAGE
    pages: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    url: str = ""

    def answer_get(self, path: str) -> tuple[int, str]:
        match path:
            case "/v1/models":
                return 200, json.dumps({"data": [{"id": "stand-in"}]})
            case "/health":
                health = json.dumps({"running_replicas": self.replicas})
                return 200 if self.replicas else 503, health
            case "/metrics" if self.page is not None:
                tokens = sum(map(num_asked, self.bodies))
                counts = {"{proposed}": 2 * tokens, "{accepted}": tokens}
                page = self.page
                for name, count in counts.items():
                    page = page.replace(name, str(count))
                return 200, page
        return 404, ""


@contextmanager
def run_stand_in(stand_in: StandIn, port: int = 0) -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Else small pieces wait 40 ms for the client's delayed acknowledgement.
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            stand_in.pages.append(self.path)
            status, body = stand_in.answer_get(self.path)
            self.send_response(status if self._may_enter() else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stand_in.bodies.append(body)
            stand_in.ids.append(self.headers.get("X-Request-Id", ""))
            try:
                self._reply(body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def _may_enter(self) -> bool:
            return stand_in.key in ("", self.headers.get("Authorization"))

        def _reply(self, body: Mapping[str, Any]) -> None:
            self.send_response(stand_in.status if self._may_enter() else 401)
            self.send_header("Content-Type", "text/event-stream")
            if stand_in.chunked:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Connection", "close")
                self.close_connection = True
            self.end_headers()
            script = stand_in.script or plain_reply(stand_in.step_s)
            for piece in script(body):
                if piece is CLOSE:
                    self.close_connection = True
                    return
                if isinstance(piece, float):
                    time.sleep(piece)
                elif isinstance(piece, bytes):
                    self._send(piece)
            if stand_in.chunked:
                self.wfile.write(b"0\r\n\r\n")

        def _send(self, piece: bytes) -> None:
            if stand_in.chunked:
                piece = b"%x\r\n%s\r\n" % (len(piece), piece)
            self.wfile.write(piece)
            self.wfile.flush()

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with run_stand_in(StandIn(), int(sys.argv[1])):
        threading.Event().wait()
