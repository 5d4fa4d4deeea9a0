"""Make the project's virtual environment with uv, or do nothing if it is complete.

It needs a supported Python and nothing else. Each finished step is stamped, so after an
interruption the next run carries on.

TETRIS_VENV is where the environment lives; default .venv beside the Makefile.
TETRIS_DEVICE is cpu or gpu; default gpu if this machine gives access to an NVIDIA one.
"""

# An old Python must get as far as the message about its version: syntax of 3.8.
from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "configs" / "requirements"
PYTHON, PYTHONS = "{}.{}".format(*sys.version_info), ("3.11", "3.12", "3.13")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP, LOG = "tetris-bootstrap.json", "tetris-bootstrap.log"
# Settings of the caller's shell that would install something else or somewhere else.
UNWANTED = ("PIP_CONSTRAINT", "PIP_PREFIX", "PIP_TARGET", "PIP_USER", "UV_CONSTRAINT")
ADVICE = {
    "No space left|quota exceeded": "The disk is full: free some, or set TETRIS_VENV "
    "(and UV_CACHE_DIR, for downloads) to another.",
    "CERTIFICATE_VERIFY_FAILED|invalid peer certificate": "A certificate is not known: "
    "behind an intercepting proxy, set SSL_CERT_FILE and PIP_CERT to its CA bundle.",
    "connection broken by|error sending request|[Tt]imed? ?out": "No index in reach: "
    "check the connection, HTTPS_PROXY and PIP_INDEX_URL, and run it again.",
}


class Step(NamedTuple):
    """Commands to try until one succeeds, and a digest of this step and all before."""

    title: str
    digest: str
    commands: list[list[str]]


def main() -> None:
    """Bring the environment up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dev", action="store_true", help="add test and lint tools")
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
    steps = plan(venv, device, dev=arguments.dev)
    # By default these would end this process and leave an installer at work.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    try:
        if not is_finished(venv, steps[-1]):
            install(venv, steps)
    except OSError as error:
        sys.exit(f"Set-up failed: {error}. TETRIS_VENV can name another folder.")
    except KeyboardInterrupt:
        print("\nSet-up interrupted: run it again to carry on.", file=sys.stderr)
        sys.exit(130)


def find_device(devices: Path = Path("/dev")) -> str:
    """Return gpu if this process could use an NVIDIA one, or else cpu."""
    # The driver's folder in /proc is no proof: a container sees its host's.
    if any(devices.glob("nvidia[0-9]*")):
        return "gpu"
    return "gpu" if subprocess.getoutput("nvidia-smi -L").startswith("GPU ") else "cpu"


def plan(venv: Path, device: str, *, dev: bool) -> list[Step]:
    """Return the steps to a complete environment."""
    # With its own interpreter active, a removed environment cannot make itself.
    base = getattr(sys, "_base_executable", None) or sys.executable
    prompt = f"tetris-serve on {device}, Python {PYTHON}"
    python = str(venv / "bin" / "python")
    pip = [python, "-Im", "pip", "install", "--no-deps", "--no-compile"]
    uv = [str(venv / "bin" / "uv"), "pip", "install", "--no-deps", "--python", python]
    # Else every process of every start compiles 6,500 modules where Python may not
    # write bytecode, which containers often say: 9 of its 16 seconds.
    locked = [*uv, "--compile-bytecode", "--no-build", "--require-hashes"]
    locked.append("--requirements")
    own = [*uv, "--no-build-isolation", "--reinstall", "--editable", str(ROOT)]
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    torch = re.findall(r'"(torch==[^"]+)"', project)[0] + "+cpu"
    commands = {
        "Python": [[base, "-Im", "venv", "--prompt", prompt, str(venv)]],
        "uv": [[*pip, "--require-hashes", "--requirement", str(LOCKS / "uv.txt")]],
        # PyPI has no CPU builds: where the configured index has none, PyTorch's own.
        torch: [[*pip, torch], [*pip, "--index-url", TORCH_CPU_INDEX, torch]],
        "pinned packages": [[*locked, str(LOCKS / f"{device}.txt")]],
        "tetris-serve": [own],
        "tools for tests and checks": [[*locked, str(LOCKS / "dev.txt")]],
    }
    if device == "gpu":
        del commands[torch]
    if not dev:
        commands.popitem()
    steps, digest = [], hashlib.sha256()
    for title, alternatives in commands.items():
        source = Path(alternatives[0][-1])
        source = source / "pyproject.toml" if source == ROOT else source
        content = source.read_bytes() if source.is_file() else b""
        digest.update(repr(alternatives).encode() + content)
        steps.append(Step(title, digest.hexdigest(), alternatives))
    return steps


def is_finished(venv: Path, step: Step) -> bool:
    """Tell whether a step, and so all before it, was taken as the files now say."""
    stamp, python = venv / STAMP, venv / "bin" / "python"
    return python.exists() and stamp.exists() and step.digest in stamp.read_text()


def install(venv: Path, steps: list[Step]) -> None:
    """Take the steps that are missing, one line each, and stamp them."""
    stamp, start_s = venv / STAMP, time.monotonic()
    if venv.is_dir() and any(venv.iterdir()) and not stamp.exists():
        sys.exit(f"{venv} was not made by this: remove it, or set TETRIS_VENV")
    venv.mkdir(parents=True, exist_ok=True)
    with stamp.open("a") as taken:
        try:
            fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another set-up of {venv} ...", flush=True)
            fcntl.flock(taken, fcntl.LOCK_EX)
        # The other one may have left nothing to do.
        missing = [step for step in steps if not is_finished(venv, step)]
        if missing == steps:
            for name in ("bin", "include", "lib", "share"):
                shutil.rmtree(venv / name, ignore_errors=True)
        # Installers rewrite RECORD last, and then list INSTALLER, as no wheel does.
        for info in venv.glob("lib/python*/site-packages/*.dist-info"):
            record = info / "RECORD"
            if not record.exists() or "/INSTALLER," not in record.read_text("utf-8"):
                shutil.rmtree(info)
        (venv / LOG).write_text("")
        for step in missing:
            before = [one.digest for one in steps[: steps.index(step)]]
            # Whatever stops this step, neither it nor a later one counts as taken.
            taken.truncate(0)
            print(*before, file=taken, flush=True)
            print(f"  [{len(before) + 1}/{len(steps)}] {step.title} ", end="")
            run(step.commands, venv / LOG)
            print(step.digest, file=taken, flush=True)
    print(f"Set up {venv} in {time.monotonic() - start_s:.0f} s", flush=True)


def run(commands: list[list[str]], log: Path) -> None:
    """Run commands until one succeeds; show a dot a second, and the time at the end."""
    kept = {name: v for name, v in os.environ.items() if name not in UNWANTED}
    if "PIP_INDEX_URL" in kept:
        kept.setdefault("UV_DEFAULT_INDEX", kept["PIP_INDEX_URL"])
    null, start_s = subprocess.DEVNULL, time.monotonic()
    for command in commands:
        with log.open("a") as out:
            # In a group of its own, so that what it starts ends with it.
            child = subprocess.Popen(
                command, env=kept, stdin=null, stdout=out, stderr=out, process_group=0
            )
        try:
            while child.poll() is None:
                print(".", end="", flush=True)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=1)
        except KeyboardInterrupt:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        if child.returncode == 0:
            print(f" {time.monotonic() - start_s:.1f} s", flush=True)
            return
    last = "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:])
    advice = [text for pattern, text in ADVICE.items() if re.search(pattern, last)]
    sys.exit("\n".join([" failed:", last, *advice[:1], f"The whole log is {log}"]))


if __name__ == "__main__":
    main()
