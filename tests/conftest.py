"""What tests of every part share."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# As replicas have it: n-gram drafting would change OpenMP's number to that of cores,
# and engines started afterwards would compute wrong products. Numba reads it when it is
# first imported, and takes no other number once its threads run.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# The machine may stand still for a moment, and what CI finds it must find again.
settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")

TESTS = Path(__file__).parent

# Torch, Ray and vLLM warn about themselves: while they are imported, and where they are
# looked into all the time. A warning from our own modules is still an error.
IMPORTS_MAY_WARN = [f"ignore::{of}Warning" for of in ("Deprecation", "Future", "User")]
OTHERS_MAY_WARN = ["ignore", r"error:::(policies|serving|tests)\."]
MAY_WARN = {
    "engine": OTHERS_MAY_WARN,
    "front": OTHERS_MAY_WARN,
    "gpu_adapter": OTHERS_MAY_WARN,
    "helm": IMPORTS_MAY_WARN,
    "serving": IMPORTS_MAY_WARN,
}

# What helpers assert says what was found too, as in tests. A plugin's package is
# imported before this is read, and pytest warns of what comes too late.
HELPERS = [of for of in (f"tests.{part}" for part in MAY_WARN) if of not in sys.modules]
pytest.register_assert_rewrite(*HELPERS)

# Parts whose tests may start Ray, or are patient; the Makefile has them too.
ALONE = {"ray": ("helm", "serving"), "patient": ("engine", "gpu_adapter")}


def find_worker() -> tuple[int, int]:
    """Return the number of xdist's worker that this is, and how many there are."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    count = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    return int(name.removeprefix("gw")), int(count)


def pytest_configure(config: pytest.Config) -> None:
    """Give each of xdist's workers cores of its own, with all that it starts.

    Threads of engines that share two cores spend much of them waiting for each other.
    """
    worker, num_workers = find_worker()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[worker % len(cores) :: num_workers])


def run(
    *command: object, status: int | None = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command, by default in the repository; None is for any status."""
    args = [*map(str, command)]
    options = {"cwd": TESTS.parent, "timeout": 300} | options
    done = subprocess.run(args, capture_output=True, text=True, **options)
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A tab of Chromium; without one the test is skipped."""
    # Who needs none shall not wait for it.
    pictures = importlib.import_module("tests.pictures")
    with pictures.open_browser() as page:
        yield page


@pytest.fixture
def serve_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What is logged as Ray Serve, which hands nothing on once it was set up."""
    # A first import later would put other handlers in the place of these.
    importlib.import_module("ray.serve")
    logger = logging.getLogger("ray.serve")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, logger.name)
    return caplog


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        part = item.path.relative_to(TESTS).parts[0]
        for marker, parts in ALONE.items():
            if part not in parts and item.get_closest_marker(marker):
                raise pytest.UsageError(f"{item.nodeid}: make test looks in {parts}")
        if part in MAY_WARN:
            item.add_marker(pytest.mark.filterwarnings(*MAY_WARN[part]))
