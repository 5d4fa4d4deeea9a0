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
signal.signal(signal.SIGCONT, lambda *_: print("resumed", flush=True))
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
    """Read until a text appears, and return everything read."""
    deadline_s = time.monotonic() + TIMEOUT_S
    output = ""
    while text not in output:
        assert time.monotonic() < deadline_s, output
        if select.select([descriptor], [], [], 0.1)[0]:
            output += os.read(descriptor, 4096).decode()
    return output


def wait_for_server_to_hold(terminal, make):
    """Wait until what is typed reaches the server and no longer make."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while os.tcgetpgrp(terminal) == make.pid:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def serve_in_terminal(folder, act):
    """Run make in a terminal, act on it once it is ready, and return its status."""
    terminal, streams = pty.openpty()
    make = subprocess.Popen(
        [sys.executable, "-c", LOGIN],
        cwd=folder,
        stdin=streams,
        stdout=streams,
        stderr=streams,
    )
    os.close(streams)
    try:
        read_until(terminal, "ready")
        wait_for_server_to_hold(terminal, make)
        act(make, terminal)
        read_until(terminal, "stopping on")
        return make.wait(TIMEOUT_S)
    finally:
        make.kill()
        make.wait()
        os.close(terminal)


def serve_without_terminal(folder, act):
    """Run make without a terminal, act on it once it is ready, return its status."""
    with subprocess.Popen(
        ["make", "serve"], cwd=folder, stdout=subprocess.PIPE, start_new_session=True
    ) as make:
        read_until(make.stdout.fileno(), "ready")
        act(make)
        read_until(make.stdout.fileno(), "stopping on")
        return make.wait(TIMEOUT_S)


def test_make_ends_with_status_0_after_ctrl_c(folder):
    def ctrl_c(make, terminal):
        os.write(terminal, b"\x03")

    assert serve_in_terminal(folder, ctrl_c) == 0


def test_ctrl_z_does_not_leave_the_terminal_without_an_answer(folder):
    # Nobody could resume a stopped job here, so the job goes on.
    def ctrl_z_and_ctrl_c(make, terminal):
        os.write(terminal, b"\x1a")
        read_until(terminal, "resumed")
        wait_for_server_to_hold(terminal, make)
        os.write(terminal, b"\x03")

    assert serve_in_terminal(folder, ctrl_z_and_ctrl_c) == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_make_alone_reaches_the_server(folder, signum):
    # make reports the signal that it received itself, whatever the server did.
    status = serve_without_terminal(folder, lambda make: make.send_signal(signum))
    assert status == -signum


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_for_the_whole_group_stops_the_server_in_good_order(folder, signum):
    status = serve_without_terminal(folder, lambda make: os.killpg(make.pid, signum))
    assert status == -signum


def test_the_status_of_the_command_is_passed_on():
    wrapper = ROOT / ".ci" / "foreground.py"
    command = [sys.executable, str(wrapper), "sh", "-c", "exit 7"]
    assert subprocess.run(command, check=False).returncode == 7
    command[-1] = "kill -KILL $$"
    assert subprocess.run(command, check=False).returncode == 128 + signal.SIGKILL


def test_a_command_that_does_not_exist_is_reported():
    wrapper = ROOT / ".ci" / "foreground.py"
    result = subprocess.run(
        [sys.executable, str(wrapper), "no-such-command"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 127
    assert "cannot run no-such-command" in result.stderr
