"""`make serve` and signals: the server stops in good order and make agrees."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 60.0

SERVER = """\
import signal, sys, time
def stop(signum, frame):
    print("stopping on", signum, flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
# Short sleeps: a signal that arrives just before a sleep starts does not end it.
for _ in range(600):
    time.sleep(0.1)
"""


# Makes the terminal on its standard streams its own, as a login does.
LOGIN = "import os; os.login_tty(0); os.execvp('make', ['make', 'serve'])"


@pytest.fixture
def folder(tmp_path):
    """A folder with a stand-in for the server and a recipe like that of `serve`."""
    (tmp_path / "server.py").write_text(SERVER)
    wrapper = ROOT / ".ci" / "foreground.py"
    recipe = f"{sys.executable} {wrapper} {sys.executable} server.py"
    (tmp_path / "Makefile").write_text(f"serve:\n\t@{recipe}\n")
    return tmp_path


def read_until(descriptor, text):
    deadline_s = time.monotonic() + TIMEOUT_S
    output = ""
    while text not in output:
        assert time.monotonic() < deadline_s, output
        if select.select([descriptor], [], [], 0.1)[0]:
            output += os.read(descriptor, 4096).decode()
    return output


@pytest.mark.parametrize(
    "typed", [b"\x03", b"\x1a\x03"], ids=["Ctrl-C", "Ctrl-Z first"]
)
def test_make_ends_with_status_0_after_ctrl_c(folder, typed):
    terminal, streams = pty.openpty()
    command = [sys.executable, "-c", LOGIN]
    io = dict.fromkeys(("stdin", "stdout", "stderr"), streams)
    with subprocess.Popen(command, cwd=folder, **io) as make:
        os.close(streams)
        read_until(terminal, "ready")
        deadline_s = time.monotonic() + TIMEOUT_S
        # From then on what is typed reaches the server and no longer make.
        while os.tcgetpgrp(terminal) == make.pid:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        os.write(terminal, typed)
        read_until(terminal, "stopping on")
        assert make.wait(TIMEOUT_S) == 0
    os.close(terminal)


@pytest.mark.parametrize(
    ("signum", "send"),
    [
        # What make does not pass on would not reach the server.
        (signal.SIGTERM, os.kill),
        (signal.SIGINT, os.killpg),
        (signal.SIGTERM, os.killpg),
        (signal.SIGKILL, os.killpg),
    ],
)
def test_a_signal_stops_the_server_in_good_order(folder, signum, send):
    with subprocess.Popen(
        ["make", "serve"], cwd=folder, stdout=subprocess.PIPE, start_new_session=True
    ) as make:
        read_until(make.stdout.fileno(), "ready")
        send(make.pid, signum)
        read_until(make.stdout.fileno(), "stopping on")
        # make reports the signal that it received itself, whatever the server did.
        assert make.wait(TIMEOUT_S) == -signum


def test_under_nohup_the_end_of_the_terminal_ends_nothing(folder):
    with subprocess.Popen(
        ["nohup", "make", "serve"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as make:
        read_until(make.stdout.fileno(), "ready")
        os.killpg(make.pid, signal.SIGHUP)
        os.kill(make.pid, signal.SIGTERM)
        read_until(make.stdout.fileno(), f"stopping on {signal.SIGTERM}")
        assert make.wait(TIMEOUT_S) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("command", "status"), [("exit 7", 7), ("kill -KILL $$", 128 + signal.SIGKILL)]
)
def test_the_status_of_the_command_is_passed_on(command, status):
    wrapped = [sys.executable, str(ROOT / ".ci" / "foreground.py"), "sh", "-c", command]
    assert subprocess.run(wrapped, check=False).returncode == status
