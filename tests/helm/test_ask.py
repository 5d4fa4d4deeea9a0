"""`helm test` tells a service that answers from one that does not."""

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.helm.conftest import DEMO, PRODUCTION, of_kind, render_example
from tests.serving.conftest import clean_environment, find_free_ports


class OneModel(http.server.BaseHTTPRequestHandler):
    """Answers as our server does, for the model `demo` alone."""

    def reply(self, code: int, body: dict) -> None:
        """Send JSON."""
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:
        self.reply(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions" or body["model"] != "demo":
            self.reply(404, {"error": {"message": "no such model"}})
            return
        self.reply(200, {"usage": {"completion_tokens": body["max_tokens"]}})

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    """A server of one model."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneModel)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run_test_pod(example, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command of the test Pod, with some of its variables replaced."""
    (pod,) = of_kind(render_example(example), "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "python"
    values = (one for one in container["env"] if "value" in one)
    given = {variable["name"]: variable["value"] for variable in values}
    return subprocess.run(
        [sys.executable, *arguments],
        env=clean_environment(**given | env),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_test_passes_where_the_model_answers(url):
    result = run_test_pod(DEMO, TETRIS_URL=url)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_test_fails_where_another_model_is_served(url):
    result = run_test_pod(PRODUCTION, TETRIS_URL=url)
    assert result.returncode == 1
    assert "no such model" in result.stdout


def test_the_test_fails_where_nobody_listens():
    (port,) = find_free_ports(1)
    result = run_test_pod(
        DEMO, TETRIS_URL=f"http://127.0.0.1:{port}", TETRIS_WAIT_S="0"
    )
    assert result.returncode == 1
    assert "refused" in result.stderr


def test_the_test_asks_through_the_service_and_is_let_in():
    objects = render_example(
        DEMO, "networkPolicy.enabled=true,serve.routePrefix=/llm,config.http.port=9000"
    )
    (pod,) = of_kind(objects, "Pod")
    env = {one["name"]: one for one in pod["spec"]["containers"][0]["env"]}
    assert env["TETRIS_URL"]["value"] == "http://demo-tetris-serve-serve-svc:9000/llm"
    labels = pod["metadata"]["labels"].items()
    for policy in of_kind(objects, "NetworkPolicy"):
        peers = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
        assert peers.items() <= labels
        # Nor is it one of those that are shut in.
        assert not policy["spec"]["podSelector"]["matchLabels"].items() <= labels
