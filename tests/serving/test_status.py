"""`tetris-serve status`, against answers as a server gives them, and a real server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from serving.cli import main
from tests.serving.conftest import load, wait_until

HEALTHY = (200, {"status": "ok", "running_replicas": 2})


def replica(name: str, steps: int, **more: Any) -> dict[str, Any]:
    totals = {"steps": steps, "drafted": 4 * steps, "admitted": 3 * steps}
    totals |= {"accepted": 2 * steps, "emitted": 5 * steps, "seconds": 0.02 * steps}
    step = {"step": steps, "running": 3, "waiting": 1, "depth": 4}
    return {"replica": name, "policy": "goodput", "totals": totals} | {
        "steps": [step],
        "gain": [],
        **more,
    }


def event(*replicas: dict[str, Any]) -> bytes:
    return f"data: {json.dumps({'replicas': replicas})}\n\n".encode()


STUCK = "The engine does not answer."
SILENT = b'data: {"error": "The replicas do not answer."}\n\n'
LOOKS = [
    # Somebody else has watched the first for long, and it stands still for a moment.
    # The second begins anew.
    event(replica("abcdefghij", 1000), replica("new", 900)),
    event({"replica": "abcdefghij", "policy": "goodput", "error": STUCK}),
    SILENT,
    event(
        replica("abcdefghij", 1050, gain=[1.32, 1.221, 1.439]),
        replica("new", 10, held=True),
        {"replica": "plain", "policy": "none"},
        {"replica": "stuck", "policy": "goodput", "error": STUCK},
    ),
]


class StandIn(BaseHTTPRequestHandler):
    """Answers as a server's front does, and as a broken one."""

    answers: dict[str, tuple[int, Any]]

    def do_GET(self) -> None:
        status, body = self.answers[self.path]
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def ask(capsys):
    answers: dict[str, tuple[int, Any]] = {}
    handler = type("Answers", (StandIn,), {"answers": answers})
    stand_in = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=stand_in.serve_forever, daemon=True).start()

    def run(health: Any, board: Any, *options: str) -> tuple[int, str]:
        answers.update({"/health": health, "/board/events": board})
        code = main(["status", f"http://127.0.0.1:{stand_in.server_port}", *options])
        said = capsys.readouterr()
        return code, said.out + said.err

    yield run
    stand_in.shutdown()
    stand_in.server_close()


def test_each_replica_has_a_line_with_what_it_did_meanwhile_and_what_it_gains(ask):
    code, said = ask(HEALTHY, (200, b"".join(LOOKS)))
    assert code == 0
    assert "ok, 2 replicas run" in said
    first, second, plain, stuck = said.splitlines()[2:]
    assert first.split("  ")[0] == "abcdefgh"
    # Fifty steps of 20 ms, five tokens each, of three drafts two accepted.
    for figure in ("goodput", " 250 ", "67%", "20.0 ms", "1.32 (1.22 to 1.44)"):
        assert figure in first
    assert second.endswith("cannot tell yet, held back")
    assert "20.0 ms" in second
    # Of neither is known that it is idle.
    assert plain.split() == ["plain", "none", *"-------"]
    assert stuck.split(maxsplit=8) == ["stuck", "goodput", *"------", STUCK]
    # Programs get the same.
    code, said = ask(HEALTHY, (200, b"".join(LOOKS)), "--json")
    told = json.loads(said)
    assert (code, told["health"]["status"]) == (0, "ok")
    assert told["replicas"][0]["totals"]["emitted"] == 250


@pytest.mark.parametrize("key", ["tetris-abc\r\n", "tetris-äbc", "tetris-a\nb"])
def test_a_key_that_cannot_be_sent_is_not_repeated(ask, key):
    is_fine = key.strip() == "tetris-abc"
    code, said = ask(HEALTHY, (404, b""), "--key", key)
    assert code == (0 if is_fine else 1)
    assert ("--key" in said) != is_fine
    assert "tetris-" not in said.replace("tetris-serve", "")


NONE = {"error": {"message": "No engine replica is running; retry."}}
STALE = {"status": "stale", "running_replicas": 1, "age_s": 7.0}
IDLE = {"status": "idle", "running_replicas": 0}
UNREADABLE = "no answer that can be read"


@pytest.mark.parametrize(
    ("health", "board", "is_error", "expected"),
    [
        (HEALTHY, (404, b"none"), False, "http.board: false"),
        ((200, STALE), (404, b""), False, "told nothing for 7.0 s"),
        ((200, IDLE), (200, event()), False, "idle, 0"),
        (HEALTHY, (200, SILENT), False, "2 replicas run\nthe replicas do not answer"),
        ((503, NONE), None, True, "503: No engine replica is running"),
        (HEALTHY, (401, {"error": {"message": "?"}}), True, "by --key or TETRIS"),
        (HEALTHY, (503, b"<html>"), True, "503: Service Unavailable"),
        ((200, b"<html>"), (404, b""), True, UNREADABLE),
        (HEALTHY, (200, b"data: {\n\n"), True, UNREADABLE),
        (HEALTHY, (200, b"data: []\n\n"), True, UNREADABLE),
        (HEALTHY, (200, event({"policy": "x"})), True, UNREADABLE),
        ((200, [1]), (404, b""), True, UNREADABLE),
    ],
)
def test_what_is_not_as_usual_is_said_and_is_an_error_where_nobody_is_served(
    ask, health, board, is_error, expected
):
    code, said = ask(health, board)
    assert code == is_error
    assert ("error: http://127.0.0.1" in said) == is_error
    assert expected in said


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://["])
def test_who_cannot_be_reached_is_an_error(capsys, url):
    assert main(["status", url]) == 1
    assert f"error: {url}: " in capsys.readouterr().err


@pytest.mark.ray
def test_a_server_under_load_tells_what_it_does(server, capsys):
    with load(server, num_clients=2, max_tokens=400) as statuses:
        wait_until(lambda: statuses, 120)
        for _ in range(2):
            assert main(["status", server.url]) == 0
    assert set(statuses) == {200}
    said = capsys.readouterr().out
    assert f"{server.url}: ok, " in said
    lines = [line.split() for line in said.splitlines() if "tetris" in line]
    assert any(int(running) for _, _, running, *_ in lines)
    assert "%  " in said
