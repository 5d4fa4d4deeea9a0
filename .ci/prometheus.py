"""Unpack Debian's Prometheus beside the virtual environment, for the tests of rules.

PyPI has no `promtool`. Debian's package is downloaded and unpacked into the
environment, so that nothing is installed on the machine and no service is started; that
needs apt but not root. Where it cannot be had, the tests that need it say so and skip.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "prometheus"


def main() -> int:
    """Make sure of promtool and prometheus, or say why there are none."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    venv = Path(os.environ.get("TETRIS_VENV") or ROOT / ".venv").resolve()
    folder = venv / "prometheus"
    own = folder / "usr" / "bin" / "promtool"
    found = str(own) if own.exists() else shutil.which("promtool")
    if found:
        print(f"promtool: {found}")
        return 0
    problem = unpack(folder)
    if problem:
        print(
            "WARNING: no promtool, so the tests of alert rules and dashboards skip.\n"
            f"  {problem}\n"
            "  Put promtool and prometheus of a Prometheus 2.42 or newer on PATH.",
            file=sys.stderr,
        )
    else:
        print(f"promtool: {own}")
    return 0


def unpack(folder: Path) -> str:
    """Download the package and unpack it; return why not, or an empty string."""
    programs = ("apt-get", "dpkg-deb")
    if not all(map(shutil.which, programs)):
        return "This is not Debian or Ubuntu: there is no apt-get."
    with tempfile.TemporaryDirectory() as name:
        download = ["apt-get", "download", "-qq", PACKAGE]
        problem = run(download, name)
        if problem and os.geteuid() == 0:
            # A fresh machine or container has no package lists yet.
            problem = run(["apt-get", "update", "-qq"], name) or run(download, name)
        if problem:
            return problem
        (package,) = Path(name).glob("*.deb")
        unpacked = Path(name) / "unpacked"
        problem = run(["dpkg-deb", "-x", str(package), str(unpacked)], name)
        if problem:
            return problem
        shutil.rmtree(folder, ignore_errors=True)
        shutil.move(unpacked, folder)
    return ""


def run(command: list[str], folder: str) -> str:
    """Run a command and return its complaint if it fails."""
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    if result.returncode:
        return f"{' '.join(command)}: {result.stderr.strip() or 'failed'}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
