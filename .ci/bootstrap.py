"""Make the project's virtual environment with uv, or do nothing if it is complete.

It needs a supported Python and nothing else. After an interruption the next run starts
over, but downloads are in the installers' caches.

TETRIS_VENV is where the environment lives; default .venv beside the Makefile.
TETRIS_DEVICE is cpu or gpu; default gpu if this machine gives access to an NVIDIA one.
"""

# An old Python must get as far as the message about its version: syntax of 3.8.
from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "configs" / "requirements"
PYTHON, PYTHONS = "{}.{}".format(*sys.version_info), ("3.11", "3.12", "3.13")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP, LOG = "tetris-bootstrap.json", "tetris-bootstrap.log"
# Settings of the caller's shell that would install something else or somewhere else.
UNWANTED = ("PIP_CONSTRAINT", "PIP_PREFIX", "PIP_TARGET", "PIP_USER", "UV_CONSTRAINT")
ADVICE = """No index in reach? Check HTTPS_PROXY and PIP_INDEX_URL, and run it again.
A certificate unknown? Set SSL_CERT_FILE and PIP_CERT to your proxy's CA bundle.
The disk full? Set TETRIS_VENV, and UV_CACHE_DIR for downloads, to another."""


def main() -> None:
    """Bring the environment up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loadtest", action="store_true", help="add load test tools")
    parser.add_argument("--dev", action="store_true", help="add those and the tests'")
    arguments = parser.parse_args()
    if PYTHON not in PYTHONS:
        sys.exit(
            f"This is Python {PYTHON}, and tetris-serve needs {' or '.join(PYTHONS)}.\n"
            "Choose one with, for example: PYTHON=python3.12 make serve"
        )
    device = os.environ.get("TETRIS_DEVICE") or find_device()
    if device not in ("cpu", "gpu"):
        sys.exit(f"TETRIS_DEVICE is {device!r}: use cpu or gpu")
    # Resolved, because one place under two names would be made anew each time.
    venv = Path(os.environ.get("TETRIS_VENV") or ROOT / ".venv").resolve()
    if len(str(venv).split()) > 1:
        # Ray hands a worker's Python to a shell as it is.
        sys.exit(f"{venv} has a blank in it: name another folder by TETRIS_VENV")
    extras = ["loadtest", "dev"][: 2 if arguments.dev else arguments.loadtest]
    # By default this would end this process and leave an installer at work.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        set_up(venv, device, extras)
    except OSError as error:
        sys.exit(f"Set-up failed: {error}. TETRIS_VENV can name another folder.")
    except KeyboardInterrupt:
        print("\nSet-up interrupted: run it again.", file=sys.stderr)
        sys.exit(130)


def find_device(devices: Path = Path("/dev")) -> str:
    """Return gpu if this process could use an NVIDIA one, or else cpu."""
    # The driver's folder in /proc is no proof: a container sees its host's.
    listed = subprocess.getoutput("nvidia-smi -L").startswith("GPU ")
    return "gpu" if listed or any(devices.glob("nvidia[0-9]*")) else "cpu"


def set_up(venv: Path, device: str, extras: list[str]) -> None:
    """Take all steps, which repeat nothing that is there, unless nothing is missing."""
    stamp, start_s = venv / STAMP, time.monotonic()
    place = f"{device}, Python {PYTHON}, in {venv}"
    locks = [LOCKS / f"{name}.txt" for name in ("uv", device, *extras)]
    files = [Path(__file__), ROOT / "pyproject.toml", *locks]
    wanted = [place, *(sha256(file.read_bytes()).hexdigest() for file in files)]
    if read_stamp(venv) >= set(wanted):
        return
    if venv.is_dir() and any(venv.iterdir()) and not stamp.exists():
        sys.exit(f"{venv} was not made by this: remove it, or set TETRIS_VENV")
    venv.mkdir(parents=True, exist_ok=True)
    print(f"Setting up {venv}, when no other set-up works on it", flush=True)
    with stamp.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken = read_stamp(venv)
        if taken >= set(wanted):
            return
        for name in ("bin", "include", "lib", "share") if place not in taken else ():
            shutil.rmtree(venv / name, ignore_errors=True)
        # Whatever stops a step may leave half a package: then the next run starts over.
        stamp.write_text("")
        (venv / LOG).write_text("")
        for title, *commands in plan(venv, device, locks):
            print(f"  {title} ", end="")
            run(commands, venv / LOG)
        stamp.write_text("\n".join(wanted))
    print(f"Set up in {time.monotonic() - start_s:.0f} s", flush=True)


def read_stamp(venv: Path) -> set[str]:
    """Return for what place, and from which files, an environment was made."""
    is_there = (venv / STAMP).exists() and (venv / "bin" / "python").exists()
    return set((venv / STAMP).read_text().splitlines() if is_there else ())


def plan(venv: Path, device: str, locks: list[Path]) -> list[tuple[Any, ...]]:
    """Return the steps: a title, and commands to try until one succeeds."""
    # With its own interpreter active, a removed environment cannot make itself.
    base = getattr(sys, "_base_executable", None) or sys.executable
    python = str(venv / "bin" / "python")
    pip = [python, "-Im", "pip", "install", "--no-deps", "--no-compile"]
    uv = [str(venv / "bin" / "uv"), "pip", "install", "--no-deps", "--python", python]
    hashed = ["--require-hashes", *(f"--requirement={lock}" for lock in locks)]
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    torch = re.findall(r'"(torch==[^"]+)"', project)[0] + "+cpu"
    # PyPI has no CPU builds: where the configured index has none, PyTorch's own.
    cpu = (torch, [*pip, torch], [*pip, "--index-url", TORCH_CPU_INDEX, torch])
    # What pip installed, but for a file that not every Python understands.
    files = str(venv / "lib" / f"python{PYTHON}" / "site-packages" / "torch")
    byte_code = [python, "-Im", "compileall", "-q", "-j", "0", "-x", "/testing/", files]
    return [
        ("Python", [base, "-Im", "venv", "--prompt", "tetris-serve", str(venv)]),
        ("uv", [*pip, *hashed[:2]]),
        *([cpu, ("its byte code", byte_code)] if device == "cpu" else []),
        # Else every start compiles 6,500 modules where Python may not write bytecode.
        ("pinned packages", [*uv, "--compile-bytecode", "--no-build", *hashed]),
        ("tetris-serve", [*uv, "--no-build-isolation", "--reinstall", "-e", str(ROOT)]),
    ]


def run(commands: list[list[str]], log: Path) -> None:
    """Run commands until one succeeds; show that one runs, and the time at the end."""
    env = {name: v for name, v in os.environ.items() if name not in UNWANTED}
    if "PIP_INDEX_URL" in env:
        env.setdefault("UV_DEFAULT_INDEX", env["PIP_INDEX_URL"])
    null, start_s = subprocess.DEVNULL, time.monotonic()
    for command in commands:
        with log.open("a") as out:
            child = subprocess.Popen(
                command, env=env, stdin=null, stdout=out, stderr=out
            )
        try:
            while child.poll() is None:
                print(".", end="", flush=True)
                time.sleep(0.5)
        finally:
            child.kill()
            child.wait()
        if child.returncode == 0:
            print(f" {time.monotonic() - start_s:.1f} s", flush=True)
            return
    last = "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:])
    sys.exit(f" failed:\n{last}\n{ADVICE}\nThe whole log is {log}")


if __name__ == "__main__":
    main()
