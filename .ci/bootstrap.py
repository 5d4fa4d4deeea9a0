"""Create the project's virtual environment, or do nothing if it is complete.

Used by every target of the Makefile and usable by itself. It needs a supported
Python and nothing else: no system package, no activated environment, no pip.

The environment is complete when its stamp matches the lock files, the package
metadata and the Python that would make it. The stamp is written last, so whatever
interrupts an installation, the next run finds no stamp and carries on from there.

Environment variables:
    TETRIS_VENV    where the environment lives; default .venv beside the Makefile
    TETRIS_DEVICE  cpu or gpu; default gpu if this machine gives access to an NVIDIA one
"""

# An old Python must get as far as the message about its version, so the syntax here
# stays at 3.8 and annotations are never evaluated.
from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = [(3, 11), (3, 12), (3, 13)]
OLDEST_PYTHON, NEWEST_PYTHON = SUPPORTED[0], SUPPORTED[-1]
MACHINES = ("x86_64", "aarch64")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# What a fresh environment takes at its largest, downloads included.
NEEDED_GB = {"cpu": 5, "gpu": 20}

STATE_FILE = "tetris-bootstrap.json"
LOCK_FILE = "tetris-bootstrap.lock"
LOG_FILE = "tetris-bootstrap.log"
OWN_FILES = {STATE_FILE, LOCK_FILE, LOG_FILE}

# Settings of the caller's shell that would point pip or Python somewhere else.
UNWANTED_VARIABLES = {
    "PYTHONHOME",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "PIP_CONSTRAINT",
    "PIP_PREFIX",
    "PIP_REQUIRE_VIRTUALENV",
    "PIP_ROOT",
    "PIP_TARGET",
    "PIP_USER",
}

DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
BAD_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED")
NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|"
    r"ProxyError|Max retries exceeded|Network is unreachable|"
    r"Temporary failure in name resolution|Connection (refused|reset|aborted)"
)


class SetupError(Exception):
    """The environment cannot be made; the message says what to do about it."""


@dataclass(frozen=True)
class Environment:
    """The virtual environment this run is to leave behind."""

    root: Path
    venv: Path
    device: str
    python: str

    @property
    def executable(self) -> Path:
        """The environment's own interpreter."""
        return self.venv / "bin" / "python"

    @property
    def identity(self) -> dict[str, str]:
        """What cannot be changed later: if this differs, it is made anew."""
        return {"device": self.device, "python": self.python, "path": str(self.venv)}

    def lock(self, name: str) -> Path:
        """Return the path of a pinned requirement file."""
        return self.root / "configs" / "requirements" / f"{name}.txt"

    def digests(self) -> dict[str, str]:
        """Return, for each part of the environment, a digest of all it is made from."""
        runtime = hashlib.sha256(self.lock(self.device).read_bytes())
        runtime.update(package_metadata(self.root / "pyproject.toml"))
        runtime.update(f"{self.python} {self.root}".encode())
        dev = hashlib.sha256(self.lock("dev").read_bytes())
        return {
            "venv": self.python,
            "runtime": runtime.hexdigest(),
            "dev": dev.hexdigest(),
        }

    def missing_parts(self, wanted: list[str]) -> list[str]:
        """Return the wanted parts that are not installed as the files now say."""
        if not self.executable.exists():
            return wanted
        state = read_state(self.venv)
        if state is None or state["identity"] != self.identity:
            return wanted
        digests = self.digests()
        return [part for part in wanted if state["parts"].get(part) != digests[part]]


def main(argv: list[str] | None = None) -> int:
    """Bring the environment up to date and return an exit status."""
    arguments = parse_arguments(argv)
    # By default SIGTERM would end this process and leave pip at work behind it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        names = [f"python{major}.{minor}" for major, minor in SUPPORTED]
        other = check_python(sys.version_info[:2], names)
        if other:
            os.execv(other, [other, "-I", __file__, *(argv or sys.argv[1:])])
        check_machine(sys.platform, platform.machine())
        environment = Environment(
            root=ROOT,
            # Resolved, because one place under two names would be made anew each time.
            venv=Path(os.environ.get("TETRIS_VENV") or ROOT / ".venv").resolve(),
            device=arguments.device or choose_device(os.environ),
            python="{}.{}".format(*sys.version_info),
        )
        wanted = ["runtime", "dev"] if arguments.dev else ["runtime"]
        if environment.missing_parts(wanted):
            with exclusive(environment.venv):
                # Another run may have finished the work while this one waited.
                install(environment, environment.missing_parts(wanted))
    except (SetupError, OSError) as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted: run it again to carry on", file=sys.stderr)
        return 130
    return 0


def say(text: str) -> None:
    """Print a line at once, so that it comes before what pip prints next."""
    print(text, flush=True)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="bootstrap.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dev", action="store_true", help="add test and lint tools")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="see TETRIS_DEVICE")
    return parser.parse_args(argv)


def check_python(version: tuple[int, ...], others: Iterable[str]) -> str | None:
    """Return None if this Python will do, or else another one that will.

    Raises:
        SetupError: Neither this one nor any of the others has builds of all packages.
    """
    if OLDEST_PYTHON <= version[:2] <= NEWEST_PYTHON:
        return None
    test = f"import sys; sys.exit(sys.version_info[:2] not in {SUPPORTED})"
    for name in others:
        program = shutil.which(name)
        if program and succeeds([program, "-I", "-c", test]):
            return program
    raise SetupError(
        "this is Python {}.{}, and tetris-serve needs {}.{} to {}.{}.\n".format(
            *version[:2], *OLDEST_PYTHON, *NEWEST_PYTHON
        )
        + "Choose an interpreter with, for example: PYTHON=python3.12 make serve"
    )


def check_machine(system: str, machine: str) -> None:
    """Refuse a system that the pinned packages have no builds for."""
    if system != "linux" or machine not in MACHINES:
        raise SetupError(
            f"vLLM has no builds for {system} on {machine}, only for Linux on "
            f"{' and '.join(MACHINES)}.\nElsewhere, use a Linux container or WSL 2."
        )


def choose_device(variables: Mapping[str, str]) -> str:
    """Return the device that TETRIS_DEVICE names, or else the one that is there."""
    device = variables.get("TETRIS_DEVICE") or ("gpu" if gpu_present() else "cpu")
    if device not in NEEDED_GB:
        raise SetupError(f"TETRIS_DEVICE is {device!r}: use cpu or gpu")
    return device


def gpu_present(devices: Path = Path("/dev")) -> bool:
    """Tell whether this process could use an NVIDIA GPU.

    The driver's folder in /proc is no proof: a container sees its host's, GPU or not.
    """
    if any(devices.glob("nvidia[0-9]*")):
        return True
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        result = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0 and result.stdout.startswith("GPU ")


def package_metadata(pyproject: Path) -> bytes:
    """Return what an editable install takes from pyproject.toml, in one form.

    The settings of linters and tests are left out: changing them asks for no install.
    """
    import tomllib  # Absent before Python 3.11, whose users must get a message.

    document = tomllib.loads(pyproject.read_text("utf-8"))
    build = document.get("tool", {}).get("setuptools", {})
    tables = [document["build-system"], document["project"], build]
    return json.dumps(tables, sort_keys=True).encode()


def read_state(venv: Path) -> dict[str, dict[str, str]] | None:
    """Return what this program has recorded about the environment, if anything."""
    try:
        state = json.loads((venv / STATE_FILE).read_text("utf-8"))
        return {"identity": dict(state["identity"]), "parts": dict(state["parts"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_state(environment: Environment, parts: Mapping[str, str]) -> None:
    """Record the environment's identity and its finished parts, atomically."""
    state = {"identity": environment.identity, "parts": parts}
    temporary = environment.venv / f"{STATE_FILE}.new"
    temporary.write_text(json.dumps(state, indent=2) + "\n", "utf-8")
    temporary.replace(environment.venv / STATE_FILE)


def stamp(environment: Environment, part: str) -> None:
    """Record that a part of the environment is finished."""
    state = read_state(environment.venv)
    parts = state["parts"] if state else {}
    write_state(environment, {**parts, part: environment.digests()[part]})


@contextlib.contextmanager
def exclusive(venv: Path) -> Iterator[None]:
    """Hold the environment's lock, so that two set-ups never work on it at once."""
    try:
        venv.mkdir(parents=True, exist_ok=True)
        file = (venv / LOCK_FILE).open("w")
    except OSError as error:
        raise SetupError(
            f"cannot write to {venv} ({error.strerror}): set TETRIS_VENV to another "
            "folder"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Waiting for another set-up of {venv} to finish ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(environment: Environment, missing: list[str]) -> None:
    """Install the missing parts and stamp each of them."""
    if not missing:
        return
    start_s = time.monotonic()
    say(
        f"Setting up {environment.venv}: Python {environment.python}, "
        f"{environment.device.upper()}"
    )
    stages = Stages(total=1 + 4 * ("runtime" in missing) + ("dev" in missing))
    with stages.next("Create the virtual environment"):
        create(environment)
    pip = Pip(environment)
    pip.discard_unfinished()
    if "runtime" in missing:
        install_runtime(pip, stages)
    if "dev" in missing:
        with stages.next("Install the tools for tests and checks"):
            pip.install("-r", str(environment.lock("dev")))
        stamp(environment, "dev")
    say(f"\nSet-up took {time.monotonic() - start_s:.0f} s\n")


def install_runtime(pip: Pip, stages: Stages) -> None:
    """Install what the server needs, torch first because it is the largest."""
    environment = pip.environment
    lock = environment.lock(environment.device)
    packages = read_lock(lock)
    with stages.next(f"Install torch {packages['torch']}"):
        install_torch(pip, packages["torch"])
    with stages.next(f"Install {len(packages)} pinned packages"):
        pip.install("-r", str(lock))
    with stages.next("Install tetris-serve itself"):
        pip.install("--no-build-isolation", "--editable", str(environment.root))
    with stages.next("Check the result"):
        check_result(environment, packages)
    stamp(environment, "runtime")


@dataclass
class Stages:
    """Numbers the stages of a set-up and says how long each of them took."""

    total: int
    started: int = 0

    @contextlib.contextmanager
    def next(self, title: str) -> Iterator[None]:
        """Announce a stage and, if it succeeds, its duration."""
        self.started += 1
        start_s = time.monotonic()
        say(f"\n[{self.started}/{self.total}] {title}")
        yield
        say(f"      done in {time.monotonic() - start_s:.1f} s")


def create(environment: Environment) -> None:
    """Make sure of a virtual environment with a working pip.

    Raises:
        SetupError: The folder holds something this program did not make and cannot
            use, or Python or the disk is not up to it.
    """
    venv = environment.venv
    state = read_state(venv)
    if state is None:
        if {path.name for path in venv.iterdir()} - OWN_FILES:
            check_adoptable(environment)
    elif state["identity"] != environment.identity:
        say(f"      {describe_change(state['identity'], environment.identity)}")
        clear(venv)
    elif "venv" not in state["parts"] or not environment.executable.exists():
        clear(venv)
    if not pip_works(environment):
        check_venv_module()
        check_disk(environment)
        write_state(environment, {})
        # With its own interpreter active, a removed environment cannot make itself.
        python = getattr(sys, "_base_executable", None) or sys.executable
        run([python, "-I", "-m", "venv", str(venv)], "venv failed")
    stamp(environment, "venv")


def check_adoptable(environment: Environment) -> None:
    """Accept a folder made by somebody else only as an environment that fits."""
    advice = "remove it, or set TETRIS_VENV to another folder"
    try:
        lines = (environment.venv / "pyvenv.cfg").read_text("utf-8").splitlines()
    except OSError:
        raise SetupError(
            f"{environment.venv} is not a virtual environment: {advice}"
        ) from None
    settings = dict(re.split(r"\s*=\s*", line, maxsplit=1) for line in lines if line)
    version = settings.get("version", settings.get("version_info", "unknown"))
    if not version.startswith(f"{environment.python}."):
        raise SetupError(
            f"{environment.venv} was made by hand with Python {version}, but this is "
            f"{environment.python}: {advice}"
        )


def describe_change(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Say why an environment has to be made anew."""
    changes = [
        f"{name} {old.get(name)} is now {value}"
        for name, value in new.items()
        if old.get(name) != value
    ]
    return f"making it anew: {', '.join(changes)}"


def clear(venv: Path) -> None:
    """Remove everything in the environment but this program's own files."""
    for path in venv.iterdir():
        if path.name in OWN_FILES:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def pip_works(environment: Environment) -> bool:
    """Tell whether the environment has an interpreter that finds its pip."""
    if not environment.executable.exists():
        return False
    return succeeds([str(environment.executable), "-I", "-m", "pip", "--version"])


def check_venv_module() -> None:
    """Say which package brings `venv` where the distribution has split it off."""
    if all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        return
    version = "{}.{}".format(*sys.version_info)
    raise SetupError(
        f"Python {version} at {sys.executable} comes without its venv module.\n"
        f"On Debian and Ubuntu: apt install python{version}-venv\n"
        "Or choose another interpreter: PYTHON=/path/to/python3.12 make serve"
    )


def check_disk(environment: Environment) -> None:
    """Refuse to begin an installation that the disk cannot hold."""
    free_gb = shutil.disk_usage(environment.venv).free / 1e9
    needed_gb = NEEDED_GB[environment.device]
    if free_gb < needed_gb:
        raise SetupError(
            f"{environment.venv} has {free_gb:.1f} GB of disk left and the set-up "
            f"needs {needed_gb}.\nFree some, or set TETRIS_VENV to a folder elsewhere."
        )


class Pip:
    """Runs the environment's pip without letting the caller's shell interfere."""

    def __init__(self, environment: Environment) -> None:
        """Start a new log; pip's progress itself goes to the terminal."""
        self.environment = environment
        self.log = environment.venv / LOG_FILE
        self.log.write_text("")
        # Beside the environment, because /tmp may be small and wheels are not.
        self.scratch = environment.venv / "tmp"

    def discard_unfinished(self) -> None:
        """Make pip install again what an interruption left half-copied.

        pip takes a distribution for installed once its metadata is there. It rewrites
        RECORD last, with a line for INSTALLER that no wheel brings along.
        """
        for info in site_packages(self.environment).glob("*.dist-info"):
            record = info / "RECORD"
            if not record.exists() or "/INSTALLER," not in record.read_text("utf-8"):
                shutil.rmtree(info)

    def install(self, *arguments: str) -> None:
        """Install exactly what is named, without dependencies.

        Raises:
            SetupError: pip failed; the message says why as far as its log tells.
        """
        if not self.attempt(*arguments):
            raise SetupError(explain(self.log.read_text("utf-8", "replace"), self.log))

    def attempt(self, *arguments: str, quiet: bool = False) -> bool:
        """Install like `install`, but return False if pip fails."""
        command = [
            *(str(self.environment.executable), "-I", "-m", "pip", "install"),
            *("--no-deps", "--log", str(self.log), *arguments),
        ]
        # An interrupted run may have left its downloads behind.
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        result = subprocess.run(
            command,
            env={**clean_variables(os.environ), "TMPDIR": str(self.scratch)},
            stderr=subprocess.DEVNULL if quiet else None,
            check=False,
        )
        shutil.rmtree(self.scratch, ignore_errors=True)
        return result.returncode == 0


def clean_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's variables without those that misdirect pip or Python."""
    kept = {k: v for k, v in variables.items() if k not in UNWANTED_VARIABLES}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def site_packages(environment: Environment) -> Path:
    """Return the folder that the environment's packages are installed in."""
    return environment.venv / "lib" / f"python{environment.python}" / "site-packages"


def install_torch(pip: Pip, version: str) -> None:
    """Install the pinned torch.

    PyPI has no CPU builds, so where the configured index is no richer than PyPI they
    come from PyTorch's own. Where it is richer, `==` would prefer its CPU build of the
    same version to the one for GPUs; `===` takes the version by the letter.
    """
    pin = f"torch=={version}"
    if pip.environment.device == "gpu":
        pip.install(f"torch==={version}")
    elif not pip.attempt(pin, quiet=True):
        say(f"      no {pin} on the configured index: trying {TORCH_CPU_INDEX}")
        pip.install("--index-url", TORCH_CPU_INDEX, pin)


def read_lock(path: Path) -> dict[str, str]:
    """Return the versions that a lock file pins whatever the Python and processor."""
    pins = (line.partition("==") for line in path.read_text("utf-8").splitlines())
    return {
        name: version
        for name, _, version in pins
        if version and not name.startswith("#") and ";" not in version
    }


def explain(log: str, log_file: Path) -> str:
    """Turn what pip logged into advice."""
    if DISK_FULL.search(log):
        return (
            "the disk is full. Free some space, or set TETRIS_VENV to a folder "
            "elsewhere, and run it again."
        )
    if BAD_CERTIFICATE.search(log):
        return (
            "a package index presented a certificate that Python does not trust. "
            "Behind an intercepting proxy, set PIP_CERT to its CA bundle."
        )
    if NO_NETWORK.search(log):
        return (
            "a package index cannot be reached. Check the connection, HTTPS_PROXY and "
            "PIP_INDEX_URL, and run it again: what has been installed is kept."
        )
    return f"pip ended with an error (above). Its whole log is {log_file}."


def check_result(environment: Environment, packages: Mapping[str, str]) -> None:
    """Check that every pin is installed and that the large ones can be imported."""
    import importlib.metadata  # Absent before Python 3.8; see package_metadata.

    folder = str(site_packages(environment))
    installed = {
        normalise(distribution.metadata["Name"]): distribution.version
        for distribution in importlib.metadata.distributions(path=[folder])
    }
    wrong = [
        f"{name} {version}"
        for name, version in packages.items()
        if installed.get(normalise(name)) != version
    ]
    if wrong:
        raise SetupError(f"not installed as pinned: {', '.join(wrong)}. Run it again.")
    imports = "import ray, torch, transformers, vllm"
    run(
        [str(environment.executable), "-I", "-c", imports],
        "the packages are installed but cannot be imported",
    )


def normalise(name: str) -> str:
    """Return a distribution's name in the form that compares equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def succeeds(command: list[str]) -> bool:
    """Tell whether a command, run in silence, ends with status 0."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run(command: list[str], failure: str) -> None:
    """Run a command in silence, and show what it printed if it fails."""
    result = subprocess.run(
        command,
        env=clean_variables(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SetupError(f"{failure}:\n{result.stdout.strip()}")


if __name__ == "__main__":
    sys.exit(main())
