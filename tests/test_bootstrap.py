"""Setting up: what is detected, what counts as complete, and what errors say."""

import ast
import fcntl
import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / ".ci" / "bootstrap.py"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
RUNTIME = ["Python", "uv", "torch==1.0+cpu", "pinned packages", "tetris-serve"]
TOOLS = "tools for tests and checks"
PYPROJECT = (
    '[project]\nversion = "{}"\n[project.optional-dependencies]\ncpu = ["torch==1.0"]'
)


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    """The script as a module, for a small project."""
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path / "project")
    monkeypatch.setattr(module, "LOCKS", tmp_path / "project" / "locks")
    module.LOCKS.mkdir(parents=True)
    for name in ("cpu", "gpu", "dev", "uv"):
        (module.LOCKS / f"{name}.txt").write_text("example==1.0\n")
    (module.ROOT / "pyproject.toml").write_text(PYPROJECT.format("1.0"))
    return module


class FakeInstaller:
    """Stands in for venv, pip and uv: notes the steps it is asked for."""

    def __init__(self, bootstrap, venv, monkeypatch):
        self.bootstrap, self.venv = bootstrap, venv
        self.taken, self.interrupt_at = [], None
        self.titles = {}
        monkeypatch.setattr(bootstrap, "run", self.run)

    def run(self, commands, log):
        title = self.titles[str(commands)]
        if title == self.interrupt_at:
            raise KeyboardInterrupt
        self.taken.append(title)
        if title == "Python":
            (self.venv / "bin").mkdir()
            (self.venv / "bin" / "python").symlink_to(sys.executable)

    def set_up(self, device="cpu", *, dev=True):
        """Set up, and return the titles of the steps that this took."""
        steps = self.bootstrap.plan(self.venv, device, dev=dev)
        self.titles |= {str(step.commands): step.title for step in steps}
        self.taken = []
        if not self.bootstrap.is_finished(self.venv, steps[-1]):
            self.bootstrap.install(self.venv, steps)
        return self.taken


@pytest.fixture
def installer(bootstrap, tmp_path, monkeypatch):
    """An environment that has been set up completely, with the tools for tests."""
    fake = FakeInstaller(bootstrap, tmp_path / "venv", monkeypatch)
    assert fake.set_up() == [*RUNTIME, TOOLS]
    return fake


def run_script(*arguments, **variables):
    """Run the script as the Makefile does, with nothing on the search path."""
    return subprocess.run(
        [sys.executable, "-I", str(SCRIPT), *arguments],
        env={"PATH": "", "TETRIS_DEVICE": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_complete_environment_needs_nothing(installer):
    assert installer.set_up() == []
    assert installer.set_up(dev=False) == []


def test_tools_are_added_to_what_is_there(bootstrap, tmp_path, monkeypatch):
    installer = FakeInstaller(bootstrap, tmp_path / "venv", monkeypatch)
    assert installer.set_up(dev=False) == RUNTIME
    assert installer.set_up() == [TOOLS]


def test_an_interrupted_set_up_carries_on(bootstrap, tmp_path, monkeypatch):
    installer = FakeInstaller(bootstrap, tmp_path / "venv", monkeypatch)
    installer.interrupt_at = "pinned packages"
    with pytest.raises(KeyboardInterrupt):
        installer.set_up()
    installer.interrupt_at = None
    assert installer.set_up() == ["pinned packages", "tetris-serve", TOOLS]


def test_going_back_after_an_interrupted_change_installs_again(installer):
    lock = installer.bootstrap.LOCKS / "cpu.txt"
    lock.write_text("example==2.0\n")
    installer.interrupt_at = "pinned packages"
    with pytest.raises(KeyboardInterrupt):
        installer.set_up()
    installer.interrupt_at = None
    lock.write_text("example==1.0\n")
    assert installer.set_up() == ["pinned packages", "tetris-serve", TOOLS]


def test_a_change_of_the_pins_renews_only_what_builds_on_them(installer):
    (installer.bootstrap.LOCKS / "gpu.txt").write_text("example==2.0\n")
    assert installer.set_up() == []
    (installer.bootstrap.LOCKS / "dev.txt").write_text("example==2.0\n")
    assert installer.set_up(dev=False) == []
    assert installer.set_up() == [TOOLS]
    (installer.bootstrap.LOCKS / "cpu.txt").write_text("example==2.0\n")
    assert installer.set_up() == ["pinned packages", "tetris-serve", TOOLS]


def test_new_metadata_of_the_package_need_no_new_download(installer):
    project = installer.bootstrap.ROOT / "pyproject.toml"
    project.write_text(PYPROJECT.format("1.1"))
    assert installer.set_up() == ["tetris-serve", TOOLS]


def test_another_device_python_or_place_asks_for_everything(installer, monkeypatch):
    old = installer.venv / "lib" / "old"
    old.mkdir(parents=True)
    monkeypatch.setattr(installer.bootstrap, "PYTHON", "3.99")
    assert installer.set_up() == [*RUNTIME, TOOLS]
    assert not old.exists()
    on_gpu = [title for title in RUNTIME if "torch" not in title]
    assert installer.set_up("gpu", dev=False) == on_gpu
    installer.venv = installer.venv.rename(installer.venv.with_name("moved"))
    assert installer.set_up("gpu", dev=False) == on_gpu


@pytest.mark.parametrize("content", ["", "{}", '{"identity": 1, "parts": {}}'])
def test_a_damaged_stamp_or_that_of_an_older_program_counts_as_none(installer, content):
    (installer.venv / installer.bootstrap.STAMP).write_text(content)
    assert installer.set_up() == [*RUNTIME, TOOLS]


def test_an_environment_without_its_python_is_made_anew(installer):
    (installer.venv / "bin" / "python").unlink()
    (installer.venv / "bin" / "python").symlink_to("/nonexistent/python")
    assert installer.set_up() == [*RUNTIME, TOOLS]


def test_half_copied_distributions_are_installed_again(installer):
    site = installer.venv / "lib" / f"python{PYTHON}" / "site-packages"
    finished, begun, started = (
        site / f"{name}-1.0.dist-info" for name in ("finished", "begun", "started")
    )
    for info in (finished, begun, started):
        info.mkdir(parents=True)
    (finished / "RECORD").write_text("finished-1.0.dist-info/INSTALLER,sha256=x,4\n")
    # As a wheel brings it, before an installer adds the lines of its own.
    (begun / "RECORD").write_text("begun-1.0.dist-info/METADATA,sha256=x,4\n")
    (installer.bootstrap.LOCKS / "dev.txt").write_text("example==2.0\n")
    installer.set_up()
    assert list(site.iterdir()) == [finished]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_all_that_is_downloaded_but_torch_for_the_cpu_comes_by_its_hash(
    bootstrap, device
):
    steps = bootstrap.plan(Path("venv"), device, dev=True)
    unhashed = [s.title for s in steps if "--require-hashes" not in s.commands[0]]
    torch = ["torch==1.0+cpu"] if device == "cpu" else []
    assert unhashed == ["Python", *torch, "tetris-serve"]


def test_a_folder_that_is_no_environment_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    result = run_script(TETRIS_VENV=str(tmp_path))
    assert result.returncode == 1
    assert "was not made by this" in result.stderr
    assert "TETRIS_VENV" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_made_is_named():
    result = run_script(TETRIS_VENV="/proc/venv")
    assert result.returncode == 1
    assert "/proc/venv" in result.stderr
    assert "Traceback" not in result.stderr


def wait_until_blocked(pid):
    """Wait until a process waits in the kernel.

    A signal that arrives just before such a wait begins does not end it.
    """
    deadline_s = time.monotonic() + 60
    while psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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
            assert process.stdout.readline().startswith("Waiting for another set-up")
            wait_until_blocked(process.pid)
            process.send_signal(signum)
            _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "run it again to carry on" in errors


def run_commands(bootstrap, tmp_path, *commands):
    """Run shell commands as the alternatives of a step; return what they logged."""
    log = tmp_path / "log"
    bootstrap.run([["/bin/sh", "-c", command] for command in commands], log)
    return log.read_text()


def test_an_interrupted_step_leaves_nothing_at_work(bootstrap, tmp_path, monkeypatch):
    wait = subprocess.Popen.wait

    def interrupt(process, timeout=None):
        """Be interrupted once the command has started another."""
        if timeout is None:
            return wait(process)
        while not (tmp_path / "log").read_text().endswith("\n"):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_commands(bootstrap, tmp_path, "sleep 600 & echo $!; wait")
    pid = int((tmp_path / "log").read_text())
    deadline_s = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_second_place_is_asked_only_where_the_first_has_nothing(
    bootstrap, tmp_path
):
    assert run_commands(bootstrap, tmp_path, "echo one", "echo two") == "one\n"
    logged = run_commands(bootstrap, tmp_path, "exit 1", "echo three")
    assert logged == "one\nthree\n"


def test_torch_comes_from_the_configured_index_first(bootstrap):
    [_, _, torch, *_] = bootstrap.plan(Path("venv"), "cpu", dev=False)
    first, second = torch.commands
    assert not [word for word in first if "://" in word]
    assert bootstrap.TORCH_CPU_INDEX in second
    assert first[-1] == second[-1] == "torch==1.0+cpu"


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("Retrying after connection broken by NewConnectionError", "No index in reach"),
        ("error sending request for url: dns error", "No index in reach"),
        ("SSLError(... CERTIFICATE_VERIFY_FAILED ...)", "PIP_CERT"),
        ("invalid peer certificate: UnknownIssuer", "SSL_CERT_FILE"),
        ("Hash mismatch for `six`", "whole log is"),
    ],
)
def test_a_failed_step_shows_its_last_lines_and_advice(
    bootstrap, tmp_path, log, advice
):
    with pytest.raises(SystemExit) as caught:
        run_commands(bootstrap, tmp_path, f"seq 100; echo '{log}'; exit 2")
    message = str(caught.value)
    assert log in message
    assert advice in message
    assert message.count("\n") < 20


def test_settings_for_another_python_do_not_reach_the_installers_and_the_index_does(
    bootstrap, tmp_path, monkeypatch
):
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    for name in ("PIP_TARGET", "PIP_USER", "PIP_CONSTRAINT", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, "set")
    logged = run_commands(bootstrap, tmp_path, "env | grep =set$ | sort")
    assert logged == "PIP_INDEX_URL=set\nUV_DEFAULT_INDEX=set\n"


def test_gpu_is_found_by_its_device_file(bootstrap, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    (tmp_path / "nvidiactl").touch()
    assert bootstrap.find_device(tmp_path) == "cpu"
    (tmp_path / "nvidia3").touch()
    assert bootstrap.find_device(tmp_path) == "gpu"


@pytest.mark.parametrize(
    ("output", "status", "device"),
    [
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)", 0, "gpu"),
        ("NVIDIA-SMI has failed because it couldn't talk to the driver.", 9, "cpu"),
        ("No devices found.", 0, "cpu"),
    ],
)
def test_gpu_is_found_where_nvidia_smi_lists_one(
    bootstrap, tmp_path, monkeypatch, output, status, device
):
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "{output}"\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.find_device(tmp_path / "no-devices") == device


def test_an_unknown_device_is_refused(tmp_path):
    result = run_script(TETRIS_DEVICE="tpu", TETRIS_VENV=str(tmp_path / "venv"))
    assert result.returncode == 1
    assert "TETRIS_DEVICE is 'tpu': use cpu or gpu" in result.stderr


def test_an_old_python_gets_as_far_as_the_message_about_it(bootstrap, monkeypatch):
    ast.parse(SCRIPT.read_text("utf-8"), feature_version=(3, 8))
    monkeypatch.setattr(bootstrap, "PYTHON", "3.8")
    monkeypatch.setattr(sys, "argv", ["bootstrap.py"])
    with pytest.raises(SystemExit) as caught:
        bootstrap.main()
    assert "needs 3.11 or 3.12 or 3.13" in str(caught.value)
    assert "PYTHON=python3.12 make serve" in str(caught.value)
