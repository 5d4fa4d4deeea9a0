"""Setting up: what is detected, what counts as complete, and what errors say."""

import ast
import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path

import bootstrap as script
import psutil
import pytest

from tests.conftest import run

SCRIPT = Path(script.__file__)
STEPS = ["Python", "uv", "torch==1.0+cpu", "pinned packages", "tetris-serve"]
ALL = ["loadtest", "dev"]


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "ROOT", tmp_path / "project")
    monkeypatch.setattr(script, "LOCKS", tmp_path / "project" / "locks")
    script.LOCKS.mkdir(parents=True)
    for name in ("cpu", "gpu", "loadtest", "dev", "uv"):
        (script.LOCKS / f"{name}.txt").write_text(f"{name}==1.0\n")
    (script.ROOT / "pyproject.toml").write_text('cpu = ["torch==1.0"]')
    return script


class FakeInstaller:
    """Stands in for venv, pip and uv: notes the steps it is asked for."""

    def __init__(self, bootstrap, venv, monkeypatch):
        self.bootstrap, self.venv, self.interrupt_at = bootstrap, venv, None
        monkeypatch.setattr(bootstrap, "plan", lambda *_: [(s, s) for s in STEPS])
        monkeypatch.setattr(bootstrap, "run", self.run)

    def run(self, commands, log):
        self.taken += commands
        if commands == [self.interrupt_at]:
            raise KeyboardInterrupt
        if commands == ["Python"]:
            (self.venv / "bin").mkdir(exist_ok=True)
            (self.venv / "bin" / "python").unlink(missing_ok=True)
            (self.venv / "bin" / "python").symlink_to(sys.executable)

    def set_up(self, device="cpu", extras=ALL):
        self.taken = []
        self.bootstrap.set_up(self.venv, device, extras)
        return self.taken


@pytest.fixture
def installer(bootstrap, tmp_path, monkeypatch):
    """An environment that was set up step by step, with a file of that time."""
    fake = FakeInstaller(bootstrap, tmp_path / "venv", monkeypatch)
    for extras in ([], ["loadtest"], ALL):
        assert fake.set_up(extras=extras) == STEPS
    (fake.venv / "lib").mkdir()
    (fake.venv / "lib" / "old").touch()
    return fake


def test_a_complete_environment_needs_nothing_with_fewer_extras_neither(installer):
    for extras in (ALL, ["loadtest"], []):
        assert installer.set_up(extras=extras) == []


@pytest.mark.parametrize(
    ("changed", "extras", "renewed"),
    [
        ("locks/gpu.txt", ALL, False),
        ("locks/dev.txt", ["loadtest"], False),
        ("locks/dev.txt", ALL, True),
        ("locks/cpu.txt", [], True),
        ("locks/uv.txt", [], True),
        ("pyproject.toml", [], True),
    ],
)
def test_what_an_environment_is_made_from_renews_it_in_place(
    installer, changed, extras, renewed
):
    file = installer.bootstrap.ROOT / changed
    file.write_text(file.read_text() + "# changed\n")
    assert installer.set_up(extras=extras) == (STEPS if renewed else [])
    assert (installer.venv / "lib" / "old").exists()


@pytest.mark.parametrize(
    "change", ["half", "device", "Python", "place", "no Python", "old stamp"]
)
def test_an_environment_that_is_half_or_another_s_is_made_anew(
    installer, monkeypatch, change
):
    bootstrap, venv, device = installer.bootstrap, installer.venv, "cpu"
    if change == "half":
        (bootstrap.LOCKS / "cpu.txt").write_text("example==2.0\n")
        installer.interrupt_at = "pinned packages"
        with pytest.raises(KeyboardInterrupt):
            installer.set_up()
        installer.interrupt_at = None
    elif change == "device":
        device = "gpu"
    elif change == "Python":
        monkeypatch.setattr(bootstrap, "PYTHON", "3.99")
    elif change == "place":
        installer.venv = venv.rename(venv.with_name("moved"))
    elif change == "no Python":
        (venv / "bin" / "python").unlink()
    else:
        (venv / bootstrap.STAMP).write_text('{"identity": 1}')
    assert installer.set_up(device) == STEPS
    assert not (installer.venv / "lib" / "old").exists()
    assert installer.set_up(device) == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        # The folder of this test, which holds something else.
        ({}, "was not made by this: remove it, or set TETRIS_VENV"),
        ({"TETRIS_VENV": "/proc/venv"}, "/proc/venv"),
        ({"TETRIS_VENV": "/proc/my venv"}, "/proc/my venv has a blank in it: name"),
        ({"TETRIS_DEVICE": "tpu"}, "TETRIS_DEVICE is 'tpu': use cpu or gpu"),
    ],
)
def test_a_place_or_device_that_cannot_be_is_refused_and_left_alone(
    tmp_path, variables, message
):
    (tmp_path / "thesis.tex").touch()
    env = {"TETRIS_DEVICE": "cpu", "TETRIS_VENV": str(tmp_path), **variables}
    result = run(sys.executable, "-I", SCRIPT, env=env, status=1)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_set_up_waits_for_the_first_and_can_be_interrupted(
    bootstrap, tmp_path, signum
):
    venv = tmp_path / "venv"
    venv.mkdir()
    with (venv / bootstrap.STAMP).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT)],
            env={"PATH": "", "TETRIS_DEVICE": "cpu", "TETRIS_VENV": str(venv)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # In the background a shell has signals ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signum, signal.SIG_DFL),
        ) as process:
            assert "when no other set-up works on it" in process.stdout.readline()
            # A signal that arrives just before the wait begins does not end it.
            waiting = psutil.Process(process.pid)
            while waiting.status() != psutil.STATUS_SLEEPING:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signum)
            _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "run it again" in errors


def run_commands(bootstrap, tmp_path, *commands):
    """Run shell commands as the alternatives of a step; return what they logged."""
    log = tmp_path / "log"
    bootstrap.run([["/bin/sh", "-c", command] for command in commands], log)
    return log.read_text()


def test_an_interrupted_step_leaves_no_installer_at_work(
    bootstrap, tmp_path, monkeypatch
):
    def interrupt(_interval_s):
        while not (tmp_path / "log").read_text().endswith("\n"):
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_commands(bootstrap, tmp_path, "echo $$; exec sleep 600")
    monkeypatch.undo()
    assert not psutil.pid_exists(int((tmp_path / "log").read_text()))


def test_places_are_asked_in_turn_and_the_last_failure_comes_with_advice(
    bootstrap, tmp_path
):
    assert run_commands(bootstrap, tmp_path, "echo one", "echo two") == "one\n"
    logged = run_commands(bootstrap, tmp_path, "exit 1", "echo three")
    assert logged == "one\nthree\n"
    with pytest.raises(SystemExit) as caught:
        run_commands(bootstrap, tmp_path, "seq 100; echo dns error; exit 2")
    message = str(caught.value)
    assert "\n86\n" not in message
    for part in ("\n87\n", "dns error", "PIP_INDEX_URL", "SSL_CERT_FILE", "whole log"):
        assert part in message


def test_settings_for_another_python_do_not_reach_the_installers_and_the_index_does(
    bootstrap, tmp_path, monkeypatch
):
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    for name in ("PIP_TARGET", "PIP_USER", "PIP_CONSTRAINT", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, "set")
    logged = run_commands(bootstrap, tmp_path, "env | grep =set$ | sort")
    assert logged == "PIP_INDEX_URL=set\nUV_DEFAULT_INDEX=set\n"


@pytest.mark.parametrize(
    ("file", "listed", "device"),
    [
        ("nvidiactl", "No devices found.", "cpu"),
        ("nvidiactl", "NVIDIA-SMI could not talk to the driver.", "cpu"),
        ("nvidia3", "", "gpu"),
        ("dxg", "GPU 0: NVIDIA H200 (UUID: GPU-1)", "gpu"),
    ],
)
def test_a_gpu_is_found_by_its_device_file_or_nvidia_smi(
    bootstrap, tmp_path, monkeypatch, file, listed, device
):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / file).touch()
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "{listed}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.find_device(tmp_path / "dev") == device


def test_an_old_python_gets_as_far_as_the_message_about_it(bootstrap, monkeypatch):
    ast.parse(SCRIPT.read_text("utf-8"), feature_version=(3, 8))
    monkeypatch.setattr(bootstrap, "PYTHON", "3.8")
    monkeypatch.setattr(sys, "argv", ["bootstrap.py"])
    with pytest.raises(SystemExit) as caught:
        bootstrap.main()
    assert "needs 3.11 or 3.12 or 3.13" in str(caught.value)
    assert "PYTHON=python3.12 make serve" in str(caught.value)


def test_the_server_s_environment_has_nothing_of_an_extra(bootstrap, monkeypatch):
    asked = []
    monkeypatch.setattr(bootstrap, "set_up", lambda *arguments: asked.append(arguments))
    monkeypatch.setenv("TETRIS_DEVICE", "cpu")
    for options in ([], ["--loadtest"], ["--dev"]):
        monkeypatch.setattr(sys, "argv", ["bootstrap.py", *options])
        bootstrap.main()
    assert [extras for *_, extras in asked] == [[], ["loadtest"], ALL]


def test_all_comes_by_its_hash_but_torch_for_the_cpu_from_either_index(bootstrap):
    locks = [Path("uv.txt"), Path("all.txt")]
    for device, torch in (("cpu", ["torch==1.0+cpu", "its byte code"]), ("gpu", [])):
        steps = bootstrap.plan(Path("venv"), device, locks)
        unhashed = [title for title, *cs in steps if "--require-hashes" not in cs[0]]
        assert unhashed == ["Python", *torch, "tetris-serve"]
    _, _, (title, first, second), *_ = bootstrap.plan(Path("venv"), "cpu", locks)
    # The configured index first.
    assert not [word for word in first if "://" in word]
    assert bootstrap.TORCH_CPU_INDEX in second
    assert first[-1] == second[-1] == title
