"""What `doctor --bundle` hands on, and what it leaves out."""

import functools
import socket
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from serving.commands import bundle as module
from serving.commands.bundle import HIDDEN, bundle, hide, without_secrets
from serving.settings.key_file import make_key
from serving.settings.model import parse_settings
from tests.serving.test_settings import minimal


@pytest.fixture
def port(tmp_path):
    (tmp_path / "metrics").write_text("ray_tetris_running_requests 3\n")
    serve = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running.server_address[1]
        running.shutdown()


def read(file):
    with tarfile.open(file) as archive:
        parts = {one.name: archive.extractfile(one).read() for one in archive}
    return {k.removeprefix("tetris-serve/"): v.decode() for k, v in parts.items()}


def test_the_archive_tells_what_runs_and_no_secret(tmp_path, monkeypatch, port):
    logs = tmp_path / "ray" / "session_latest" / "logs"
    (logs / "serve").mkdir(parents=True)
    (logs / "serve" / "replica.log").write_text("x" * 300_000 + "\nthe last line")
    (logs / "serve" / "front.log").write_text("Authorization: Bearer abcdefgh12345")
    (logs / "worker-gone.err").symlink_to("nowhere")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijk")
    access = {"redis_url": "redis://me:hunter2@cache:6379", "allow_anonymous": True}
    http = {"access": access, "port": 1, "metrics_port": port}
    settings = parse_settings(minimal(http=http))
    file = tmp_path / "bundle.tar.gz"
    assert bundle(settings, file) == 0
    parts = read(file)
    assert "ray_tetris_running_requests 3" in parts["metrics.txt"]
    assert "health.json" in parts
    assert '"ray":' in parts["versions.json"]
    assert "max_draft_tokens" in parts["settings.yaml"]
    assert f"redis://{HIDDEN}@cache:6379" in parts["settings.yaml"]
    end = parts["logs/serve/replica.log"]
    assert end.endswith("the last line")
    assert len(end) < 150_000
    assert "cannot be read" in parts["logs/worker-gone.err"]
    everything = "".join(parts.values())
    for secret in ("hunter2", "hf_abcdefghijk", "abcdefgh12345"):
        assert secret not in everything
    # `up` takes another port where somebody has this one.
    (tmp_path / "metrics").write_text("somebody_elses 3\n")
    assert bundle(settings, file) == 0
    assert "somebody" not in read(file)["metrics.txt"]


def test_without_a_server_or_a_place_for_it_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "find_logs", lambda: tmp_path / "nothing")
    settings = parse_settings(minimal(http={"port": 1, "metrics_port": 2}))
    assert bundle(settings, tmp_path / "bundle.tar.gz") == 0
    parts = read(tmp_path / "bundle.tar.gz")
    assert "no answer" in parts["health.json"]
    assert not [name for name in parts if name.startswith("logs/")]
    assert bundle(settings, tmp_path / "no" / "such" / "bundle.tar.gz") == 1
    assert "--bundle" in capsys.readouterr().out


def test_who_speaks_no_http_at_a_port_is_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_logs", lambda: tmp_path / "nothing")
    with socket.create_server(("127.0.0.1", 0)) as other:
        http = {"host": "::1", "port": 1, "metrics_port": other.getsockname()[1]}

        def greet() -> None:
            with other.accept()[0] as caller:
                caller.recv(4096)
                caller.sendall(b"SSH-2.0-x\r\n")

        threading.Thread(target=greet, daemon=True).start()
        settings = parse_settings(minimal(http=http))
        assert bundle(settings, tmp_path / "bundle.tar.gz") == 0
    parts = read(tmp_path / "bundle.tar.gz")
    assert "no answer" in parts["metrics.txt"]
    assert parts["health.json"].startswith("http://[::1]:1/health: no answer")


def test_names_that_only_look_secret_are_kept():
    plain = {"draft_tokens": 3, "tokenizer": "x", "api_key": "k", "HF_TOKEN": "t"}
    assert without_secrets(plain) == plain | {"api_key": HIDDEN, "HF_TOKEN": HIDDEN}
    assert hide("sk-aaaaaaaaaaaa and task-list") == f"{HIDDEN} and task-list"
    key = make_key()
    assert hide(f"tetris-serve said {key}.") == f"tetris-serve said {HIDDEN}."
