"""The front without a server around it, so that its parts can be looked at."""

import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

with warnings.catch_warnings():
    # Marks do not reach what is warned about while modules are imported.
    warnings.simplefilter("ignore")
    import serving.front.app  # noqa: F401 - the import is what is wanted
    from serving.replica import token_channel
    from tests.front.fake_fleet import Scene


@pytest.fixture(autouse=True)
def heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let relays look around more often, for they end no sooner."""
    monkeypatch.setattr(token_channel, "HEARTBEAT_S", 0.02)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    try:
        yield scene
    finally:
        await scene.close()
