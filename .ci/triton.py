"""Unpack Triton's interpreter beside the virtual environment, for tests of GPU code.

On the CPU the environment has no Triton. Its interpreter runs kernels without a GPU,
which the tests of the GPU adapter use; being slow, and a CUDA build, it stays out of
every other process. The version is the one that configs/requirements/gpu.txt pins.
Where it cannot be had, the tests that need it say so and skip.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "configs" / "requirements" / "gpu.txt"

# A gigabyte is compilers, libraries and headers for GPUs.
WANTED = re.compile(r"triton/(?:.*\.py|_C/libtriton\.so)")


def main() -> int:
    """Make sure of Triton, or say why there is none."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    venv = Path(os.environ.get("TETRIS_VENV") or ROOT / ".venv").resolve()
    folder, version = venv / "triton", find_version()
    stamp = folder / "version"
    if stamp.exists() and stamp.read_text() == version:
        print(f"triton {version}: {folder}")
        return 0
    problem = unpack(venv / "bin" / "python", version, folder)
    if problem:
        print(
            "WARNING: no Triton, so the tests of the interpreted GPU runner skip.\n"
            f"  {problem}",
            file=sys.stderr,
        )
    else:
        # Last, so that an interrupted run begins again.
        stamp.write_text(version)
        print(f"triton {version}: {folder}")
    return 0


def find_version() -> str:
    """Return the pinned version."""
    found = re.search(r"^triton==([\w.]+)", PINS.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{PINS} pins no triton")
    return found[1]


def unpack(python: Path, version: str, folder: Path) -> str:
    """Download the wheel and unpack it; return why not, or an empty string."""
    if not python.exists():
        return "There is no environment yet: run .ci/bootstrap.py --dev first."
    with tempfile.TemporaryDirectory() as name:
        command = [str(python), "-Im", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", name, f"triton=={version}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            return f"pip download triton=={version}: {result.stderr.strip()}"
        shutil.rmtree(folder, ignore_errors=True)
        (path,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(
                folder, [file for file in wheel.namelist() if WANTED.fullmatch(file)]
            )
    return ""


if __name__ == "__main__":
    sys.exit(main())
