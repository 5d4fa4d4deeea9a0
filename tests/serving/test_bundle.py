"""What `doctor --bundle` hands on, and what it leaves out."""

import http.server
import os
import tarfile
import threading

import pytest

from serving.commands import bundle as module
from serving.commands.bundle import HIDDEN, bundle, hide, without_secrets
from serving.settings.key_file import make_key
from serving.settings.model import parse_settings
from tests.serving.test_settings import minimal


class Says(http.server.BaseHTTPRequestHandler):
    """Answers every path with a metric of its own."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"tetris_running_requests 3\n")

    def log_message(self, *_arguments):
        """Say nothing."""


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Says) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running.server_address[1]
        running.shutdown()


def read(file):
    with tarfile.open(file) as archive:
        return {
            one.name.removeprefix("tetris-serve/"): archive.extractfile(one)
            .read()
            .decode()
            for one in archive
        }


def test_the_archive_tells_what_runs_and_no_secret(tmp_path, monkeypatch, server):
    logs = tmp_path / "ray" / "session_latest" / "logs"
    (logs / "serve").mkdir(parents=True)
    (logs / "serve" / "replica.log").write_text("x" * 300_000 + "\nthe last line")
    (logs / "serve" / "front.log").write_text("Authorization: Bearer abcdefgh12345")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijk")
    access = {"redis_url": "redis://me:hunter2@cache:6379", "allow_anonymous": True}
    ports = {"port": 1, "metrics_port": server}
    settings = parse_settings(minimal(http={"access": access, **ports}))
    file = tmp_path / "bundle.tar.gz"
    assert bundle(settings, file) == 0
    parts = read(file)
    assert "tetris_running_requests 3" in parts["metrics.txt"]
    assert "health.json" in parts
    assert '"ray":' in parts["versions.json"]
    assert "max_draft_tokens" in parts["settings.yaml"]
    assert f"redis://{HIDDEN}@cache:6379" in parts["settings.yaml"]
    end = parts["logs/serve/replica.log"]
    assert end.endswith("the last line")
    assert len(end) < 150_000
    everything = "".join(parts.values())
    for secret in ("hunter2", "hf_abcdefghijk", "abcdefgh12345"):
        assert secret not in everything


def test_without_a_server_it_says_that_nobody_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_logs", lambda: tmp_path / "nothing")
    settings = parse_settings(minimal(http={"port": 1, "metrics_port": 2}))
    assert bundle(settings, tmp_path / "bundle.tar.gz") == 0
    parts = read(tmp_path / "bundle.tar.gz")
    assert "no answer" in parts["health.json"]
    assert not [name for name in parts if name.startswith("logs/")]


def test_a_file_that_cannot_be_written_is_told(tmp_path, capsys):
    file = tmp_path / "no" / "such" / "bundle.tar.gz"
    assert bundle(parse_settings(minimal()), file) == 1
    assert "--bundle" in capsys.readouterr().out
    assert not os.path.lexists(file)


def test_names_that_only_look_secret_are_kept():
    plain = {"draft_tokens": 3, "tokenizer": "x", "api_key": "k", "HF_TOKEN": "t"}
    assert without_secrets(plain) == plain | {"api_key": HIDDEN, "HF_TOKEN": HIDDEN}
    assert hide("sk-aaaaaaaaaaaa and task-list") == f"{HIDDEN} and task-list"
    key = make_key()
    assert hide(f"tetris-serve said {key}.") == f"tetris-serve said {HIDDEN}."
