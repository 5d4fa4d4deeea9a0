"""Setting up: what is detected, what counts as complete, and what errors say."""

import fcntl
import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / ".ci" / "bootstrap.py"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

PYPROJECT = """\
[build-system]
requires = ["setuptools"]
[project]
name = "example"
version = "{version}"
[tool.ruff]
line-length = {width}
"""


@pytest.fixture(scope="module")
def bootstrap():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name while it is executed.
    sys.modules["bootstrap"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bootstrap"]


@pytest.fixture
def environment(bootstrap, tmp_path):
    """A small project whose environment has been installed completely."""
    root, venv = tmp_path / "project", tmp_path / "venv"
    locks = root / "configs" / "requirements"
    locks.mkdir(parents=True)
    for name in ("cpu", "gpu", "dev"):
        (locks / f"{name}.txt").write_text(f"# {name}\nexample==1.0\n")
    (root / "pyproject.toml").write_text(PYPROJECT.format(version="1.0", width=88))
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    environment = bootstrap.Environment(root, venv, "cpu", PYTHON)
    for part in ("venv", "runtime", "dev"):
        bootstrap.stamp(environment, part)
    return environment


def missing(environment):
    """Return what an installation with development tools would have to do."""
    return environment.missing_parts(["runtime", "dev"])


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


def test_complete_environment_needs_nothing(environment):
    assert missing(environment) == []


def test_unfinished_installation_is_resumed(bootstrap, environment):
    bootstrap.write_state(environment, {"venv": PYTHON})
    assert missing(environment) == ["runtime", "dev"]


def test_a_change_of_the_pins_renews_only_the_part_they_belong_to(environment):
    environment.lock("dev").write_text("example==2.0\n")
    assert missing(environment) == ["dev"]
    environment.lock("cpu").write_text("example==2.0\n")
    assert missing(environment) == ["runtime", "dev"]


def test_pins_for_the_other_device_do_not_matter(environment):
    environment.lock("gpu").write_text("example==2.0\n")
    assert missing(environment) == []


def test_package_metadata_matters_and_linter_settings_do_not(environment):
    pyproject = environment.root / "pyproject.toml"
    pyproject.write_text(PYPROJECT.format(version="1.0", width=100))
    assert missing(environment) == []
    pyproject.write_text(PYPROJECT.format(version="1.1", width=100))
    assert missing(environment) == ["runtime"]


@pytest.mark.parametrize(
    "change", [{"device": "gpu"}, {"python": "3.99"}, {"venv": Path("/elsewhere")}]
)
def test_another_device_python_or_place_asks_for_everything(
    bootstrap, environment, change
):
    other = bootstrap.Environment(**{**vars(environment), **change})
    assert missing(other) == ["runtime", "dev"]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"identity": 1, "parts": {}}'])
def test_a_damaged_stamp_counts_as_none(bootstrap, environment, content):
    (environment.venv / bootstrap.STATE_FILE).write_text(content)
    assert bootstrap.read_state(environment.venv) is None
    assert missing(environment) == ["runtime", "dev"]


def test_an_environment_without_its_python_is_not_complete(environment):
    environment.executable.unlink()
    environment.executable.symlink_to("/nonexistent/python")
    assert missing(environment) == ["runtime", "dev"]


def test_half_copied_distributions_are_installed_again(bootstrap, environment):
    site = bootstrap.site_packages(environment)
    finished, begun, started = (
        site / f"{name}-1.0.dist-info" for name in ("finished", "begun", "started")
    )
    for info in (finished, begun, started):
        info.mkdir(parents=True)
        (info / "METADATA").touch()
    (finished / "RECORD").write_text("finished-1.0.dist-info/INSTALLER,sha256=x,4\n")
    # As a wheel brings it, before pip adds the lines of its own.
    (begun / "RECORD").write_text("begun-1.0.dist-info/METADATA,sha256=x,4\n")
    bootstrap.Pip(environment).discard_unfinished()
    assert list(site.iterdir()) == [finished]


def test_making_an_environment_anew_keeps_the_lock_it_is_made_under(
    bootstrap, environment
):
    (environment.venv / bootstrap.LOCK_FILE).touch()
    bootstrap.clear(environment.venv)
    left = {path.name for path in environment.venv.iterdir()}
    assert left == {bootstrap.LOCK_FILE, bootstrap.STATE_FILE}


def test_complete_environment_is_recognised_silently(bootstrap, tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    environment = bootstrap.Environment(ROOT, venv, "cpu", PYTHON)
    bootstrap.stamp(environment, "runtime")
    result = run_script(TETRIS_VENV=str(venv))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_folder_that_is_no_environment_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    result = run_script(TETRIS_VENV=str(tmp_path))
    assert result.returncode == 1
    assert "not a virtual environment" in result.stderr
    assert "TETRIS_VENV" in result.stderr
    assert (tmp_path / "thesis.tex").exists()


def test_an_environment_made_by_hand_must_have_the_same_python(bootstrap, environment):
    config = environment.venv / "pyvenv.cfg"
    config.write_text(f"home = /usr/bin\nversion = {PYTHON}.9\n")
    bootstrap.check_adoptable(environment)
    config.write_text("home = /usr/bin\nversion = 3.1.0\n")
    with pytest.raises(bootstrap.SetupError, match=r"by hand with Python 3\.1\.0"):
        bootstrap.check_adoptable(environment)


def wait_until_blocked(pid):
    """Wait until a process waits in the kernel.

    A signal that arrives just before such a wait begins does not end it.
    """
    deadline_s = time.monotonic() + 60
    while psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_set_up_waits_for_the_first_and_can_be_interrupted(
    bootstrap, tmp_path, signum
):
    with (tmp_path / bootstrap.LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT)],
            env={"PATH": "", "TETRIS_DEVICE": "cpu", "TETRIS_VENV": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout.readline().startswith("Waiting for another set-up")
            wait_until_blocked(process.pid)
            process.send_signal(signum)
            _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "run it again to carry on" in errors


def test_gpu_is_found_by_its_device_file(bootstrap, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    (tmp_path / "nvidiactl").touch()
    assert not bootstrap.gpu_present(tmp_path)
    (tmp_path / "nvidia3").touch()
    assert bootstrap.gpu_present(tmp_path)


@pytest.mark.parametrize(
    ("output", "status", "present"),
    [
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)", 0, True),
        ("NVIDIA-SMI has failed because it couldn't talk to the driver.", 9, False),
        ("No devices found.", 0, False),
    ],
)
def test_gpu_is_found_where_nvidia_smi_lists_one(
    bootstrap, tmp_path, monkeypatch, output, status, present
):
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "{output}"\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.gpu_present(tmp_path / "no-devices") is present


def test_device_can_be_chosen_by_hand(bootstrap):
    assert bootstrap.choose_device({"TETRIS_DEVICE": "gpu"}) == "gpu"
    with pytest.raises(bootstrap.SetupError, match="use cpu or gpu"):
        bootstrap.choose_device({"TETRIS_DEVICE": "tpu"})


@pytest.mark.parametrize("version", [(3, 11), (3, 12), (3, 13)])
def test_supported_pythons_are_used_as_they_are(bootstrap, version):
    assert bootstrap.check_python(version, ["python3.12"]) is None


@pytest.mark.parametrize("version", [(3, 8), (3, 10), (3, 14)])
def test_wrong_python_error_names_the_range_and_how_to_choose(bootstrap, version):
    with pytest.raises(bootstrap.SetupError) as caught:
        bootstrap.check_python(version, ["no-such-python"])
    assert "needs 3.11 to 3.13" in str(caught.value)
    assert "PYTHON=python3.12 make serve" in str(caught.value)


def test_wrong_python_gives_way_to_a_supported_one_that_runs(
    bootstrap, tmp_path, monkeypatch
):
    stub = tmp_path / "python3.13"
    stub.write_text("#!/bin/sh\nexit 127\n")
    stub.chmod(0o755)
    good = tmp_path / "python3.12"
    good.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = bootstrap.check_python((3, 9), ["python3.13", "python3.12"])
    assert found == str(good)


def test_other_systems_are_pointed_to_a_container(bootstrap):
    bootstrap.check_machine("linux", "x86_64")
    with pytest.raises(bootstrap.SetupError, match="Linux container"):
        bootstrap.check_machine("darwin", "arm64")


def test_missing_venv_module_error_names_the_debian_package(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(bootstrap.SetupError, match=rf"python{PYTHON}-venv"):
        bootstrap.check_venv_module()


def test_full_disk_is_noticed_before_anything_is_downloaded(
    bootstrap, environment, monkeypatch
):
    usage = SimpleNamespace(free=2e9)
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(bootstrap.SetupError, match=r"2\.0 GB of disk left"):
        bootstrap.check_disk(environment)


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("NewConnectionError: Failed to establish a connection", "cannot be reached"),
        ("SSLError(... CERTIFICATE_VERIFY_FAILED ...) Max retries", "PIP_CERT"),
        ("ERROR: No matching distribution found", "whole log is pip.log"),
    ],
)
def test_errors_of_pip_become_advice(bootstrap, log, advice):
    assert advice in bootstrap.explain(log, Path("pip.log"))


def test_settings_for_another_python_do_not_reach_pip(bootstrap):
    variables = {
        "PYTHONPATH": "/other",
        "VIRTUAL_ENV": "/other",
        "PIP_TARGET": "/other",
        "PIP_USER": "1",
        "PIP_INDEX_URL": "https://mirror.example",
        "HOME": "/home/user",
    }
    cleaned = bootstrap.clean_variables(variables)
    kept = variables.keys() & cleaned.keys()
    assert kept == {"PIP_INDEX_URL", "HOME"}


def test_pins_that_not_every_machine_needs_are_left_to_pip(bootstrap, environment):
    environment.lock("cpu").write_text(
        '# comment\na==1.0\nb==2.0 ; platform_machine == "x86_64"\n'
    )
    assert bootstrap.read_lock(environment.lock("cpu")) == {"a": "1.0"}


@pytest.mark.parametrize(
    ("device", "version", "pins"),
    [
        # Where a folder of wheels has 2.13.0+cpu as well, == would prefer that one.
        ("gpu", "2.13.0", ["torch===2.13.0"]),
        ("cpu", "2.13.0+cpu", ["torch==2.13.0+cpu"]),
    ],
)
def test_torch_comes_in_the_build_that_is_pinned(bootstrap, device, version, pins):
    asked = []
    pip = SimpleNamespace(
        environment=SimpleNamespace(device=device),
        install=asked.append,
        attempt=lambda pin, **_: asked.append(pin) or True,
    )
    bootstrap.install_torch(pip, version)
    assert asked == pins


def test_the_pinned_torch_of_either_device_is_found_in_its_lock(bootstrap):
    locks = ROOT / "configs" / "requirements"
    gpu, cpu = (bootstrap.read_lock(locks / f"{name}.txt") for name in ("gpu", "cpu"))
    assert cpu["torch"] == f"{gpu['torch']}+cpu"


def test_a_folder_that_cannot_be_made_is_named():
    result = run_script(TETRIS_VENV="/proc/venv")
    assert result.returncode == 1
    assert "cannot write to /proc/venv" in result.stderr
