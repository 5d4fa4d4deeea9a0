"""The front without a server around it, so that its parts can be looked at."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import pytest

with warnings.catch_warnings():
    # Marks do not reach what is warned about while modules are imported.
    warnings.simplefilter("ignore")
    import serving.front.app  # noqa: F401 - the import is what is wanted
    from serving.replica import token_channel
    from tests.front.fake_fleet import Scene

FRONT_DIR = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spare these tests the warnings of other people's code."""
    third_party_may_warn = ("ignore", r"error:::(policies|serving|tests)\.")
    for item in items:
        if FRONT_DIR in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(*third_party_may_warn))


@pytest.fixture(autouse=True)
def heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let relays look around more often, for they end no sooner."""
    monkeypatch.setattr(token_channel, "HEARTBEAT_S", 0.02)


@pytest.fixture
def anyio_backend() -> str:
    """What runs coroutines that are marked `anyio`."""
    return "asyncio"


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    try:
        yield scene
    finally:
        await scene.close()
